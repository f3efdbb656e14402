"""Templates, volumes and pools, which the older releases have."""

import asyncio
import shutil
import subprocess

import httpx
import pytest
from conftest import OTHER_TOKEN, TOKEN, AsyncSandboxClient, SandboxClient, call, create, new_name, request
from langsmith.sandbox import (
    ResourceAlreadyExistsError,
    ResourceCreationError,
    ResourceInUseError,
    ResourceNameConflictError,
    ResourceNotFoundError,
    ResourceTimeoutError,
    SandboxClientError,
    SandboxNotReadyError,
    ValidationError,
    VolumeMountSpec,
)
from program import BOXD, environment
from waiting import eventually_async

pytestmark = pytest.mark.asyncio


async def test_a_template_has_the_resources_that_were_asked(client):
    name = new_name()
    made = await call(client.create_template, name=name, image="host", cpu="500m", memory="512Mi")
    assert (made.name, made.image, made.volume_mounts) == (name, "host", [])
    assert (made.resources.cpu, made.resources.memory, made.resources.storage) == ("500m", "512Mi", None)
    assert made.id and made.created_at and made.updated_at
    found = await call(client.get_template, name)
    assert (found.id, found.resources.cpu) == (made.id, "500m")
    assert name in [template.name for template in await call(client.list_templates)]
    renamed = await call(client.update_template, name, new_name=name + "-b")
    assert (renamed.id, renamed.name) == (made.id, name + "-b")
    box = await create(client, template_name=name + "-b")
    assert box.template_name == name + "-b"
    much = await call(box.run, "python3 -c 'x = bytearray(700 << 20); print(1)'")
    assert (much.stdout, much.exit_code) == ("", 137)
    renamed = await call(client.update_template, name + "-b", new_name=name + "-c")
    assert (await call(client.get_sandbox, box.name)).template_name == name + "-c"
    await call(client.update_template, name + "-c", new_name=name + "-b")
    await call(client.delete_sandbox, box.name)
    await call(client.delete_template, name + "-b")
    with pytest.raises(ResourceNotFoundError) as refused:
        await call(client.get_template, name)
    assert refused.value.resource_type == "template"


@pytest.mark.parametrize(
    "options, field",
    [
        ({"cpu": "lots"}, "cpu"),
        ({"cpu": "100000"}, "cpu"),
        ({"memory": "-1"}, "memory"),
        ({"memory": "1Mi"}, "memory"),
        ({"memory": "99999Ti"}, "memory"),
        ({"storage": "99999Ti"}, "storage"),
    ],
)
async def test_an_invalid_template_is_refused(client, options, field):
    with pytest.raises(ValidationError) as refused:
        await call(client.create_template, name=new_name(), image="host", **options)
    assert refused.value.field == field
    assert refused.value.details[0]["type"] == "value_error"


async def test_a_taken_template_name_is_a_conflict(client):
    one, other = new_name(), new_name()
    for name in (one, other):
        await call(client.create_template, name=name, image="host")
    with pytest.raises(ResourceNameConflictError):
        await call(client.update_template, one, new_name=other)
    with pytest.raises(SandboxClientError):
        await call(client.create_template, name=one, image="host")
    for name in (one, other):
        await call(client.delete_template, name)


async def test_an_unknown_template_is_not_found(client):
    with pytest.raises(ResourceNotFoundError):
        await create(client, template_name="no-such-template")


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_an_image_that_its_registry_does_not_have_is_a_creation_error(own_server, image, kind):
    client = own_server(env={"BOXD_IMAGES_ALLOW_PULL": "*"}).client(kind, max_retries=0)
    missing = image.replace(":latest", ":none")
    await call(client.create_template, name="t", image=missing)
    with pytest.raises(ResourceCreationError, match="none") as refused:
        await create(client, template_name="t")
    assert (refused.value.resource_type, refused.value.error_type) == ("sandbox", "ImagePull")
    with pytest.raises(ResourceTimeoutError) as late:
        await call(client.create_pool, name="p", template_name="t", replicas=1, timeout=1)
    assert late.value.resource_type == "pool"
    assert await call(client.list_pools) == [] and await call(client.list_sandboxes) == []


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_pool_whose_registry_does_not_answer_is_a_timeout(own_server, kind):
    client = own_server(env={"BOXD_IMAGES_ALLOW_PULL": "*"}).client(kind, max_retries=0)
    # A registry that takes connections, and never answers.
    silent = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    await call(client.create_template, name="t", image=f"localhost:{port}/slow:1")
    with pytest.raises(ResourceTimeoutError) as refused:
        await call(client.create_pool, name="p", template_name="t", replicas=1, timeout=1)
    assert refused.value.resource_type == "pool"
    assert await call(client.list_pools) == []
    with pytest.raises(ResourceTimeoutError) as refused:
        await call(client.create_sandbox, template_name="t", timeout=1)
    assert refused.value.resource_type == "sandbox"
    silent.close()


async def test_an_image_that_the_policy_refuses_is_a_creation_error(client):
    name = new_name()
    await call(client.create_template, name=name, image="127.0.0.1:9/none/none:1")
    with pytest.raises(ResourceCreationError) as refused:
        await create(client, template_name=name)
    assert (refused.value.resource_type, refused.value.error_type) == ("sandbox", "ImagePull")
    await call(client.delete_template, name)


@pytest.mark.parametrize("script", ["echo no such package >&2; exit 3", "exit 3"])
async def test_a_preparation_that_fails_is_a_crash(server, client, script):
    """The SDK has no preparations; a template of the same token in Box's own catalog does."""
    name = new_name()
    env = environment(BOXD_ENDPOINT=f"ws://127.0.0.1:{server.port}/rpc/ws", BOXD_TOKEN=TOKEN)
    subprocess.run([BOXD, "template", "create", name, "--prepare", script], env=env, check=True, timeout=120)
    with pytest.raises(ResourceCreationError) as refused:
        await create(client, template_name=name)
    assert (refused.value.resource_type, refused.value.error_type) == ("sandbox", "CrashLoop")
    assert "exited with code 3" in str(refused.value)
    await call(client.delete_template, name)


async def test_a_box_that_is_not_waited_for_fails_with_the_reason(server, client):
    template = new_name()
    script = "sleep 1; echo no such package >&2; exit 3"
    env = environment(BOXD_ENDPOINT=f"ws://127.0.0.1:{server.port}/rpc/ws", BOXD_TOKEN=TOKEN)
    subprocess.run([BOXD, "template", "create", template, "--prepare", script], env=env, check=True, timeout=120)
    box = await create(client, template_name=template, wait_for_ready=False)
    assert box.status == "provisioning"
    with pytest.raises(ResourceCreationError) as refused:
        await call(client.wait_for_sandbox, box.name)
    assert refused.value.resource_type == "sandbox" and "no such package" in str(refused.value)
    status = await call(client.get_sandbox_status, box.name)
    assert status.status == "failed" and "exited with code 3" in status.status_message
    shown = await call(client.get_sandbox, box.name)
    assert (shown.status, shown.status_message) == (status.status, status.status_message)
    with pytest.raises(SandboxNotReadyError):
        await call(shown.read, "/etc/hostname")
    await call(client.delete_sandbox, box.name)
    with pytest.raises(ResourceNotFoundError):
        await call(client.get_sandbox_status, box.name)
    # A request that waits gets the error, and leaves no box.
    with pytest.raises(ResourceCreationError):
        await create(client, name=box.name, template_name=template)
    with pytest.raises(ResourceNotFoundError):
        await call(client.get_sandbox_status, box.name)
    await call(client.delete_template, template)


async def test_a_box_whose_volume_has_no_data_is_unschedulable(own_server):
    server = own_server()
    client = server.client()
    await call(client.create_volume, name="v", size="16Mi")
    mounts = [VolumeMountSpec(volume_name="v", mount_path="/data")]
    await call(client.create_template, name="t", image="host", volume_mounts=mounts)
    shutil.rmtree(server.state / "volumes")
    with pytest.raises(ResourceCreationError) as refused:
        await create(client, template_name="t")
    assert (refused.value.resource_type, refused.value.error_type) == ("sandbox", "Unschedulable")


async def test_a_volume_that_cannot_be_stored_is_not_provisioned(own_server):
    server = own_server()
    shutil.rmtree(server.state / "volumes", ignore_errors=True)
    (server.state / "volumes").write_text("no directory")
    with pytest.raises(ResourceCreationError) as refused:
        await call(server.client().create_volume, name="v", size="16Mi")
    assert (refused.value.resource_type, refused.value.error_type) == ("volume", "VolumeProvisioning")


async def test_a_volume_outlives_its_boxes(client):
    volume, template = new_name("v"), new_name()
    made = await call(client.create_volume, name=volume, size="64Mi")
    assert (made.name, made.size, made.storage_class) == (volume, "64Mi", "default") and made.id
    mounts = [VolumeMountSpec(volume_name=volume, mount_path="/data")]
    shown = await call(client.create_template, name=template, image="host", volume_mounts=mounts)
    assert [(mount.volume_name, mount.mount_path) for mount in shown.volume_mounts] == [(volume, "/data")]
    first = await create(client, template_name=template)
    assert (await call(first.run, "echo kept > /data/file")).success
    with pytest.raises(ResourceInUseError) as refused:
        await call(client.delete_volume, volume)
    assert refused.value.resource_type == "volume"
    with pytest.raises(ValidationError) as refused:
        await call(client.update_volume, volume, size="128Mi")
    assert refused.value.error_type == "VolumeResize"
    with pytest.raises(SandboxClientError):
        await create(client, template_name=template)
    await call(client.delete_sandbox, first.name)
    second = await create(client, template_name=template)
    assert (await call(second.run, "cat /data/file")).stdout == "kept\n"
    await call(client.delete_sandbox, second.name)
    grown = await call(client.update_volume, volume, size="128Mi")
    assert (grown.id, grown.size) == (made.id, "128Mi")
    renamed = await call(client.update_volume, volume, new_name=volume + "-b")
    assert (renamed.id, renamed.name) == (made.id, volume + "-b")
    assert volume + "-b" in [volume.name for volume in await call(client.list_volumes)]
    await call(client.delete_template, template)
    await call(client.delete_volume, volume + "-b")
    with pytest.raises(ResourceNotFoundError) as refused:
        await call(client.get_volume, volume)
    assert refused.value.resource_type == "volume"


async def test_a_volume_does_not_shrink(client):
    volume = new_name("v")
    await call(client.create_volume, name=volume, size="64Mi")
    for size in ("32Mi", "1Mi"):
        with pytest.raises(ValidationError, match="at least the 64Mi") as refused:
            await call(client.update_volume, volume, size=size)
        assert refused.value.error_type == "VolumeResize"
    for size in ("64Mi", "65Mi"):
        await call(client.update_volume, volume, size=size)
        assert (await call(client.get_volume, volume)).size == size
    await call(client.delete_volume, volume)


async def test_a_volume_of_a_template_is_in_use(client):
    volume, template = new_name("v"), new_name()
    await call(client.create_volume, name=volume, size="16Mi")
    mounts = [VolumeMountSpec(volume_name=volume, mount_path="/data")]
    await call(client.create_template, name=template, image="host", volume_mounts=mounts)
    with pytest.raises(ResourceInUseError, match=template) as refused:
        await call(client.delete_volume, volume)
    assert refused.value.resource_type == "volume"
    await call(client.delete_template, template)
    await call(client.delete_volume, volume)


async def test_a_template_of_a_box_is_in_use(client):
    template = new_name()
    await call(client.create_template, name=template, image="host")
    box = await create(client, template_name=template)
    with pytest.raises(ResourceInUseError, match=box.name) as refused:
        await call(client.delete_template, template)
    assert refused.value.resource_type == "template"
    await call(client.delete_sandbox, box.name)
    await call(client.delete_template, template)


async def test_errors_name_the_sizes_of_the_request(client):
    with pytest.raises(ValidationError) as refused:
        await call(client.create_volume, name=new_name(), size="1Mi")
    assert refused.value.details[0]["msg"].startswith("size: in MiB, must be between 16 and ")
    with pytest.raises(ValidationError) as refused:
        await call(client.create_template, name=new_name(), image="host", memory="1Mi")
    assert refused.value.details[0]["msg"] == "resources.memory: in MiB, 1 is below the minimum of 32"


async def test_a_template_follows_its_volume_to_another_name(client):
    volume, template = new_name("v"), new_name()
    await call(client.create_volume, name=volume, size="16Mi")
    mounts = [VolumeMountSpec(volume_name=volume, mount_path="/data")]
    await call(client.create_template, name=template, image="host", volume_mounts=mounts)
    await call(client.update_volume, volume, new_name=volume + "-b")
    shown = await call(client.get_template, template)
    assert [(mount.volume_name, mount.mount_path) for mount in shown.volume_mounts] == [(volume + "-b", "/data")]
    box = await create(client, template_name=template)
    assert (await call(box.run, "echo x > /data/file")).success
    await call(client.delete_sandbox, box.name)
    await call(client.delete_template, template)
    await call(client.delete_volume, volume + "-b")


async def test_the_box_of_a_client_that_leaves_is_deleted(server, client):
    template, name = new_name(), new_name()
    env = environment(BOXD_ENDPOINT=f"ws://127.0.0.1:{server.port}/rpc/ws", BOXD_TOKEN=TOKEN)
    subprocess.run([BOXD, "template", "create", template, "--prepare", "sleep 4"], env=env, check=True, timeout=120)
    with pytest.raises(httpx.ReadTimeout):
        await request(server, "POST", "/boxes", json={"name": name, "template_name": template}, timeout=1.5)

    async def is_gone() -> bool:
        return name not in [box.name for box in await call(client.list_sandboxes)]

    await eventually_async(is_gone)
    again = await create(client, name=name)
    await call(client.delete_sandbox, again.name)
    await call(client.delete_template, template)


async def test_an_invalid_volume_is_refused(client):
    for size in ["tiny", "1Mi"]:
        with pytest.raises(ValidationError) as refused:
            await call(client.create_volume, name=new_name(), size=size)
        assert refused.value.field == "size"
    taken = new_name("v")
    await call(client.create_volume, name=taken, size="16Mi")
    other = new_name("v")
    await call(client.create_volume, name=other, size="16Mi")
    with pytest.raises(ResourceNameConflictError):
        await call(client.update_volume, other, new_name=taken)
    for name in (taken, other):
        await call(client.delete_volume, name)


async def test_a_pool_keeps_boxes_ready(client):
    template, pool = new_name(), new_name("p")
    await call(client.create_template, name=template, image="host", cpu="1", memory="256Mi")
    made = await call(client.create_pool, name=pool, template_name=template, replicas=1, timeout=120)
    assert (made.name, made.template_name, made.replicas) == (pool, template, 1) and made.id
    box = await create(client, template_name=template)
    assert (await call(box.run, "echo from a pool")).stdout == "from a pool\n"
    await call(client.delete_sandbox, box.name)
    grown = await call(client.update_pool, pool, replicas=2)
    assert (grown.id, grown.replicas) == (made.id, 2)
    with pytest.raises(ResourceAlreadyExistsError):
        await call(client.create_pool, name=pool, template_name=template, replicas=1)
    with pytest.raises(ResourceInUseError) as refused:
        await call(client.delete_template, template)
    assert refused.value.resource_type == "template"
    renamed = await call(client.update_pool, pool, new_name=pool + "-b")
    assert (renamed.id, renamed.name) == (made.id, pool + "-b")
    assert pool + "-b" in [pool.name for pool in await call(client.list_pools)]
    await call(client.delete_pool, pool + "-b")
    with pytest.raises(ResourceNotFoundError) as refused:
        await call(client.get_pool, pool)
    assert refused.value.resource_type == "pool"
    await call(client.delete_template, template)


async def test_boxes_come_from_the_pool_of_their_template(server, client):
    """The record of the box, as the server itself keeps it, names the pool."""
    template, pool = new_name(), new_name("p")
    await call(client.create_template, name=template, image="host", cpu="1", memory="256Mi")
    await call(client.create_pool, name=pool, template_name=template, replicas=1, timeout=120)
    box = await create(client, template_name=template)
    env = environment(BOXD_ENDPOINT=f"unix:{server.state}/boxd.sock")
    shown = subprocess.run([BOXD, "inspect", f"{box.id}@ann"], env=env, capture_output=True, text=True)
    if shown.returncode != 0:
        shown = subprocess.run([BOXD, "inspect", box.id], env=env, capture_output=True, text=True)
    assert f'"pool": "{pool}"' in shown.stdout, (shown.stdout, shown.stderr)
    await call(client.delete_sandbox, box.name)
    await call(client.delete_pool, pool)
    await call(client.delete_template, template)


async def test_an_invalid_pool_is_refused(client):
    with pytest.raises(ResourceNotFoundError) as unknown:
        await call(client.create_pool, name=new_name(), template_name="no-such-template", replicas=1)
    assert unknown.value.resource_type == "template"
    volume, template = new_name("v"), new_name()
    await call(client.create_volume, name=volume, size="16Mi")
    mounts = [VolumeMountSpec(volume_name=volume, mount_path="/data")]
    await call(client.create_template, name=template, image="host", volume_mounts=mounts)
    with pytest.raises(ValidationError) as refused:
        await call(client.create_pool, name=new_name(), template_name=template, replicas=1)
    assert refused.value.error_type == "ValidationError"
    with pytest.raises(ValidationError) as refused:
        await call(client.create_pool, name=new_name(), template_name="base", replicas=0)
    assert refused.value.field == "replicas"
    await call(client.delete_template, template)
    await call(client.delete_volume, volume)


async def test_a_pool_has_up_to_100_boxes(server, client):
    """Its image cannot be pulled, so the test starts no boxes."""
    template, pool = new_name(), new_name("p")
    await call(client.create_template, name=template, image="127.0.0.1:9/none/none:1")
    wanted = {"name": pool, "template_name": template, "replicas": 100, "wait_for_ready": False}
    made = await request(server, "POST", "/pools", json=wanted)
    assert (made.status_code, made.json()["replicas"]) == (201, 100)
    with pytest.raises(ValidationError, match="between 1 and 100") as refused:
        await call(client.update_pool, pool, replicas=101)
    assert refused.value.field == "replicas"
    await call(client.delete_pool, pool)
    await call(client.delete_template, template)


async def test_a_pool_whose_boxes_fail_is_a_timeout(server):
    """The SDK repeats the request three times."""
    client, template, pool = server.client(), new_name(), new_name("p")
    await call(client.create_template, name=template, image="127.0.0.1:9/none/none:1")
    with pytest.raises(ResourceTimeoutError) as refused:
        await call(client.create_pool, name=pool, template_name=template, replicas=1, timeout=1)
    assert refused.value.resource_type == "pool"
    assert pool not in [pool.name for pool in await call(client.list_pools)]
    await call(client.delete_template, template)


async def test_items_survive_a_restart_and_belong_to_their_token(own_server):
    server = own_server()
    client = server.client()
    await call(client.create_volume, name="v", size="16Mi")
    mounts = [VolumeMountSpec(volume_name="v", mount_path="/data")]
    made = await call(client.create_template, name="t", image="host", volume_mounts=mounts)
    server.kill()
    server.start()
    found = await call(client.get_template, "t")
    assert (found.id, found.created_at, found.volume_mounts) == (made.id, made.created_at, made.volume_mounts)
    stranger = server.client(token=OTHER_TOKEN)
    assert await call(stranger.list_templates) == [] and await call(stranger.list_volumes) == []
