"""Every frame, side by side with LangBot's own server in the same run.

Its server runs here, in this process, over a backend that runs commands as plain processes. Both servers are sent the same
frames and must answer with the same members, the same types and, where it is not a time or an id, the same values.
"""

import asyncio
import json
import logging

import pytest
import pytest_asyncio
import websockets
from aiohttp import web
from conftest import INSTANCE, TOKEN
from langbot_plugin.box.host_backend import HostProcessBackend
from langbot_plugin.box.runtime import BoxRuntime
from langbot_plugin.box.server import create_app

pytestmark = pytest.mark.asyncio

# What is each server's own: names, times, ids, and what its backend is.
OWN = {
    "backend_name",
    "backend_session_id",
    "created_at",
    "last_used_at",
    "started_at",
    "exited_at",
    "duration_ms",
    "name",
    "path",
    "stderr_preview",
}


class Plain(HostProcessBackend):
    """LangBot's backend without isolation, under a name that is not refused."""

    name = "docker"
    unsafe_direct_execution = False


@pytest_asyncio.fixture
async def theirs():
    runtime = BoxRuntime(logging.getLogger("theirs"), backends=[Plain(logging.getLogger("plain"))])
    await runtime.initialize()
    runner = web.AppRunner(create_app(runtime, control_token=TOKEN))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site._server.sockets[0].getsockname()[1]
    await runner.cleanup()
    await runtime.shutdown()
    await runtime.stop_background_reaper()


def spec(**members) -> dict:
    return {
        "cmd": "",
        "workdir": "/workspace",
        "timeout_sec": 30,
        "network": "off",
        "session_id": "s1",
        "env": {},
        "image": "rockchin/langbot-sandbox:latest",
        "host_path": None,
        "host_path_mode": "rw",
        "mount_path": "/workspace",
        "extra_mounts": [],
        "persistent": False,
        "cpus": 1.0,
        "memory_mb": 512,
        "pids_limit": 128,
        "read_only_rootfs": True,
        "workspace_quota_mb": 0,
        **members,
    }


def frames(workspace: str, root: str):
    """Name, action, data, context; a pause before it is a number."""
    here = {"instance_uuid": INSTANCE, "workspace_uuid": workspace, "placement_generation": 1}
    other = {**here, "instance_uuid": "other"}
    next_ = {**here, "placement_generation": 2}
    process = {"process_id": "p", "command": "cat", "args": [], "env": {"B": "1", "A": "2"}, "cwd": "/workspace", "memory_mb": 0}
    grant = {
        "instance_uuid": INSTANCE,
        "workspace_uuid": workspace,
        "execution_generation": 1,
        "entitlement_revision": 1,
        "expires_at": "2099-01-01T00:00:00Z",
        "max_sessions": 1,
        "max_managed_processes": 0,
    }
    yield "ping", "__ping", {}, None
    yield "ping of another instance", "__ping", {}, None
    yield "no such action", "box_fly", {}, here
    yield "no such action, no context", "box_fly", {}, None
    yield "heartbeat", "__heartbeat", {}, here
    yield "init", "box_init", {"local": {"host_root": root}, "unknown": {"x": 1}}, None
    yield "init again", "box_init", {"limits": {"max_sessions": 3}}, None
    yield "init, no integer", "box_init", {"limits": {"max_sessions": "3"}}, None
    yield "init, out of range", "box_init", {"limits": {"max_managed_processes": 5000}}, None
    yield "init, limits no object", "box_init", {"limits": [1]}, None
    yield "init, outside", "box_init", {"local": {"host_root": root, "default_workspace": root + "-other"}}, None
    yield "init, back", "box_init", {"local": {"host_root": root}}, None
    yield "health", "box_health", {}, None
    yield "health of another instance", "box_health", {}, other
    yield "backend info", "box_get_backend_info", {}, None
    yield "status", "box_status", {}, here
    yield "status without context", "box_status", {}, None
    yield "status of another instance", "box_status", {}, other
    yield "sessions", "box_get_sessions", {}, here
    yield "exec", "box_exec", spec(cmd="echo hi; echo err >&2"), here
    yield "exec fails", "box_exec", spec(cmd="exit 9"), here
    yield "exec trims", "box_exec", spec(cmd="printf ' \\n a b\\n\\n '"), here
    yield "exec clips", "box_exec", spec(cmd="head -c 1048581 /dev/zero | tr '\\0' x"), here
    yield "exec, empty", "box_exec", spec(cmd=" "), here
    yield "exec, unknown member", "box_exec", spec(cmd="true", surprise=1), here
    yield "exec, wrong type", "box_exec", spec(cmd="true", env=[1]), here
    yield "exec, no session", "box_exec", spec(cmd="true", session_id=" "), here
    yield "exec, no valid character", "box_exec", spec(cmd="true", session_id="//"), here
    for field, value in [("timeout_sec", 0), ("cpus", 0), ("memory_mb", 31), ("pids_limit", 0), ("workspace_quota_mb", -1)]:
        yield f"exec, {field}", "box_exec", spec(cmd="true", **{field: value}), here
    for field in ("workdir", "mount_path", "host_path"):
        yield f"exec, {field}", "box_exec", spec(cmd="true", **{field: "relative"}), here
    yield "exec, blocked", "box_exec", spec(cmd="true", session_id="blocked", host_path="/etc"), here
    yield "exec, conflict", "box_exec", spec(cmd="true", memory_mb=1024), here
    yield "exec, conflict of a truth", "box_exec", spec(cmd="true", persistent=True), here
    yield "exec, other context keys", "box_exec", spec(cmd="true"), {**here, "surprise": 1}
    yield "exec, generation 0", "box_exec", spec(cmd="true"), {**here, "placement_generation": 0}
    yield "session", "box_get_session", {"session_id": "s1"}, here
    yield "sessions, one", "box_get_sessions", {}, here
    yield "create", "box_create_session", spec(session_id="a b/c", persistent=True), here
    yield "create again", "box_create_session", spec(session_id="a b/c", persistent=True), here
    yield "create, conflict", "box_create_session", spec(session_id="a b/c"), here
    yield "create third", "box_create_session", spec(session_id="third"), here
    yield "create, full", "box_create_session", spec(session_id="fourth"), here
    yield "status, full", "box_status", {}, here
    yield "delete", "box_delete_session", {"session_id": "third"}, here
    yield "delete again", "box_delete_session", {"session_id": "third"}, here
    yield "delete nothing", "box_delete_session", {}, here
    yield "delete, no valid character", "box_delete_session", {"session_id": "/"}, here
    yield "session, none", "box_get_session", {"session_id": "none"}, here
    yield "session, key missing", "box_get_session", {}, here
    yield "process", "box_start_managed_process", {"session_id": "s1", "spec": process}, here
    yield "process, no spec", "box_start_managed_process", {"session_id": "s1"}, here
    yield "process, no command", "box_start_managed_process", {"session_id": "s1", "spec": {**process, "command": " "}}, here
    yield "process, relative", "box_start_managed_process", {"session_id": "s1", "spec": {**process, "cwd": "x"}}, here
    yield "process, no session", "box_start_managed_process", {"session_id": "none", "spec": process}, here
    yield "process told", "box_get_managed_process", {"session_id": "s1", "process_id": "p"}, here
    yield "process told, none", "box_get_managed_process", {"session_id": "s1"}, here
    yield "process told, no session", "box_get_managed_process", {"session_id": "none"}, here
    yield "session with a process", "box_get_session", {"session_id": "s1"}, here
    short = {**process, "process_id": "default", "command": "sh", "args": ["-c", "sleep 0.5; exit 4"]}
    yield "short process", "box_start_managed_process", {"session_id": "s1", "spec": short}, here
    yield 1.5
    yield "short process told", "box_get_managed_process", {"session_id": "s1"}, here
    yield "session with two processes", "box_get_session", {"session_id": "s1"}, here
    yield "process stopped", "box_stop_managed_process", {"session_id": "s1", "process_id": "p"}, here
    yield "process stopped again", "box_stop_managed_process", {"session_id": "s1", "process_id": "p"}, here
    yield "storage", "box_get_storage_analysis", {}, here
    yield "marker, bad name", "box_verify_shared_workspace", {"marker_name": "../x"}, None
    yield "marker, none", "box_verify_shared_workspace", {"marker_name": ".langbot-box-volume-probe-" + "a" * 32}, None
    yield "grant", "box_upsert_sandbox_admission_grant", grant, None
    yield "grant, wrong", "box_upsert_sandbox_admission_grant", {**grant, "max_sessions": True}, None
    yield "grant of another", "box_upsert_sandbox_admission_grant", {**grant, "instance_uuid": "other"}, None
    yield "revocation", "box_revoke_sandbox_admission_grant", {
        "instance_uuid": INSTANCE, "workspace_uuid": workspace, "entitlement_revision": 1
    }, None
    yield "timeout", "box_exec", spec(cmd="sleep 30", session_id="late", timeout_sec=1), here
    yield "sessions after the timeout", "box_get_sessions", {}, here
    yield "next placement", "box_get_sessions", {}, next_
    yield "stale", "box_get_sessions", {}, here
    yield "shutdown", "box_shutdown", {}, None
    yield "sessions after the shutdown", "box_get_sessions", {}, next_


async def conversation(port: int, workspace: str, root: str) -> dict[str, dict]:
    headers = {"X-LangBot-Instance-Id": INSTANCE, "X-LangBot-Box-Control-Token": TOKEN}
    answers = {}
    url = f"ws://127.0.0.1:{port}/rpc/ws"
    async with websockets.connect(url, additional_headers=headers, proxy=None, max_size=None) as socket:
        for number, frame in enumerate(frames(workspace, root)):
            if isinstance(frame, float):
                await asyncio.sleep(frame)
                continue
            name, action, data, context = frame
            request = {"seq_id": number, "action": action, "data": data}
            if context is not None:
                request["context"] = context
            await socket.send(json.dumps(request))
            answer = json.loads(await asyncio.wait_for(socket.recv(), 60))
            assert answer.pop("seq_id") == number, name
            answers[name] = answer
    return answers


def kind(value) -> str:
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def compare(name: str, ours, theirs, at: str = ""):
    """The same members, the same types, and the same values where they are not each server's own."""
    assert kind(ours) == kind(theirs), f"{name}: {at}: {ours!r} and {theirs!r}"
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), f"{name}: {at}"
        for member in theirs:
            if member not in OWN:
                compare(name, ours[member], theirs[member], f"{at}.{member}")
            else:
                assert kind(ours[member]) == kind(theirs[member]), f"{name}: {at}.{member}"
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), f"{name}: {at}: {ours} and {theirs}"
        for number, (one, other) in enumerate(zip(ours, theirs)):
            compare(name, one, other, f"{at}[{number}]")
    else:
        assert ours == theirs, f"{name}: {at}: {ours!r} and {theirs!r}"


# Texts that are pydantic's own: nobody reads them beyond the class.
BY_CLASS_ONLY = ("BoxValidationError: ", "ValidationError: ")


async def test_every_frame_is_answered_as_langbots_own_server_does(own_server, theirs, tmp_path, context):
    workspace = context.workspace_uuid + "-golden"
    root = str(tmp_path / "root")
    ours = await conversation(own_server().port, workspace, root)
    upstream = await conversation(theirs, workspace, root)
    assert set(ours) == set(upstream) and len(ours) > 70
    for name, answer in upstream.items():
        mine = ours[name]
        assert set(mine) == {"code", "message", "data", "chunk_status"}, name
        assert (mine["code"], mine["chunk_status"]) == (answer["code"], answer["chunk_status"]), f"{name}: {mine} {answer}"
        theirs_text, text = answer["message"], mine["message"]
        if theirs_text.startswith(BY_CLASS_ONLY) and "validation error" in theirs_text:
            prefix = theirs_text.split(": ")[0]
            assert text.startswith(prefix + ": "), f"{name}: {text!r} and {theirs_text!r}"
        else:
            assert text == theirs_text, name
        if name == "storage":
            assert set(mine["data"]) == set(answer["data"])
            entries = {entry["key"]: set(entry) for entry in answer["data"]["directories"]}
            assert {entry["key"]: set(entry) for entry in mine["data"]["directories"]} == entries
        else:
            for told in (mine["data"], answer["data"]):
                # Theirs come in no order.
                told.get("sessions", []).sort(key=lambda session: session["session_id"])
            compare(name, mine["data"], answer["data"])
