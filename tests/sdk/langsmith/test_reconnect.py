"""Commands outlive their connections, and their output arrives exactly once."""

import asyncio
import json
import random

import pytest
from conftest import (
    TOKEN,
    AsyncSandboxClient,
    SandboxClient,
    call,
    check_offsets,
    chunks,
    create,
    first,
    leave,
    result,
    text_of,
)
from cutter import Cutter
from langsmith.sandbox import SandboxOperationError
from langsmith.sandbox._models import AsyncCommandHandle, CommandHandle
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

pytestmark = pytest.mark.asyncio

CUTS = 500
KILLS = 20


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


def data(seed: int, size: int) -> bytes:
    """Returns text of one to four bytes per character, with some invalid bytes and control characters."""
    chance = random.Random(seed)
    words = [b"word ", "\u00fcber ".encode(), "\u20ac".encode(), "\U0001f600\n".encode(), b"\n", b"\t", b"line\r\n"]
    odd = [b"\xff", b"\xe2\x82", b"\x00", b"\x1b[0m", b'"\\']
    parts, length = [], 0
    while length < size:
        part = chance.choice(odd) if chance.random() < 0.02 else chance.choice(words)
        parts.append(part)
        length += len(part)
    return b"".join(parts)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_random_cuts_lose_and_repeat_nothing(server, monkeypatch, kind):
    # The waiting times of the SDK would add up to minutes.
    for handle in (CommandHandle, AsyncCommandHandle):
        monkeypatch.setattr(handle, "_BACKOFF_BASE", 0.001)
    out, err = data(1, 24 << 20), data(2, 4 << 20)
    cutter = Cutter(server.port, CUTS, seed=7)
    client = server.client(kind, port=cutter.port)
    try:
        box = await create(client)
        await call(box.write, "/tmp/out", out, timeout=300)
        await call(box.write, "/tmp/err", err, timeout=300)
        handle = await call(box.run, "cat /tmp/err >&2 & cat /tmp/out; wait; exit 5", wait=False, timeout=0)
        output = await chunks(handle)
        done = await result(handle)
        assert done.exit_code == 5 and cutter.made == CUTS
        check_offsets(output)
        for stream, written, whole in [("stdout", out, done.stdout), ("stderr", err, done.stderr)]:
            text = written.decode(errors="replace")
            assert text_of(stream, output) == text and whole == text
        await call(client.delete_sandbox, box.name)
    finally:
        cutter.close()


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
    server = own_server()
    client = server.client(kind)
    box = await create(client)
    ready = asyncio.Event()
    script = "i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); echo line $i; echo error $i >&2; sleep 0.01; done; echo last $i"
    handle = await call(box.run, script, wait=False, timeout=0)
    output, loop = [], asyncio.get_running_loop()

    async def read() -> None:
        if hasattr(handle, "__aiter__"):
            async for chunk in handle:
                output.append(chunk)
                ready.set()
        else:

            def iterate() -> None:
                for chunk in handle:
                    output.append(chunk)
                    loop.call_soon_threadsafe(ready.set)

            await asyncio.to_thread(iterate)

    reading = asyncio.create_task(read())
    for _ in range(KILLS):
        ready.clear()
        seen = asyncio.create_task(ready.wait())
        await asyncio.wait([seen, reading], timeout=120, return_when=asyncio.FIRST_COMPLETED)
        assert seen.done() and not reading.done(), reading
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
    await call((await call(client.get_sandbox, box.name)).write, "/tmp/stop", b"")
    await asyncio.wait_for(reading, 240)
    done = await result(handle)
    check_offsets(output)
    lines = text_of("stdout", output).splitlines()
    last = len(lines) - 1
    assert last > KILLS and done.exit_code == 0
    assert lines == [*(f"line {number}" for number in range(1, last + 1)), f"last {last}"]
    assert text_of("stderr", output) == "".join(f"error {number}\n" for number in range(1, last + 1))


async def test_a_restart_with_boxes_is_followed(own_server):
    server = own_server(env={"BOXD_SERVER_KEEP_BOXES": "true", "BOXD_SERVER_DRAIN_SEC": "1"})
    client = server.client()
    box = await create(client)
    handle = await call(box.run, "for i in $(seq 1 200); do echo $i; sleep 0.05; done", wait=False)
    reading = asyncio.create_task(chunks(handle))
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)
    output = await asyncio.wait_for(reading, 240)
    check_offsets(output)
    assert text_of("stdout", output) == "".join(f"{number}\n" for number in range(1, 201))


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_stopping_server_says_whether_commands_live_on(own_server, keeps):
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


async def test_a_server_that_ends_its_boxes_does_not_claim_an_exit(own_server):
    server = own_server(env={"BOXD_SERVER_DRAIN_SEC": "1"})
    client = server.client()
    box = await create(client)
    handle = await call(box.run, "echo begun; sleep 2222", wait=False)
    reading = asyncio.create_task(chunks(handle))
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)
    with pytest.raises(SandboxOperationError) as refused:
        await asyncio.wait_for(reading, 240)
    assert refused.value.error_type == "CommandNotFound"
