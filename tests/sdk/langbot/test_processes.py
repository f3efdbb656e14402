"""Managed processes, and the relay to them: a real MCP server in a box, driven by LangBot's own client."""

import asyncio
import json
import pathlib
import sysconfig
import textwrap

import pytest
import websockets
from conftest import TOKEN, connected, spec, stdio, websocket
from langbot_plugin.box.errors import BoxManagedProcessNotFoundError
from langbot_plugin.box.models import BoxManagedProcessSpec, BoxManagedProcessStatus
from langbot_plugin.box.tenancy import namespace_session_id
from waiting import eventually_async

pytestmark = pytest.mark.asyncio

MCP_SERVER = textwrap.dedent(
    """
    import sys
    from mcp.server.fastmcp import FastMCP

    server = FastMCP("box")

    @server.tool()
    def add(a: int, b: int) -> int:
        return a + b

    @server.tool()
    def repeat(text: str, times: int) -> str:
        return text * times

    print("serving", file=sys.stderr)
    server.run("stdio")
    """
)


def process(command: str, **members) -> BoxManagedProcessSpec:
    return BoxManagedProcessSpec(command="sh", args=["-c", command], **members)


def relay_of(client, context, name: str = "default", session: str = "s1") -> str:
    base = f"http://127.0.0.1:{client.relay_port}"
    return client.get_managed_process_websocket_url(session, base, name, action_context=context)


def headers_of(context) -> dict[str, str]:
    return {
        "X-LangBot-Instance-Id": context.instance_uuid,
        "X-LangBot-Box-Control-Token": TOKEN,
        "X-LangBot-Workspace-Id": context.workspace_uuid,
        "X-LangBot-Placement-Generation": str(context.placement_generation),
    }


def attach(client, context, name: str = "default", **more):
    return websockets.connect(
        relay_of(client, context, name),
        additional_headers={**headers_of(context), **more.pop("headers", {})},
        subprotocols=["mcp"],
        proxy=None,
        max_size=None,
        **more,
    )


async def refused(client, context, name: str = "default", **more):
    with pytest.raises(websockets.exceptions.InvalidStatus) as error:
        async with attach(client, context, name, **more):
            pass
    return error.value.response


async def test_processes_start_are_listed_and_stop(client, context):
    await client.create_session(spec(), action_context=context)
    started = await client.start_managed_process(
        "s1", process("echo oops >&2; cat", process_id="a", env={"B": "1", "A": "2"}), action_context=context
    )
    assert (started.session_id, started.process_id, started.status) == ("s1", "a", BoxManagedProcessStatus.RUNNING)
    assert (started.command, started.env_keys, started.attached) == ("sh", ["A", "B"], False)
    await client.start_managed_process("s1", process("exit 7", process_id="b"), action_context=context)
    ended = info = None

    async def both_listed() -> bool:
        nonlocal ended, info
        ended = await client.get_managed_process("s1", "b", action_context=context)
        info = await client.get_managed_process("s1", "a", action_context=context)
        return ended.status == BoxManagedProcessStatus.EXITED and bool(info.stderr_preview)

    await eventually_async(both_listed)
    assert (ended.status, ended.exit_code) == (BoxManagedProcessStatus.EXITED, 7)
    assert ended.exited_at is not None
    assert info.stderr_preview == "oops"
    found = await client.get_session("s1", action_context=context)
    assert set(found["managed_processes"]) == {"a", "b"}
    assert "managed_process" not in found
    assert (await client.get_status(action_context=context))["managed_processes"] == 1
    await client.stop_managed_process("s1", "a", action_context=context)
    with pytest.raises(BoxManagedProcessNotFoundError):
        await client.get_managed_process("s1", "a", action_context=context)


async def test_starting_a_process_again_replaces_it(client, context):
    await client.create_session(spec(), action_context=context)
    await client.start_managed_process("s1", process("echo old; cat"), action_context=context)
    async with attach(client, context) as old:
        assert await old.recv() == "old"
        await client.start_managed_process("s1", process("echo new; cat"), action_context=context)
        with pytest.raises(websockets.exceptions.ConnectionClosedOK) as closed:
            await old.recv()
        assert closed.value.rcvd.code == 1000
    async with attach(client, context) as new:
        assert await new.recv() == "new"


async def test_the_relay_is_framed_by_line(client, context):
    await client.create_session(spec(), action_context=context)
    batch = "printf 'one\\ntwo\\nthree\\n'; head -c 150001 /dev/zero | tr '\\0' x; echo; printf 'half '; sleep 0.3; echo done"
    await client.start_managed_process("s1", process(batch + "; exec cat"), action_context=context)
    async with attach(client, context) as relay:
        assert relay.subprotocol == "mcp"
        assert [await relay.recv() for _ in range(3)] == ["one", "two", "three"]
        assert await relay.recv() == "x" * 150_001
        assert await relay.recv() == "half done"
        for text in ("first", "ä€😀" * 30_000, json.dumps({"a": 1})):
            await relay.send(text)
            assert await relay.recv() == text
        assert (await client.get_managed_process("s1", action_context=context)).attached


async def test_a_process_outlives_its_relay_and_loses_nothing(client, context):
    await client.create_session(spec(), action_context=context)
    # The process prints "two" only while no relay is attached: output sent to a closing relay counts as delivered.
    script = "read line; echo $line; read line; until [ -e /tmp/go ]; do sleep 0.05; done; echo $line; exec cat"
    await client.start_managed_process("s1", process(script), action_context=context)
    async with attach(client, context) as relay:
        await relay.send("one")
        assert await relay.recv() == "one"
        await relay.send("two")
    await client.execute(spec(cmd="touch /tmp/go"), action_context=context)
    async with attach(client, context) as relay:
        assert await relay.recv() == "two"
        await relay.send("three")
        assert await relay.recv() == "three"


async def test_the_end_of_a_process_closes_its_relay(client, context):
    await client.create_session(spec(), action_context=context)
    await client.start_managed_process("s1", process("read line; printf 'last words'"), action_context=context)
    async with attach(client, context) as relay:
        await relay.send("go")
        assert await relay.recv() == "last words"
        with pytest.raises(websockets.exceptions.ConnectionClosedOK) as closed:
            await relay.recv()
        assert closed.value.rcvd.code == 1000
    answer = await refused(client, context)
    assert answer.status_code == 400
    body = json.loads(answer.body)["error"]
    physical = namespace_session_id(context, "s1")
    assert body == {
        "code": "BoxManagedProcessConflictError",
        "message": f"managed process default in session {physical} is not running",
    }


async def test_a_second_relay_is_refused_with_a_reason(client, context):
    await client.create_session(spec(), action_context=context)
    await client.start_managed_process("s1", process("exec cat"), action_context=context)
    async with attach(client, context) as relay:
        answer = await refused(client, context)
        assert answer.status_code == 400
        assert json.loads(answer.body)["error"]["code"] == "BoxManagedProcessConflictError"
        await relay.send("still mine")
        assert await relay.recv() == "still mine"
    async with attach(client, context):
        pass


async def test_unauthorized_callers_get_no_details(client, context):
    await client.create_session(spec(), action_context=context)
    await client.start_managed_process("s1", process("exec cat"), action_context=context)
    for headers in (
        {"X-LangBot-Instance-Id": "other"},
        {"X-LangBot-Box-Control-Token": "wrong" * 10},
        {"X-LangBot-Workspace-Id": "other"},
        {"X-LangBot-Placement-Generation": "01"},
        {"X-LangBot-Placement-Generation": "2"},
    ):
        assert (await refused(client, context, headers=headers)).status_code == 401, headers
    missing = await refused(client, context, name="none")
    assert missing.status_code == 400
    assert json.loads(missing.body)["error"]["code"] == "BoxManagedProcessNotFoundError"


async def test_an_unread_relay_blocks_the_process_and_loses_nothing(server, context):
    async with connected(websocket(server)) as client:
        client.relay_port = server.port
        await client.create_session(spec(), action_context=context)
        # It waits for the relay: without one, a process that writes more than its log holds loses the oldest lines.
        lines = "read go; i=0; while [ $i -lt 200000 ]; do i=$((i+1)); echo \"line number $i of many\"; done"
        await client.start_managed_process("s1", process(lines), action_context=context)
        async with attach(client, context) as relay:
            await relay.send("go")
            # Give the process time to fill the buffers, which the test cannot observe.
            await asyncio.sleep(1)
            for number in range(1, 200_001):
                assert await relay.recv() == f"line number {number} of many"
        await client.delete_session("s1", action_context=context)


async def test_a_real_mcp_server_is_driven_by_langbots_own_client(client, context, tmp_path: pathlib.Path):
    from langbot.pkg.provider.tools.loaders.mcp_stdio import authenticated_websocket_client
    from mcp import ClientSession

    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "server.py").write_text(MCP_SERVER)
    packages = {"host_path": sysconfig.get_paths()["purelib"], "mount_path": "/opt/packages", "mode": "ro"}
    members = {"host_path": str(tmp_path / "work"), "extra_mounts": [packages], "persistent": True, "memory_mb": 1024}
    await client.create_session(spec(**members), action_context=context)
    served = BoxManagedProcessSpec(
        process_id="mcp",
        command="/usr/bin/python3",
        args=["server.py"],
        env={"PYTHONPATH": "/opt/packages", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/workspace",
    )
    await client.start_managed_process("s1", served, action_context=context)
    url = relay_of(client, context, "mcp")
    async with authenticated_websocket_client(url, headers_of(context)) as (read, write):
        async with ClientSession(read, write) as session:
            await asyncio.wait_for(session.initialize(), 60)
            info = await client.get_managed_process("s1", "mcp", action_context=context)
            assert "serving" in info.stderr_preview
            tools = await session.list_tools()
            assert {tool.name for tool in tools.tools} == {"add", "repeat"}
            large = await session.call_tool("repeat", {"text": "0123456789ä", "times": 15_000})
            assert large.content[0].text == "0123456789ä" * 15_000
            batch = await asyncio.gather(*(session.call_tool("add", {"a": n, "b": 1}) for n in range(50)))
            assert [answer.content[0].text for answer in batch] == [str(n + 1) for n in range(50)]
    info = await client.get_managed_process("s1", "mcp", action_context=context)
    assert info.status == BoxManagedProcessStatus.RUNNING
    # The server logs each request; the preview has the last lines.
    assert "CallToolRequest" in info.stderr_preview
    # The same client attaches again after the first relay has ended.
    async with authenticated_websocket_client(url, headers_of(context)) as (read, write):
        async with ClientSession(read, write) as session:
            await asyncio.wait_for(session.initialize(), 60)
            assert (await session.call_tool("add", {"a": 2, "b": 2})).content[0].text == "4"


async def test_stdio_runs_without_relays_if_the_port_is_taken(tmp_path, context, server):
    async with connected(stdio(tmp_path, server.port)) as client:
        assert (await client.execute(spec(cmd="echo on"), action_context=context)).stdout == "on"
        await client.start_managed_process("s1", process("exec cat"), action_context=context)
