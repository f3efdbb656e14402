"""Connections: authentication, lost connections and limits."""

import asyncio
import json
import subprocess
import urllib.error
import urllib.request

import pytest
import websockets
from conftest import BOXD, INSTANCE, TOKEN, Server, connected, environment, free_port, spec, stdio, websocket
from langbot_plugin.box.errors import BoxError
from langbot_plugin.entities.io.actions.enums import CommonAction
from waiting import eventually_async

pytestmark = pytest.mark.asyncio


def raw(server: Server, headers=None, **options):
    headers = server.headers() if headers is None else headers
    return websockets.connect(server.url, additional_headers=headers, proxy=None, max_size=None, **options)


async def ask(socket, frame: dict) -> dict:
    await socket.send(json.dumps(frame))
    return json.loads(await asyncio.wait_for(socket.recv(), 60))


async def test_token_and_instance_are_required(server):
    async with raw(server):
        pass
    for headers in (
        {},
        {"X-LangBot-Instance-Id": INSTANCE},
        {"X-LangBot-Box-Control-Token": TOKEN},
        {"X-LangBot-Instance-Id": "another", "X-LangBot-Box-Control-Token": TOKEN},
        {"X-LangBot-Instance-Id": "not valid!", "X-LangBot-Box-Control-Token": TOKEN},
        {"X-LangBot-Instance-Id": INSTANCE, "X-LangBot-Box-Control-Token": TOKEN[:-1]},
    ):
        with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
            async with raw(server, headers):
                pass
        assert refused.value.response.status_code == 401, headers


async def test_only_the_configured_instance_is_served(own_server):
    server = own_server(env={"LANGBOT_BOX_TRUSTED_INSTANCE_UUID": "named"})
    with pytest.raises(websockets.exceptions.InvalidStatus):
        async with raw(server):
            pass
    async with raw(server, server.headers("named")):
        pass


async def test_a_remote_listener_requires_a_token(tmp_path):
    arguments = [BOXD, "serve", "--langbot=0.0.0.0:0", "--state-dir", str(tmp_path / "s")]
    refused = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=30)
    assert refused.returncode != 0
    assert "LANGBOT_BOX_CONTROL_TOKEN" in refused.stderr
    short = environment(LANGBOT_BOX_CONTROL_TOKEN="too short")
    refused = subprocess.run(arguments, env=short, capture_output=True, text=True, timeout=30)
    assert refused.returncode != 0
    assert "LANGBOT_BOX_CONTROL_TOKEN" in refused.stderr and "too short" not in refused.stderr


async def test_an_invalid_configuration_variable_stops_the_start(own_server, tmp_path):
    root = tmp_path / "data"
    own_server(env={"LANGBOT_BOX_CONFIG": json.dumps({"local": {"host_root": str(root)}})})
    assert (root / "default").is_dir()
    own_server(env={"LANGBOT_BOX_CONFIG": "no JSON"})
    for config, text in [
        ({"backend": "host"}, "host backend requires LANGBOT_BOX_CONTROL_TOKEN"),
        ({"limits": {"max_sessions": "x"}}, "box.limits.max_sessions must be an integer"),
    ]:
        arguments = [BOXD, "serve", "--langbot=127.0.0.1:0", "--state-dir", str(tmp_path / "s")]
        env = environment(LANGBOT_BOX_CONFIG=json.dumps(config))
        refused = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=30)
        assert refused.returncode != 0 and text in refused.stderr, refused.stderr


async def test_a_binary_message_closes_the_connection(server):
    async with raw(server) as socket:
        await socket.send(b'{"seq_id": 1, "action": "__ping", "data": {}}')
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            await asyncio.wait_for(socket.recv(), 30)


async def test_stdio_requires_the_instance_variable(tmp_path):
    arguments = [BOXD, "stdio", "--langbot"]
    refused = subprocess.run(arguments, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert refused.returncode != 0
    assert b"LANGBOT_BOX_TRUSTED_INSTANCE_UUID" in refused.stderr


async def test_only_health_is_public(server):
    def get(path: str):
        try:
            with urllib.request.urlopen(server.relay_url + path, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    status, health = await asyncio.to_thread(get, "/healthz")
    assert (status, health["live"]) == (200, True)
    assert {"sessions", "managed_processes", "completed_processes"} <= set(health["resources"])
    status, ready = await asyncio.to_thread(get, "/readyz")
    assert (status, ready["ready"], ready["mode"]) == (200, True, "standard")
    assert ready["backend"] == {"name": "native", "available": True}
    for path in ("/metrics", "/version", "/boxes/b/port/80/"):
        assert (await asyncio.to_thread(get, path))[0] == 404, path


async def test_messages_that_are_not_frames_are_ignored(server):
    async with raw(server) as socket:
        for junk in ("", "not json", "[1]", '{"neither": 1}', '"text"'):
            await socket.send(junk)
        answer = await ask(socket, {"seq_id": 5, "action": "__ping", "data": {}})
        assert answer == {"seq_id": 5, "code": 0, "message": "success", "data": {}, "chunk_status": "continue"}


async def test_a_fragmented_message_is_one_message(server, context):
    frame = {
        "seq_id": 1,
        "action": "box_exec",
        "data": {**spec().model_dump(mode="json"), "cmd": "echo " + "x" * 200_000 + " | wc -c"},
        "context": context.model_dump(exclude_none=True),
    }
    text = json.dumps(frame)
    async with raw(server) as socket:
        await socket.send([text[at : at + 65_536] for at in range(0, len(text), 65_536)] + [""])
        answer = json.loads(await asyncio.wait_for(socket.recv(), 60))
        assert (answer["code"], answer["data"]["stdout"]) == (0, "200001")


async def test_an_oversized_message_is_refused_and_the_connection_stays_open(server):
    async with raw(server) as socket:
        await socket.send(json.dumps({"seq_id": 9, "action": "__ping", "data": {"x": "y" * (17 << 20)}}))
        answer = json.loads(await asyncio.wait_for(socket.recv(), 60))
        assert (answer["seq_id"], answer["code"]) == (9, 1)
        assert answer["message"] == "ValueError: Runtime message exceeds 16777216 byte limit"
        assert (await ask(socket, {"seq_id": 10, "action": "__ping", "data": {}}))["code"] == 0


async def test_the_129th_concurrent_call_is_refused(server, context):
    async with raw(server, close_timeout=0.2) as socket:
        members = spec(cmd="sleep 1", session_id="busy").model_dump(mode="json")
        frame = {"action": "box_exec", "data": members, "context": context.model_dump(exclude_none=True)}
        for number in range(129):
            await socket.send(json.dumps({**frame, "seq_id": number}))
        first = json.loads(await asyncio.wait_for(socket.recv(), 60))
        assert (first["seq_id"], first["code"]) == (128, 1)
        assert first["message"] == "Runtime connection is busy (max 128 concurrent actions)"
        assert (await ask(socket, {"seq_id": 500, "action": "__ping", "data": {}}))["code"] == 0
    async with connected(websocket(server)) as client:
        # A newer placement ends the remaining calls, so no client has to wait for them.
        newer = context.model_copy(update={"placement_generation": 2})
        assert await client.get_sessions(action_context=newer) == []


async def test_sessions_and_processes_outlive_a_cut_connection(server, context):
    from langbot_plugin.box.models import BoxManagedProcessSpec

    async with connected(websocket(server)) as client:
        await client.execute(spec(cmd="echo kept > /workspace/f"), action_context=context)
        sleeps = BoxManagedProcessSpec(command="sleep", args=["60"])
        await client.start_managed_process("s1", sleeps, action_context=context)
        client.handler.conn.websocket.transport.abort()
        with pytest.raises(BoxError, match="Connection closed"):
            await client.get_sessions(action_context=context)
    async with connected(websocket(server)) as client:
        assert (await client.execute(spec(cmd="cat /workspace/f"), action_context=context)).stdout == "kept"
        is_listed = await client.get_managed_process("s1", action_context=context)
        assert is_listed.status.value == "running"
        await client.delete_session("s1", action_context=context)


async def test_sessions_and_processes_outlive_a_killed_server(own_server, context):
    from langbot_plugin.box.models import BoxManagedProcessSpec

    server = own_server()
    async with connected(websocket(server)) as client:
        await client.execute(spec(cmd="echo kept > /workspace/f", persistent=True), action_context=context)
        sleeps = BoxManagedProcessSpec(command="sleep", args=["60"])
        await client.start_managed_process("s1", sleeps, action_context=context)
        server.kill()
    server.start()
    async with connected(websocket(server)) as client:
        result = await client.execute(spec(cmd="cat /workspace/f", persistent=True), action_context=context)
        assert result.stdout == "kept"
        assert (await client.get_managed_process("s1", action_context=context)).status.value == "running"

        async def is_listed() -> bool:
            return (await client.get_status(action_context=context))["managed_processes"] == 1

        await eventually_async(is_listed)


async def test_an_older_placement_is_known_by_its_boxes_after_a_restart(own_server, context):
    server = own_server()
    newer = context.model_copy(update={"placement_generation": 7})
    async with connected(websocket(server)) as client:
        await client.create_session(spec(persistent=True), action_context=newer)
        server.kill()
    server.start()
    async with connected(websocket(server)) as client:
        with pytest.raises(BoxError, match="PermissionError: Stale Box placement generation"):
            await client.get_sessions(action_context=context)
        assert len(await client.get_sessions(action_context=newer)) == 1


async def test_heartbeats_are_answered_in_both_directions(client):
    for _ in range(10):
        assert await client.handler.call_action(CommonAction.PING, {}) == {}


async def test_end_of_input_ends_the_server_and_its_boxes(tmp_path, context):
    controller = stdio(tmp_path, free_port())
    async with connected(controller) as client:
        await client.execute(spec(cmd="true", persistent=True), action_context=context)
        process = controller.process
    assert process.returncode == 0
