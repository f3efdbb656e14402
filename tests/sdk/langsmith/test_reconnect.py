"""Commands outlive their connections, and their output arrives exactly once."""

import asyncio
import contextlib
import json

import pytest
from conftest import (
    HAS_TEMPLATES,
    TOKEN,
    AsyncSandboxClient,
    SandboxClient,
    call,
    check_offsets,
    chunks,
    create,
    first,
    leave,
    open_input,
    pieces,
    result,
    text_of,
)
from cutter import Cutter
from langsmith.sandbox import ResourceNotFoundError, SandboxConnectionError, SandboxOperationError
from langsmith.sandbox._models import AsyncCommandHandle, CommandHandle
from lost import TICKS, check_bulk_kills, check_cuts, check_end_of_boxes, check_kills, check_restart, data
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

pytestmark = pytest.mark.asyncio


async def test_a_lost_handle_reads_on_by_hand(box):
    handle = await call(box.run, "echo one; echo e >&2; sleep 1; echo two", wait=False)
    await first(handle)
    again = await call(handle.reconnect)
    output = await chunks(again)
    seen = (handle.last_stdout_offset, handle.last_stderr_offset)
    check_offsets(output, *seen)
    assert ("one\n" + "two\n")[seen[0] :] == text_of("stdout", output)
    assert "e\n"[seen[1] :] == text_of("stderr", output)
    assert (await result(again)).exit_code == 0


async def test_the_output_of_a_detached_command_is_kept(box):
    handle = await call(box.run, "sleep 1; seq 1 20000; echo end >&2", wait=False)
    await leave(handle)
    for _ in range(2):
        again = await result(await call(box.reconnect, handle.command_id))
        assert again.stdout == "".join(f"{number}\n" for number in range(1, 20001))
        assert (again.stderr, again.exit_code) == ("end\n", 0)


async def test_a_client_beyond_the_end_gets_the_exit_only(box):
    handle = await call(box.run, "echo x; exit 4", wait=False)
    await result(handle)
    again = await call(box.reconnect, handle.command_id, stdout_offset=2, stderr_offset=0)
    assert await chunks(again) == [] and (await result(again)).exit_code == 4
    beyond = await call(box.reconnect, handle.command_id, stdout_offset=1000, stderr_offset=1000)
    assert await chunks(beyond) == [] and (await result(beyond)).exit_code == 4


async def test_a_client_beyond_the_end_of_one_stream_reads_the_other(box):
    handle = await call(box.run, r"printf 'out\xff'; echo err >&2", wait=False)
    await result(handle)
    for offsets, seen in [((1000, 0), ("", "err\n")), ((0, 1000), ("out\ufffd", "")), ((6, 1), ("", "rr\n"))]:
        again = await call(box.reconnect, handle.command_id, stdout_offset=offsets[0], stderr_offset=offsets[1])
        done = await result(again)
        assert (done.stdout, done.stderr, done.exit_code) == (*seen, 0), offsets


async def test_an_unknown_command_is_not_found(box):
    unknown = await call(box.reconnect, "no-such-command")
    with pytest.raises(SandboxOperationError) as refused:
        await result(unknown)
    assert (refused.value.error_type, refused.value.operation) == ("CommandNotFound", "reconnect")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_random_cuts_lose_and_repeat_nothing(server, monkeypatch, kind):
    # The waiting times of the SDK would add up to minutes.
    for handle in (CommandHandle, AsyncCommandHandle):
        monkeypatch.setattr(handle, "_BACKOFF_BASE", 0.001)
    await check_cuts(server, kind, data(1, 24 << 20), data(2, 4 << 20))


@pytest.mark.timeout(900)
async def test_a_fast_command_waits_for_a_lost_client(server):
    """Its output is several times what the box keeps, so it must not run on while the client connects again."""
    size, least = 200 << 20, 24 << 20
    cutter = Cutter(server.port, 5, seed=3, least=least)
    client = server.client(port=cutter.port)

    def read(handle) -> tuple[int, bool]:
        """Reads lines of 16 bytes with their numbers, and keeps none of them."""
        length, is_exact, rest = 0, True, ""
        for chunk in handle:
            is_exact = is_exact and chunk.offset == length
            length += len(chunk.data)
            lines = (rest + chunk.data).split("\n")
            rest = lines.pop()
            first = (length - len(rest)) // 16 - len(lines)
            is_exact = is_exact and lines == [f"{number:015d}" for number in range(first, first + len(lines))]
        return length, is_exact

    try:
        box = await create(client)
        script = f"import sys\nfor i in range({size // 16} // 4096):\n sys.stdout.write(''.join('%015d\\n' % n for n in range(i * 4096, i * 4096 + 4096)))"
        await call(box.write, "/tmp/numbers.py", script)
        handle = await call(box.run, "python3 /tmp/numbers.py", wait=False, timeout=0)
        assert await asyncio.to_thread(read, handle) == (size, True)
        assert (await result(handle)).exit_code == 0 and cutter.made == 5
        await call(client.delete_sandbox, box.name)
    finally:
        cutter.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_kills_of_the_server_lose_and_repeat_nothing(own_server, kind):
    await check_kills(own_server(), kind)


# The box keeps 64 MiB, so the first command waits for its client.
@pytest.mark.parametrize("kind, times", [(SandboxClient, 80), (AsyncSandboxClient, 8)])
async def test_kills_of_the_server_during_much_output_lose_and_repeat_nothing(own_server, kind, times):
    await check_bulk_kills(own_server(), kind, times)


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_restart_with_boxes_is_followed(own_server, kind):
    await check_restart(own_server(env={"BOXD_SERVER_KEEP_BOXES": "true", "BOXD_SERVER_DRAIN_SEC": "1"}), kind)


@pytest.mark.skipif(HAS_TEMPLATES, reason="this release does not send a command again")
@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_start_whose_answer_is_lost_runs_once(server, monkeypatch, kind):
    for handle in (CommandHandle, AsyncCommandHandle):
        monkeypatch.setattr(handle, "_BACKOFF_BASE", 0.001)
    client = server.client(kind)
    box = await create(client)
    # The first message of the server, `started`, is longer.
    cutter = Cutter(server.port, 3, seed=5, most=60)
    try:
        box.dataplane_url = box.dataplane_url.replace(f":{server.port}", f":{cutter.port}")
        done = await call(box.run, "echo begun >> /tmp/runs; sleep 1; cat /tmp/runs")
        assert (done.stdout, done.exit_code, cutter.made) == ("begun\n", 0, 3)
        await call(client.delete_sandbox, box.name)
    finally:
        cutter.close()


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_handle_takes_input_and_a_kill_after_a_kill_of_the_server(own_server, kind):
    server = own_server()
    box = await create(server.client(kind))
    handle = await call(box.run, TICKS, wait=False, timeout=0, **open_input(box))
    text, connection, has_sent = "", None, False
    with contextlib.suppress(SandboxConnectionError):
        async for chunk in pieces(handle):
            text += chunk.data
            if connection is None:
                connection = handle._control
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            elif handle._control is not connection and not has_sent:
                has_sent = True
                await call(handle.send_input, "word\n")
            if "got" in text:
                # The client closes the connection, so this may be the last piece.
                await call(handle.kill)
    assert text.endswith("tick\ngot word\n")
    done = await result(await call(box.reconnect, handle.command_id))
    assert (done.stdout, done.exit_code) == (text, 137)


@pytest.mark.parametrize("pty", [False, True])
async def test_another_handle_takes_input_and_a_kill(box, pty):
    handle = await call(box.run, TICKS, wait=False, timeout=0, pty=pty, **open_input(box))
    await leave(handle)
    again = await call(box.reconnect, handle.command_id)
    text, has_sent = "", False
    with contextlib.suppress(SandboxConnectionError):
        async for chunk in pieces(again):
            text += chunk.data
            if not has_sent:
                has_sent = True
                await call(again.send_input, "word\n")
            if "got" in text:
                await call(again.kill)
    assert "got word" in text.splitlines()
    done = await result(await call(box.reconnect, handle.command_id))
    assert done.exit_code == 137 and done.stdout.startswith(text)
    # A terminal shows what was typed.
    assert ("word" in text.split("got")[0]) == pty


async def test_pings_are_answered_while_a_command_is_silent(box):
    """The SDK gives up a connection whose pings have no answer."""
    url = box.dataplane_url.replace("http://", "ws://") + "/execute/ws"
    async with connect(url, additional_headers={"X-Api-Key": TOKEN}, ping_interval=None) as socket:
        command = "until [ -e /tmp/go ]; do sleep 0.1; done; echo on"
        await socket.send(json.dumps({"type": "execute", "command": command, "timeout_seconds": 0}))
        assert json.loads(await socket.recv())["type"] == "started"
        for _ in range(20):
            await asyncio.wait_for(await socket.ping(), 60)
        await call(box.write, "/tmp/go", b"")
        received = [json.loads(message) async for message in socket]
    assert [message["type"] for message in received] == ["stdout", "exit"]


@pytest.mark.skipif(not HAS_TEMPLATES, reason="this release always uses a websocket")
@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_client_behind_a_proxy_without_websockets_gets_results(server, kind):
    client = server.client(kind)
    box = await create(client)
    proxy = Cutter(server.port, 0, seed=1)
    proxy.refuses_sockets = True
    try:
        box.dataplane_url = box.dataplane_url.replace(f":{server.port}", f":{proxy.port}")
        done = await call(box.run, 'echo "$A $PWD $0"; echo err >&2; exit 3', env={"A": "1"}, cwd="/tmp", shell="/bin/sh")
        assert (done.stdout, done.stderr, done.exit_code) == ("1 /tmp /bin/sh\n", "err\n", 3)
        for command, options, cause in [
            ("sleep 100", {"timeout": 1}, "timeout"),
            ("head -c 9000000 /dev/zero", {}, "exceeds 4194304 bytes"),
            (" ", {}, "command"),
        ]:
            with pytest.raises(SandboxOperationError, match=cause) as refused:
                await call(box.run, command, **options)
            assert (refused.value.operation, refused.value.error_type) == ("command", "CommandError")
        # A handle needs a websocket.
        with pytest.raises(SandboxConnectionError):
            await call(box.run, "true", wait=False)
        assert proxy.made == 5
        await call(client.delete_sandbox, box.name)
        with pytest.raises(ResourceNotFoundError):
            await call(box.run, "true")
    finally:
        proxy.close()


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_stopping_server_reports_whether_commands_continue(own_server, keeps):
    variables = {"BOXD_SERVER_KEEP_BOXES": "true"} if keeps else {}
    server = own_server(env={"BOXD_SERVER_DRAIN_SEC": "1", **variables})
    box = await create(server.client())
    url = box.dataplane_url.replace("http://", "ws://") + "/execute/ws"
    async with connect(url, additional_headers={"X-Api-Key": TOKEN}) as socket:
        command = "echo begun; until [ -e /tmp/go ]; do sleep 0.1; done; echo on"
        await socket.send(json.dumps({"type": "execute", "command": command, "timeout_seconds": 0}))
        messages = []
        while not messages or messages[-1]["type"] != "stdout":
            messages.append(json.loads(await asyncio.wait_for(socket.recv(), 120)))
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                messages.append(json.loads(await asyncio.wait_for(socket.recv(), 120)))
        await stopping
    assert [message["type"] for message in messages] == ["started", "stdout"]
    # 1012 is a restart. A connection that only breaks says nothing of the command, and the SDK asks for it.
    assert (closed.value.rcvd.code if closed.value.rcvd else None) == (1012 if keeps else None)
    if keeps:
        await asyncio.to_thread(server.start)
        box = await call(server.client().get_sandbox, box.name)
        await call(box.write, "/tmp/go", b"")
        again = await call(box.reconnect, messages[0]["command_id"])
        assert (await result(again)).stdout == "begun\non\n"


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_server_that_ends_its_boxes_does_not_claim_an_exit(own_server, kind):
    await check_end_of_boxes(own_server(env={"BOXD_SERVER_DRAIN_SEC": "1"}), kind)
