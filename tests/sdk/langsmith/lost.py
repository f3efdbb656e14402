"""Commands that lose their connections: by cuts on the way, and by kills of the server."""

from __future__ import annotations

import asyncio
import random

import pytest
from conftest import call, check_offsets, chunks, create, pieces, result, text_of
from cutter import Cutter
from langsmith.sandbox import SandboxOperationError

CUTS = 500
KILLS = 20

# Numbered lines until a file stops them. The number of the last one is in a file then.
LINES = (
    "i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); echo line $i; echo error $i >&2; sleep 0.01; done; "
    "echo $i > /tmp/last; echo last $i"
)


def lines(last: int) -> tuple[str, str]:
    """Returns what `LINES` writes to stdout and to stderr."""
    out = "".join(f"line {number}\n" for number in range(1, last + 1)) + f"last {last}\n"
    return out, "".join(f"error {number}\n" for number in range(1, last + 1))


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


async def check_cuts(server, kind, out: bytes, err: bytes) -> None:
    """Reads two streams through a proxy that cuts the connections of the command, and checks every byte."""
    client = server.client(kind)
    cutter = Cutter(server.port, CUTS, seed=7)
    try:
        box = await create(client)
        await call(box.write, "/tmp/out", out, timeout=300)
        await call(box.write, "/tmp/err", err, timeout=300)
        box.dataplane_url = box.dataplane_url.replace(f":{server.port}", f":{cutter.port}")
        handle = await call(box.run, "cat /tmp/err >&2 & cat /tmp/out; wait; exit 5", wait=False, timeout=0)
        output = await chunks(handle)
        done = await result(handle)
        assert (done.exit_code, cutter.made) == (5, CUTS)
        check_offsets(output)
        for stream, written, whole in [("stdout", out, done.stdout), ("stderr", err, done.stderr)]:
            text = written.decode(errors="replace")
            assert text_of(stream, output) == text and whole == text, stream
        await call(client.delete_sandbox, box.name)
    finally:
        cutter.close()


async def check_kills(server, kind) -> None:
    """Reads lines through kills of the server, each after it has sent some, and checks every byte."""
    client = server.client(kind)
    box = await create(client)
    handle = await call(box.run, LINES, wait=False, timeout=0)
    output, ready, loop = [], asyncio.Event(), asyncio.get_running_loop()

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
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([waiting, reading], timeout=120, return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done() and not reading.done(), reading
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
    box = await call(client.get_sandbox, box.name)
    await call(box.write, "/tmp/stop", b"")
    await asyncio.wait_for(reading, 240)
    done = await result(handle)
    check_offsets(output)
    last = int(await call(box.read, "/tmp/last"))
    assert last > KILLS and done.exit_code == 0
    assert (text_of("stdout", output), text_of("stderr", output)) == lines(last) == (done.stdout, done.stderr)


# Prints pieces until it has read a line, says which, and runs on.
TICKS = (
    "echo begun; while [ ! -e /tmp/read ]; do echo tick; sleep 0.1; done & "
    "read word; touch /tmp/read; wait; echo got $word; exec sleep 3333"
)

# Begins, and ends when a file exists.
WAITS = "echo begun; echo error >&2; until [ -e /tmp/go ]; do sleep 0.1; done; echo on"


async def check_restart(server, kind) -> None:
    """Stops a server that keeps its boxes while a command runs, and starts the next one."""
    client = server.client(kind)
    box = await create(client)
    handle = await call(box.run, WAITS, wait=False, timeout=0)
    output = []
    async for chunk in pieces(handle):
        output.append(chunk)
        if len(output) == 2:
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            other = await call(client.get_sandbox, box.name)
            await call(other.write, "/tmp/go", b"")
    check_offsets(output)
    done = await result(handle)
    assert (done.stdout, done.stderr, done.exit_code) == ("begun\non\n", "error\n", 0)
    assert (text_of("stdout", output), text_of("stderr", output)) == (done.stdout, done.stderr)


async def check_end_of_boxes(server, kind) -> None:
    """Stops a server that ends its boxes while a command runs, and starts the next one."""
    box = await create(server.client(kind))
    handle = await call(box.run, WAITS, wait=False, timeout=0)
    output = []
    with pytest.raises(SandboxOperationError) as refused:
        async for chunk in pieces(handle):
            output.append(chunk)
            if len(output) == 2:
                await asyncio.to_thread(server.stop)
                await asyncio.to_thread(server.start)
    assert refused.value.error_type == "CommandNotFound"
    assert (text_of("stdout", output), text_of("stderr", output)) == ("begun\n", "error\n")


async def check_bulk_kills(server, kind, times: int) -> None:
    """Kills the server while the client is behind a fast command, which writes this number of MiB."""
    client = server.client(kind)
    box = await create(client)
    # With server-sent events, the SDK itself changes bytes that are no text.
    content = data(3, 1 << 20).decode(errors="replace")
    await call(box.write, "/tmp/out", content)
    handle = await call(box.run, f"for _ in $(seq {times}); do cat /tmp/out; done", wait=False, timeout=0)
    output, size, kills = [], 0, 0
    async for chunk in pieces(handle):
        output.append(chunk)
        size += len(chunk.data)
        if kills < 3 and size > kills * 1_000_000:
            kills += 1
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
    check_offsets(output)
    done = await result(handle)
    assert (kills, done.exit_code) == (3, 0)
    assert text_of("stdout", output) == content * times == done.stdout
