"""Every frame, compared with LangBot's own server in the same run.

LangBot's server runs in this process, over a backend that runs commands as plain processes. Both servers receive the same
frames and must answer with the same members, types and, except for times and ids, values.
"""

import asyncio
import contextlib
import datetime
import itertools
import json
import logging

import pytest
import pytest_asyncio
import websockets
from aiohttp import web
from conftest import INSTANCE, TOKEN, exists
from langbot_plugin.box.host_backend import HostProcessBackend
from langbot_plugin.box.runtime import BoxRuntime
from langbot_plugin.box.server import create_app

pytestmark = pytest.mark.asyncio

# Members that differ between the servers: names, times, ids and the backend.
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
    "details",
    "stderr_preview",
}


class Plain(HostProcessBackend):
    """LangBot's backend without isolation, under an accepted name."""

    name = "docker"
    unsafe_direct_execution = False

    async def exec(self, session, spec):
        # LangBot's storage probe would measure directories of this machine, which may take longer than its 15 s.
        for directory in ("/root/.cache", "/tmp"):
            spec = spec.model_copy(update={"cmd": spec.cmd.replace(f"|{directory}'", "|/nowhere'")})
        return await super().exec(session, spec)


@contextlib.asynccontextmanager
async def their_server(backend):
    runtime = BoxRuntime(logging.getLogger("theirs"), backends=[backend(logging.getLogger("plain"))])
    await runtime.initialize()
    runner = web.AppRunner(create_app(runtime, control_token=TOKEN))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site._server.sockets[0].getsockname()[1]
    await runner.cleanup()
    await runtime.shutdown()
    await runtime.stop_background_reaper()


@pytest_asyncio.fixture
async def theirs():
    async with their_server(Plain) as port:
        yield port


class Strict(Plain):
    """The same backend, reporting every guarantee that grants require."""

    name = "nsjail"

    async def get_readiness(self, *, workspace_path=None, strict=False):
        checks = ["available", "cgroup_v2", "namespace_isolation", "mount_isolation", "network_isolation"]
        quotas = ["hard_workspace_quota", "hard_read_only_mount_quota", "bounded_ephemeral_storage", "inode_quota"]
        return dict.fromkeys(checks + quotas, True)


@pytest_asyncio.fixture
async def theirs_granting(monkeypatch):
    monkeypatch.setenv("LANGBOT_BOX_ALLOW_UNSAFE_SOFT_STORAGE_LIMITS", "1")
    async with their_server(Strict) as port:
        yield port


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
    """Yields name, action, data and context; a leading condition means to repeat the request until it holds."""
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
    yield "ping of another instance", "__ping", {}, other
    yield "ping, no context", "__ping", {}, {"instance_uuid": INSTANCE}
    yield from control_frames(here, other)
    yield from file_chunks(other)
    yield from malformed(here)
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
    yield "process get", "box_get_managed_process", {"session_id": "s1", "process_id": "p"}, here
    yield "process get, none", "box_get_managed_process", {"session_id": "s1"}, here
    yield "process get, no session", "box_get_managed_process", {"session_id": "none"}, here
    yield "session with a process", "box_get_session", {"session_id": "s1"}, here
    short = {**process, "process_id": "default", "command": "sh", "args": ["-c", "sleep 0.5; exit 4"]}
    yield "short process", "box_start_managed_process", {"session_id": "s1", "spec": short}, here
    yield has_exited, "short process get", "box_get_managed_process", {"session_id": "s1"}, here
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


def has_exited(answer: dict) -> bool:
    return answer["data"]["status"] == "exited"


def control_frames(here: dict, other: dict):
    """Requests about other requests, none of which is running."""
    yield "cancel without context", "__cancel_action", {"seq_id": 1}, None
    yield "cancel of another instance", "__cancel_action", {"seq_id": 1}, other
    yield "cancel nothing", "__cancel_action", {"seq_id": 1}, here
    yield "cancel, no number", "__cancel_action", {}, here
    yield "cancel, a text", "__cancel_action", {"seq_id": "1"}, here
    yield "cancel, a truth", "__cancel_action", {"seq_id": True}, here
    yield "cancel, no number nor context", "__cancel_action", {}, None
    yield "acknowledged without context", "__stream_ack", {"seq_id": 1, "index": 1}, None
    yield "acknowledged nothing", "__stream_ack", {"seq_id": 1, "index": 1}, here
    yield "acknowledged, below zero", "__stream_ack", {"seq_id": 1, "index": -1}, here
    yield "acknowledged, no index", "__stream_ack", {"seq_id": 1}, here


def file_chunks(other: dict):
    """Chunks of files, which are sent before the call that needs them."""
    key = "ft1_" + "0" * 64
    piece = {"file_key": key, "file_length": 2, "chunk_base64": "YQ==", "chunk_index": 0, "chunk_amount": 2, "chunk_size": 1}
    yield "piece", "__file_chunk", piece, None
    yield "piece again", "__file_chunk", piece, None
    yield "piece of another instance", "__file_chunk", piece, other
    yield "piece, of another amount", "__file_chunk", {**piece, "chunk_index": 1, "chunk_amount": 3}, None
    yield "piece, of nothing", "__file_chunk", {**piece, "file_key": "ft1_" + "1" * 64, "chunk_index": 1}, None
    for name in ("chunk_base64", "chunk_index", "chunk_amount", "file_key"):
        missing = {member: value for member, value in piece.items() if member != name}
        yield f"piece without {name}", "__file_chunk", missing, None
    yield "piece beyond the last", "__file_chunk", {**piece, "chunk_index": 2}, None
    yield "piece, no number", "__file_chunk", {**piece, "chunk_index": "0"}, None
    yield "piece, too long", "__file_chunk", {**piece, "chunk_base64": "a" * 21852}, None
    for key in ("../x", "a/b", "", "a b", ".x", "x" * 256, 7):
        yield f"piece, bad key {key}", "__file_chunk", {**piece, "file_key": key}, None


def malformed(here: dict):
    """Frames with members of the wrong type."""
    yield "no data", "box_get_sessions", {}, here, {"data": None}
    yield "data no object", "box_get_sessions", {}, here, {"data": [1]}
    yield "action no text", "box_get_sessions", {}, here, {"action": 7}
    yield "another flow control", "box_get_sessions", {}, here, {"stream_flow_control": 2}
    yield "context no object", "box_get_sessions", {}, here, {"context": "here"}
    yield "context null", "box_get_sessions", {}, None, {"context": None}
    yield "a long name", "box_" + "x" * 290, {}, here


def granted(workspace: str, root: str):
    """Requests to a server that requires grants."""
    here = {"instance_uuid": INSTANCE, "workspace_uuid": workspace, "placement_generation": 1}
    next_ = {**here, "placement_generation": 2}
    soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60)
    grant = {
        "instance_uuid": INSTANCE,
        "workspace_uuid": workspace,
        "execution_generation": 1,
        "entitlement_revision": 3,
        "expires_at": soon.isoformat(),
        "max_sessions": 1,
        "max_managed_processes": 0,
    }
    install, revoke = "box_upsert_sandbox_admission_grant", "box_revoke_sandbox_admission_grant"
    yield "init", "box_init", {"admission": {"required": True}, "local": {"host_root": root}}, None
    yield "health", "box_health", {}, None
    yield "status without a grant", "box_status", {}, here
    yield "exec without a grant", "box_exec", spec(cmd="true", session_id="global"), here
    yield "sessions without a grant", "box_get_sessions", {}, here
    yield "storage without a grant", "box_get_storage_analysis", {}, here
    for name, members in {
        "expired": {"expires_at": "2020-01-01T00:00:00Z"},
        "too long": {"expires_at": "2099-01-01T00:00:00Z"},
        "two sessions": {"max_sessions": 2},
        "a process": {"max_managed_processes": 1},
        "no zone": {"expires_at": "2099-01-01T00:00:00"},
        "surprise": {"surprise": 1},
        "below zero": {"max_sessions": -1},
        "revision 0": {"entitlement_revision": 0},
    }.items():
        yield f"grant, {name}", install, {**grant, **members}, None
    yield "grant", install, grant, None
    yield "grant again, shorter", install, {**grant, "expires_at": (soon - datetime.timedelta(seconds=9)).isoformat()}, None
    yield "grant, older revision", install, {**grant, "entitlement_revision": 2}, None
    yield "grant, other limits", install, {**grant, "max_sessions": 0}, None
    yield "exec", "box_exec", spec(cmd="echo hi", session_id="whatever", memory_mb=4096, cpus=3), here
    yield "session", "box_get_session", {"session_id": "global"}, here
    yield "session of another name", "box_get_session", {"session_id": "whatever"}, here
    yield "sessions", "box_get_sessions", {}, here
    yield "create", "box_create_session", spec(session_id="again"), here
    yield "status", "box_status", {}, here
    yield "exec, network", "box_exec", spec(cmd="true", network="on"), here
    yield "exec, mount path", "box_exec", spec(cmd="true", mount_path="/x", workdir="/x"), here
    yield "exec, workdir", "box_exec", spec(cmd="true", workdir="/workspacex"), here
    yield "exec, host path", "box_exec", spec(cmd="true", host_path=root), here
    here_mount = {"host_path": root, "mount_path": "/workspace/m", "mode": "ro"}
    for name, members in {
        "writable": {"mode": "rw"},
        "elsewhere": {"mount_path": "/mnt/x"},
        "not there": {"host_path": root + "/none"},
        "outside": {"host_path": "/usr"},
        "manifest without digest": {"manifest_path": root + "/m"},
        "no manifest there": {"manifest_path": root + "/m", "content_digest": "sha256:" + "0" * 64},
    }.items():
        yield f"exec, mount {name}", "box_exec", spec(cmd="true", extra_mounts=[{**here_mount, **members}]), here
    yield "exec, mounts in one place", "box_exec", spec(cmd="true", extra_mounts=[here_mount, here_mount]), here
    yield "process", "box_start_managed_process", {"session_id": "global", "spec": {"command": "true"}}, here
    yield "grant of the next placement", install, {**grant, "execution_generation": 2, "entitlement_revision": 4}, None
    yield "sessions of the older", "box_get_sessions", {}, here
    yield "sessions of the next", "box_get_sessions", {}, next_
    revocation = {"instance_uuid": INSTANCE, "workspace_uuid": workspace, "entitlement_revision": 4}
    yield "revoked too late", revoke, {**revocation, "entitlement_revision": 3}, None
    yield "revoked", revoke, revocation, None
    yield "sessions after it was revoked", "box_get_sessions", {}, next_
    yield "grant that was revoked", install, {**grant, "execution_generation": 2, "entitlement_revision": 4}, None
    yield "init, not required any more", "box_init", {"admission": {"required": False}}, None
    yield "exec then", "box_exec", spec(cmd="true"), next_
    yield "grant then", install, {**grant, "execution_generation": 2, "entitlement_revision": 5}, None


async def conversation(port: int, frames) -> dict[str, dict]:
    headers = {"X-LangBot-Instance-Id": INSTANCE, "X-LangBot-Box-Control-Token": TOKEN}
    answers = {}
    url = f"ws://127.0.0.1:{port}/rpc/ws"
    async with websockets.connect(url, additional_headers=headers, proxy=None, max_size=None) as socket:
        numbers = itertools.count()
        for frame in frames:
            until, frame = (frame[0], frame[1:]) if callable(frame[0]) else (None, frame)
            name, action, data, context, *wrong = frame
            while True:
                number = next(numbers)
                request = {"seq_id": number, "action": action, "data": data}
                if context is not None:
                    request["context"] = context
                for members in wrong:
                    request.update(members)
                await socket.send(json.dumps(request))
                answer = json.loads(await asyncio.wait_for(socket.recv(), 60))
                assert answer.pop("seq_id") == number, name
                if until is None or until(answer):
                    break
                await asyncio.sleep(0.05)
            answers[name] = answer
    return answers


def kind(value) -> str:
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def compare(name: str, ours, theirs, at: str = ""):
    """Compares members, types and, except for OWN, values."""
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


# Texts of pydantic: clients read only the class.
BY_CLASS_ONLY = ("BoxValidationError: ", "ValidationError: ")


def same(ours: dict[str, dict], upstream: dict[str, dict]):
    """Compares every frame and reports all differences."""
    assert set(ours) == set(upstream)
    differences = []
    for name, answer in upstream.items():
        try:
            same_answer(name, ours[name], answer)
        except AssertionError as difference:
            differences.append(str(difference).splitlines()[0])
    assert not differences, "\n".join(differences)


def same_answer(name: str, ours: dict, answer: dict):
    assert set(ours) == {"code", "message", "data", "chunk_status"}, name
    theirs_text, text = answer["message"], ours["message"]
    if theirs_text.startswith(BY_CLASS_ONLY) and "validation error" in theirs_text:
        prefix = theirs_text.split(": ")[0]
        assert text.startswith(prefix + ": "), f"{name}: {text!r} and {theirs_text!r}"
    else:
        assert text == theirs_text, f"{name}: {text!r} and {theirs_text!r}"
    assert (ours["code"], ours["chunk_status"]) == (answer["code"], answer["chunk_status"]), name
    if name.startswith("storage") and "directories" in answer["data"]:
        assert set(ours["data"]) == set(answer["data"]), name
        entries = {entry["key"]: set(entry) for entry in answer["data"]["directories"]}
        assert {entry["key"]: set(entry) for entry in ours["data"]["directories"]} == entries, name
    else:
        for data in (ours["data"], answer["data"]):
            # LangBot's server returns them in no particular order.
            data.get("sessions", []).sort(key=lambda session: session["session_id"])
        compare(name, ours["data"], answer["data"])


async def test_every_frame_is_answered_as_langbots_own_server_does(own_server, theirs, tmp_path, context):
    workspace = context.workspace_uuid + "-golden"
    root = str(tmp_path / "root")
    ours = await conversation(own_server().port, frames(workspace, root))
    upstream = await conversation(theirs, frames(workspace, root))
    assert len(ours) > 110
    same(ours, upstream)


async def test_with_grants_every_frame_is_answered_as_langbots_own_server_does(own_server, theirs_granting, tmp_path, context):
    workspace = context.workspace_uuid + "-granted"
    server = own_server(env={"LANGBOT_BOX_ALLOW_UNSAFE_SOFT_STORAGE_LIMITS": "1"})
    # One list for both servers, because it contains the current time.
    requests = list(granted(workspace, str(tmp_path / "root")))
    ours = await conversation(server.port, requests)
    upstream = await conversation(theirs_granting, requests)
    assert len(ours) > 45
    same(ours, upstream)


@pytest.mark.parametrize("side", ["ours", "theirs"])
async def test_a_call_is_cancelled_from_its_own_workspace_only(request, theirs, server, tmp_path, context, side):
    """Runs the same conversation with both servers: a cancelled call is never answered."""
    port = server.port if side == "ours" else theirs
    here = context.model_dump(exclude_none=True)
    elsewhere = {**here, "workspace_uuid": here["workspace_uuid"] + "-other"}
    headers = {"X-LangBot-Instance-Id": INSTANCE, "X-LangBot-Box-Control-Token": TOKEN}
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    mark = spec(cmd="touch started; sleep 1.5; echo still > f", host_path=str(workspace))
    async with websockets.connect(f"ws://127.0.0.1:{port}/rpc/ws", additional_headers=headers, proxy=None) as socket:

        async def ask(seq_id, action, data, context):
            await socket.send(json.dumps({"seq_id": seq_id, "action": action, "data": data, "context": context}))
            answer = json.loads(await asyncio.wait_for(socket.recv(), 60))
            assert (answer["seq_id"], answer["code"]) == (seq_id, 0), answer
            return answer["data"]

        await ask(1, "box_exec", spec(cmd="true", host_path=str(workspace)), here)
        await socket.send(json.dumps({"seq_id": 2, "action": "box_exec", "data": mark, "context": here}))
        await exists(workspace / "started")
        assert await ask(3, "__cancel_action", {"seq_id": 2}, elsewhere) == {"cancelled": False}
        assert await ask(4, "__cancel_action", {"seq_id": 2}, here) == {"cancelled": True}
        # The cancelled call has ended, so the box is free again.
        assert (await ask(6, "box_exec", spec(cmd="sleep 1.5; ls", host_path=str(workspace)), here))["stdout"] == "started"
        newer = {**here, "placement_generation": 2}
        assert await ask(7, "__cancel_action", {"seq_id": 2}, newer) == {"cancelled": False}
        await socket.send(json.dumps({"seq_id": 8, "action": "box_get_sessions", "data": {}, "context": here}))
        answer = json.loads(await asyncio.wait_for(socket.recv(), 60))
        assert answer["message"] == "PermissionError: Stale Box placement generation"
