"""Boxes and snapshots that are being made when their server ends: the next server knows them."""

import asyncio
import subprocess

import pytest
from conftest import HAS_TEMPLATES, TOKEN, call, new_name, request
from langsmith.sandbox import AsyncSandboxClient, ResourceCreationError, SandboxClient
from program import BOXD, environment
from waiting import eventually_async

pytestmark = pytest.mark.asyncio

ENDS = pytest.mark.parametrize("end", ["kill", "stop"])


async def unfinished(server, script: str) -> dict:
    """Creates a box of a template with this preparation, and does not wait for it."""
    template = new_name()
    env = environment(BOXD_ENDPOINT=f"ws://127.0.0.1:{server.port}/rpc/ws", BOXD_TOKEN=TOKEN)
    subprocess.run([BOXD, "template", "create", template, "--prepare", script], env=env, check=True, timeout=120)
    # Only older releases of the SDK have templates.
    created = await request(server, "POST", "/boxes", json={"template_name": template, "wait_for_ready": False})
    assert created.status_code == 201, created.text
    box = created.json()
    assert box["status"] == "provisioning"
    return box


async def restart(server, end: str) -> None:
    await asyncio.to_thread(getattr(server, end))
    await asyncio.to_thread(server.start)


@ENDS
@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_box_whose_server_ends_while_it_starts_becomes_ready(own_server, kind, end):
    server = own_server(env={"BOXD_SERVER_KEEP_BOXES": "true"})
    box = await unfinished(server, "sleep 4; echo prepared >> /tmp/prepared")
    await restart(server, end)
    client = server.client(kind)
    status = await call(client.get_sandbox_status, box["name"])
    # A server that is stopped waits a while for what it has begun.
    assert status.status == "provisioning" or end == "stop"
    ready = await call(client.wait_for_sandbox, box["name"])
    assert (ready.id, ready.name) == (box["id"], box["name"])
    # The preparation ran once, on new files.
    assert await call(ready.read, "/tmp/prepared") == b"prepared\n"
    await restart(server, end)
    again = await call(client.get_sandbox, box["name"])
    assert (again.id, again.status) == (box["id"], "ready")
    await call(client.delete_sandbox, box["name"])
    await restart(server, end)
    listed = await call(client.list_sandboxes)
    assert listed == []


@ENDS
async def test_the_reason_of_a_box_that_cannot_start_outlives_its_server(own_server, end):
    server = own_server(env={"BOXD_SERVER_KEEP_BOXES": "true"})
    client = server.client()
    box = await unfinished(server, "echo no such package >&2; exit 3")

    async def has_failed() -> bool:
        return (await call(client.get_sandbox_status, box["name"])).status == "failed"

    await eventually_async(has_failed, "the box fails")
    await restart(server, end)
    status = await call(client.get_sandbox_status, box["name"])
    assert status.status == "failed" and "exited with code 3" in status.status_message
    with pytest.raises(ResourceCreationError, match="no such package"):
        await call(client.wait_for_sandbox, box["name"])
    await call(client.delete_sandbox, box["name"])


@pytest.mark.skipif(HAS_TEMPLATES, reason="this release has no snapshots")
@ENDS
async def test_a_snapshot_whose_server_ends_while_it_is_made_has_failed(own_server, end):
    server = own_server(env={"BOXD_IMAGES_ALLOW_PULL": "*"})
    client, name = server.client(), new_name("s")
    # A registry that never answers.
    silent = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    image = f"localhost:{port}/slow:1"
    body = {"name": name, "docker_image": image, "fs_capacity_bytes": 1 << 30}
    made = await request(server, "POST", "/snapshots", json=body)
    assert made.status_code == 201 and made.json()["status"] == "building", made.text
    await restart(server, end)
    silent.close()
    failed = await call(client.get_snapshot, made.json()["id"])
    assert (failed.name, failed.status) == (name, "failed")
    assert "the server ended while it made the snapshot" in failed.status_message
    with pytest.raises(ResourceCreationError):
        await call(client.wait_for_snapshot, failed.id)
    again = await call(client.create_snapshot, name, "host", 1 << 30)
    assert again.status == "ready"
    assert (await call(client.get_snapshot, name)).id == again.id
    await call(client.delete_snapshot, failed.id)
    await call(client.delete_snapshot, again.id)
