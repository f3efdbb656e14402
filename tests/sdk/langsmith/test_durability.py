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


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_everything_shown_survives_a_kill(own_server, kind):
    server = own_server()
    client = server.client(kind)
    # The SDK does not take all of these.
    settings = {"labels": {"team": "a"}, "env_vars": {"A": "own"}, "run_config": {"env_vars": {"B": "b"}, "work_dir": "/tmp"}}
    sizes = {"vcpus": 2, "mem_bytes": 300 << 20, "fs_capacity_bytes": 256 << 20}
    lifetimes = {"ttl_seconds": 3600, "idle_ttl_seconds": 1200, "delete_after_stop_seconds": 2400}
    for path, body in [
        ("/volumes", {"name": "v", "size": "16Mi"}),
        ("/templates", {"name": "t", "image": "host", "resources": {"cpu": "500m", "memory": "256Mi", "storage": "64Mi"}}),
        ("/templates", {"name": "tv", "image": "host", "volume_mounts": [{"volume_name": "v", "mount_path": "/data"}]}),
        ("/pools", {"name": "p", "template_name": "t", "replicas": 2, "wait_for_ready": True, "timeout": 120}),
        ("/boxes", {"name": "all", **settings, **sizes, **lifetimes}),
        ("/boxes", {"name": "stopped", "idle_ttl_seconds": 0, "run_config": {"env_vars": {"B": "b"}}}),
        ("/boxes", {"name": "pooled", "template_name": "t", "ttl_seconds": 3600}),
        ("/boxes", {"name": "mounted", "template_name": "tv"}),
    ]:
        made = await request(server, "POST", path, json=body)
        assert made.status_code == 201, made.text
        if path in ("/volumes", "/pools"):
            assert made.json()["created_at"] and made.json()["updated_at"]
    box = await call(client.get_sandbox, "all")
    await call(box.write, "/tmp/kept", b"kept")
    await call((await call(client.get_sandbox, "mounted")).run, "echo kept > /data/file")
    for tag in ("v1", "v2", "v1"):
        body = {"name": "s", "tag": tag, "labels": {"of": tag}, "description": "of a test"}
        made = await request(server, "POST", "/boxes/all/snapshot", json=body)
        assert made.status_code == 201, made.text

        async def is_ready() -> bool:
            return (await request(server, "GET", f"/snapshots/{made.json()['id']}")).json()["status"] == "ready"

        await eventually_async(is_ready)
    stopped = await request(server, "POST", "/boxes/stopped/stop", json={})
    assert stopped.is_success

    async def shown() -> dict:
        paths = ["/boxes", "/snapshots", "/snapshots-by-name/s", "/templates", "/volumes", "/pools"]
        views = {path: (await request(server, "GET", path)).json() for path in paths}
        # The server makes boxes of a pool at any time.
        views["/pools"]["pools"][0].pop("ready_replicas")
        return views

    before = await shown()
    members = ["sandboxes", "snapshots", "tags", "templates", "volumes", "pools"]
    assert [len(list_of[member]) for member, list_of in zip(members, before.values())] == [4, 3, 2, 2, 1, 1]
    await restart(server, "kill")
    assert await shown() == before

    async def is_filled() -> bool:
        return (await request(server, "GET", "/pools/p")).json()["ready_replicas"] == 2

    await eventually_async(is_filled)
    # The settings still have their effect.
    box = await call(client.get_sandbox, "all")
    assert (await call(box.run, "echo $A $B $PWD; cat /tmp/kept")).stdout == "own b /tmp\nkept"
    mounted = await call(client.get_sandbox, "mounted")
    assert (await call(mounted.run, "cat /data/file")).stdout == "kept\n"
    stopped = await call(client.get_sandbox, "stopped")
    assert stopped.status == "stopped"
    started = await request(server, "POST", "/boxes/stopped/start", json={})
    assert started.is_success

    async def has_started() -> bool:
        return (await call(client.get_sandbox_status, "stopped")).status == "ready"

    await eventually_async(has_started)
    stopped = await call(client.get_sandbox, "stopped")
    assert (await call(stopped.run, "echo $B")).stdout == "b\n"
