"""The same through E2B's asynchronous SDK."""

import asyncio

import pytest
from conftest import needs
from e2b import AsyncSandbox
from e2b.exceptions import NotFoundException, TimeoutException
from e2b.sandbox.commands.command_handle import CommandExitException, PtySize
from test_files import TOO_DEEP

# SDKs of old versions keep their connections for one loop.
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_commands_and_files(server):
    sandbox = await AsyncSandbox.create(timeout=300)
    try:
        result = await sandbox.commands.run("echo hello")
        assert result.stdout == "hello\n"
        await sandbox.files.write("a/b", "x")
        assert await sandbox.files.read("a/b") == "x"
        with pytest.raises(NotFoundException):
            await sandbox.files.read("missing")
        with pytest.raises(CommandExitException):
            await sandbox.commands.run("exit 2")
        with pytest.raises(TimeoutException):
            await sandbox.commands.run("sleep 100", timeout=1)
        handle = await sandbox.commands.run("sleep 1000", background=True)
        assert [process.pid for process in await sandbox.commands.list()] == [handle.pid]
        assert await handle.kill()
    finally:
        assert await sandbox.kill()
    assert not await sandbox.is_running()


async def test_many_at_once(server):
    sandbox = await AsyncSandbox.create(timeout=300)
    try:
        runs = [sandbox.commands.run(f"echo {n}; sleep 0.2") for n in range(20)]
        results = await asyncio.gather(*runs)
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(20)]
    finally:
        await sandbox.kill()


async def test_a_watched_directory_streams_its_events(server):
    sandbox = await AsyncSandbox.create(timeout=300)
    try:
        await sandbox.files.make_dir("w")
        events = asyncio.Queue()
        handle = await sandbox.files.watch_dir("w", on_event=events.put_nowait, timeout=60)
        await sandbox.files.write("w/f", "x")
        seen = set()
        while ("write", "f") not in seen:
            event = await asyncio.wait_for(events.get(), 60)
            seen.add((event.type.value, event.name))
        assert ("create", "f") in seen
        await handle.stop()
    finally:
        await sandbox.kill()


async def test_lost_changes_end_a_stream(server):
    sandbox = await AsyncSandbox.create(timeout=300)
    try:
        await sandbox.files.make_dir("w")
        ends = asyncio.Queue()
        await sandbox.files.watch_dir(
            "w", on_event=lambda _: None, on_exit=ends.put_nowait, recursive=True, timeout=60
        )
        await sandbox.commands.run(TOO_DEEP, cwd="/home/user/w")
        assert "changes were lost" in str(await asyncio.wait_for(ends.get(), 60))
    finally:
        await sandbox.kill()


async def test_a_terminal(server):
    sandbox = await AsyncSandbox.create(timeout=300)
    try:
        data = bytearray()
        terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=data.extend, timeout=60)
        await sandbox.pty.send_stdin(terminal.pid, b"echo in-$((40+2)); exit\n")
        await terminal.wait()
        assert b"in-42" in data
    finally:
        await sandbox.kill()


@needs("sandbox_async.commands.command.Commands.stream_input")
async def test_streams_of_input(server):
    sandbox = await AsyncSandbox.create(timeout=300)
    try:
        handle = await sandbox.commands.run("cat", background=True, stdin=True)
        async with sandbox.commands.stream_input(handle.pid) as stream:
            for number in range(200):
                await stream.send(f"{number}\n")
        await sandbox.commands.close_stdin(handle.pid)
        assert (await handle.wait()).stdout == "".join(f"{number}\n" for number in range(200))
        data = bytearray()
        terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=data.extend, timeout=60)
        async with sandbox.pty.stream_input(terminal.pid) as stream:
            await stream.send(b"echo in-$((40+2)); ")
            await stream.send(b"exit\n")
        await terminal.wait()
        assert b"in-42" in data
        gone = sandbox.commands.stream_input(terminal.pid)
        with pytest.raises(NotFoundException):
            await gone.close()
    finally:
        await sandbox.kill()


async def test_pause_and_connect(server):
    sandbox = await AsyncSandbox.create(timeout=300)
    try:
        await (getattr(sandbox, "pause", None) or sandbox.beta_pause)()
        assert not await sandbox.is_running()
        same = await AsyncSandbox.connect(sandbox.sandbox_id)
        assert (await same.commands.run("echo on")).stdout == "on\n"
    finally:
        await sandbox.kill()
