"""Exceptions of the SDK, each by its real cause."""

import asyncio
import os
import signal

import pytest
from conftest import HAS_TEMPLATES, AsyncSandboxClient, SandboxClient, call, create, new_name, parent_of, process_of, result
from cutter import Cutter
from langsmith.sandbox import (
    QuotaExceededError,
    ResourceCreationError,
    ResourceTimeoutError,
    SandboxClientError,
    SandboxConnectionError,
)
from langsmith.sandbox._models import AsyncCommandHandle, CommandHandle
from program import numbers
from waiting import eventually, eventually_async

pytestmark = pytest.mark.asyncio

KINDS = pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])


@pytest.fixture
def short_waits(monkeypatch):
    """The waiting times of the SDK between its attempts would add up to many seconds."""
    for handle in (CommandHandle, AsyncCommandHandle):
        monkeypatch.setattr(handle, "_BACKOFF_BASE", 0.001)


@KINDS
async def test_too_many_boxes_are_a_quota(own_server, kind):
    server = own_server(env={"BOXD_RUNTIME_MAX_BOXES_PER_TOKEN": "1"})
    client = server.client(kind, max_retries=0)
    box = await create(client)
    with pytest.raises(QuotaExceededError) as refused:
        await create(client)
    assert refused.value.quota_type == "sandbox_count"
    await call(client.delete_sandbox, box.name)
    await create(client)


@KINDS
async def test_too_many_calls_of_a_token_are_a_quota(own_server, kind):
    server = own_server(env={"BOXD_SERVER_CALLS_PER_TOKEN": "1"})
    client = server.client(kind, max_retries=0)
    box = await create(client)
    # A command that runs is a call.
    handle = await call(box.run, "until [ -e /tmp/go ]; do sleep 0.1; done; echo on", wait=False, timeout=0)
    with pytest.raises(QuotaExceededError, match="calls_per_token of 1"):
        await call(client.get_sandbox, box.name)
    await call(handle.kill)


async def test_a_box_that_is_not_ready_in_time_is_a_timeout(client):
    name = new_name()
    options = {"template_name": name} if HAS_TEMPLATES else {}
    if HAS_TEMPLATES:
        await call(client.create_template, name=name, image="host")
    with pytest.raises(ResourceTimeoutError) as refused:
        await call(client.create_sandbox, name=name, timeout=0, **options)
    assert refused.value.resource_type == "sandbox"

    async def created():
        try:
            return await call(client.create_sandbox, name=name, timeout=120, **options)
        except SandboxClientError as error:
            assert "is taken" in str(error)
            return None

    # The server deletes the box, and then its name is free.
    box = await eventually_async(created)
    listed = await call(client.list_sandboxes)
    assert [one.id for one in listed if one.name == name] == [box.id]
    await call(client.delete_sandbox, box.name)
    if HAS_TEMPLATES:
        await call(client.delete_template, name)


@KINDS
async def test_a_box_that_this_machine_cannot_make_is_a_creation_error(own_server, kind):
    client = own_server(env={"BOXD_IMAGES_STRICT": "true"}).client(kind)
    with pytest.raises(ResourceCreationError) as refused:
        await create(client)
    assert (refused.value.resource_type, refused.value.error_type) == ("sandbox", "SandboxConfig")
    assert await call(client.list_sandboxes) == []


@KINDS
async def test_a_server_that_is_gone_is_a_connection_error(own_server, short_waits, kind):
    server = own_server()
    client = server.client(kind, max_retries=0)
    box = await create(client)
    await asyncio.to_thread(server.kill)
    for function, arguments in [
        (client.list_sandboxes, []),
        (client.get_sandbox, [box.name]),
        (box.read, ["/etc/hostname"]),
        (box.write, ["/tmp/file", b"x"]),
    ]:
        with pytest.raises(SandboxConnectionError):
            await call(function, *arguments)
    for options in [{}, {"wait": False}]:
        with pytest.raises(SandboxConnectionError) as refused:
            await call(box.run, "true", **options)
        # Newer releases say that the command was not sent.
        assert type(refused.value).__name__ == ("SandboxConnectionError" if HAS_TEMPLATES else "SandboxConnectTimeoutError")
    await asyncio.to_thread(server.start)
    assert (await call(box.run, "echo back")).stdout == "back\n"


class Wall(Cutter):
    """Cuts each websocket after its first byte, so that the client never knows whether its command has started."""

    def budget(self) -> tuple[int, bool]:
        return 1, False


@pytest.mark.skipif(HAS_TEMPLATES, reason="this release does not send a command again")
@KINDS
async def test_a_start_that_is_lost_each_time_is_a_connection_error(server, short_waits, kind):
    from langsmith.sandbox import SandboxRetryableConnectionError

    client = server.client(kind)
    box = await create(client)
    wall = Wall(server.port, 1000, seed=1)
    try:
        box.dataplane_url = box.dataplane_url.replace(f":{server.port}", f":{wall.port}")
        with pytest.raises(SandboxConnectionError) as refused:
            await call(box.run, "exec sleep 4444", timeout=0)
        assert type(refused.value) is SandboxRetryableConnectionError
        # The first attempt and five more.
        assert wall.made == 6
    finally:
        wall.close()
    box = await call(client.get_sandbox, box.name)
    # All attempts are one command, and each had begun it: the server answers after that.
    count = "for one in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $one; echo; done 2>/dev/null | grep -c 'slee[p] 4444'"
    assert (await call(box.run, count)).stdout == "1\n"
    await call(client.delete_sandbox, box.name)


@KINDS
async def test_the_sixth_loss_in_succession_is_a_connection_error(own_server, short_waits, kind):
    server = own_server()
    box = await create(server.client(kind))
    handle = await call(box.run, "until [ -e /tmp/go ]; do sleep 0.1; done; echo on", wait=False, timeout=0)
    await asyncio.to_thread(server.kill)
    with pytest.raises(SandboxConnectionError, match="6 times in succession"):
        await result(handle)
    await asyncio.to_thread(server.start)
    # The same handle still leads to the command.
    again = await call(handle.reconnect)
    await call(box.write, "/tmp/go", b"")
    done = await result(again)
    assert (done.stdout, done.exit_code) == ("on\n", 0)


async def test_a_box_that_the_server_cannot_reach_is_a_connection_error(own_server, short_waits):
    """The agent of the box is halted while the next server starts."""
    server = own_server()
    client = server.client(max_retries=0)
    box = await create(client)
    mark = f"9{os.getpid()}{next(numbers)}"
    running = await call(box.run, f"exec sleep {mark}", wait=False, timeout=0)

    # The agent is the parent of the command.
    command = await asyncio.to_thread(eventually, lambda: process_of(mark), "the command runs")
    halted = parent_of(command)
    others = server.client(AsyncSandboxClient, max_retries=0)
    os.kill(halted, signal.SIGSTOP)
    try:
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        status = await call(client.get_sandbox_status, box.name)
        assert (status.status, status.status_message) == ("provisioning", "its agent has not answered")
        for one in (client, others):
            box = await call(one.get_sandbox, box.name)
            # Older releases ask for the status themselves.
            box.status = "ready"
            for function, arguments in [(box.read, ["/etc/hostname"]), (box.write, ["/tmp/file", b"x"])]:
                with pytest.raises(SandboxConnectionError, match="has not answered"):
                    await call(function, *arguments)
            # The client may try again, so the server does not say that the command has failed.
            with pytest.raises(SandboxConnectionError):
                await call(box.run, "true")
            with pytest.raises(SandboxConnectionError):
                await result(await call(box.reconnect, running.command_id))
    finally:
        os.kill(halted, signal.SIGCONT)

    async def is_ready() -> bool:
        return (await call(client.get_sandbox_status, box.name)).status == "ready"

    await eventually_async(is_ready)
    assert (await call(box.run, "echo back")).stdout == "back\n"
