"""Snapshots, stopped boxes and other settings of the newest release."""

import asyncio
import subprocess

import pytest
from conftest import OTHER_TOKEN, TOKEN, call, create, first, new_name, request, result
from langsmith._exceptions import InternalServerError
from langsmith.sandbox import (
    ResourceCreationError,
    ResourceNotFoundError,
    SandboxClientError,
    SandboxOperationError,
    ValidationError,
)
from program import BOXD, environment
from waiting import eventually_async

pytestmark = pytest.mark.asyncio


async def test_a_snapshot_of_a_box_makes_boxes(client, box):
    name = new_name("s")
    await call(box.write, "/tmp/made", b"before")
    first = await call(client.capture_snapshot, box.name, name)
    assert (first.name, first.status, first.tags) == (name, "ready", ["latest"])
    assert first.source_sandbox_id == box.id and first.created_at and first.fs_used_bytes > 0
    await call(box.write, "/tmp/made", b"after")
    second = await call(client.capture_snapshot, box.name, name, tag="v2")
    assert second.tags == ["v2"] and second.id != first.id
    for reference, content in [
        ({"snapshot": name}, b"before"),
        ({"snapshot_name": name}, b"before"),
        ({"snapshot": f"{name}:v2"}, b"after"),
        ({"snapshot_id": first.id}, b"before"),
    ]:
        made = await create(client, **reference)
        assert made.snapshot_id in (first.id, second.id)
        assert await call(made.read, "/tmp/made") == content
        await call(client.delete_sandbox, made.name)
    tags = {tag.tag: tag.snapshot_id for tag in await call(client.list_snapshot_tags, name)}
    assert tags == {"latest": first.id, "v2": second.id}
    moved = await call(client.capture_snapshot, box.name, name, tag="v2")
    assert (await call(client.get_snapshot, f"{name}:v2")).id == moved.id
    assert (await call(client.get_snapshot, second.id)).tags == []
    listed = await call(client.list_snapshots, name_contains=name)
    assert {snapshot.id for snapshot in listed} == {first.id, second.id, moved.id}
    assert len(await call(client.list_snapshots, name_contains=name, limit=2)) == 2
    assert len(await call(client.list_snapshots, name_contains=name, limit=2, offset=2)) == 1
    for snapshot in (first, second, moved):
        await call(client.delete_snapshot, snapshot.id)
    with pytest.raises(ResourceNotFoundError) as refused:
        await call(client.get_snapshot, name)
    assert refused.value.resource_type == "snapshot"
    with pytest.raises(ResourceNotFoundError):
        await call(client.list_snapshot_tags, name)


async def test_a_snapshot_of_an_image_makes_boxes(client):
    name = new_name("s")
    built = await call(client.create_snapshot, name, "host", 1 << 30, run_config={"env_vars": {"A": "1"}, "work_dir": "/tmp"})
    assert (built.status, built.docker_image, built.fs_capacity_bytes) == ("ready", "host", 1 << 30)
    assert built.run_config.env_vars == {"A": "1"}
    box = await create(client, snapshot=name)
    assert (await call(box.run, "echo $A $PWD")).stdout == "1 /tmp\n"
    assert box.fs_capacity_bytes == 1 << 30
    await call(client.delete_sandbox, box.name)
    await call(client.delete_snapshot, built.id)


async def test_an_image_that_cannot_be_pulled_is_a_failed_snapshot(client):
    name = new_name("s")
    with pytest.raises(ResourceCreationError) as refused:
        await call(client.create_snapshot, name, "127.0.0.1:9/none/none:1.2", 1 << 30)
    assert refused.value.resource_type == "snapshot" and str(refused.value)
    failed = (await call(client.list_snapshots, name_contains=name))[0]
    assert failed.status == "failed" and failed.status_message
    # The tag of the image.
    assert failed.tags == ["1.2"]
    # The next snapshot of this name and tag replaces a failed one.
    with pytest.raises(ResourceCreationError):
        await call(client.create_snapshot, name, "127.0.0.1:9/none/none:1.2", 1 << 30)
    (again,) = await call(client.list_snapshots, name_contains=name)
    assert (again.status, again.tags) == ("failed", ["1.2"]) and again.id != failed.id
    await call(client.delete_snapshot, again.id)


async def test_a_refused_snapshot_leaves_the_failed_one(server, client, box):
    """An item of Box's own catalog has the name that the new snapshot needs as its tag."""
    name = new_name("s")
    good = await call(client.capture_snapshot, box.name, name, tag="1")
    with pytest.raises(ResourceCreationError):
        await call(client.create_snapshot, name, "127.0.0.1:9/none/none:1", 1 << 30)
    (failed,) = [one for one in await call(client.list_snapshots, name_contains=name) if one.status == "failed"]
    env = environment(BOXD_ENDPOINT=f"ws://127.0.0.1:{server.port}/rpc/ws", BOXD_TOKEN=TOKEN)
    subprocess.run([BOXD, "snapshot", "create", box.id, f"{name}:2"], env=env, check=True, timeout=120)
    with pytest.raises(SandboxClientError, match="taken"):
        await call(client.capture_snapshot, box.name, name, tag="2")
    kept = await call(client.get_snapshot, failed.id)
    assert (kept.status, kept.status_message) == ("failed", failed.status_message)
    subprocess.run([BOXD, "snapshot", "rm", f"{name}:2"], env=env, check=True, timeout=120)
    for snapshot in (good, failed):
        await call(client.delete_snapshot, snapshot.id)


async def test_a_failed_build_leaves_the_name_to_the_snapshot_that_has_it(client, box):
    name = new_name("s")
    good = await call(client.capture_snapshot, box.name, name)
    with pytest.raises(ResourceCreationError):
        await call(client.create_snapshot, name, "127.0.0.1:9/none/none:1", 1 << 30, tag="latest")
    found = await call(client.get_snapshot, name)
    assert (found.id, found.status, found.tags) == (good.id, "ready", ["latest"])
    made = await create(client, snapshot=name)
    assert made.snapshot_id == good.id
    await call(client.delete_sandbox, made.name)
    for snapshot in await call(client.list_snapshots, name_contains=name):
        await call(client.delete_snapshot, snapshot.id)


async def test_boxes_of_a_snapshot_begin_with_the_settings_of_its_box(client):
    box = await create(client, run_config={"work_dir": "/tmp", "env_vars": {"A": "box", "B": "box"}})
    name = new_name("s")
    made = await call(client.capture_snapshot, box.name, name, run_config={"env_vars": {"B": "capture"}})
    assert made.run_config.env_vars == {"A": "box", "B": "capture"}
    copy = await create(client, snapshot_id=made.id)
    assert (await call(copy.run, "echo $A $B $PWD")).stdout == "box capture /tmp\n"
    with pytest.raises(ValidationError) as refused:
        await call(client.capture_snapshot, box.name, name, run_config={"env_vars": {"C": "x" * 20000}})
    assert refused.value.field == "run_config"
    for one in (box, copy):
        await call(client.delete_sandbox, one.name)
    await call(client.delete_snapshot, made.id)


async def test_an_unknown_snapshot_is_not_found(client):
    for reference in ["none", "none:1", "01234567-89ab-7def-8123-456789abcdef"]:
        with pytest.raises(ResourceNotFoundError):
            await create(client, snapshot=reference)


async def test_snapshots_belong_to_their_token(server, client, box):
    name = new_name("s")
    made = await call(client.capture_snapshot, box.name, name)
    stranger = server.client(token=OTHER_TOKEN)
    with pytest.raises(ResourceNotFoundError):
        await asyncio.to_thread(stranger.get_snapshot, made.id)
    assert await asyncio.to_thread(stranger.list_snapshots) == []
    await call(client.delete_snapshot, made.id)


async def test_a_box_stops_starts_and_wakes(client, box):
    await call(box.write, "/tmp/kept", b"kept")
    await call(client.stop_sandbox, box.name)
    stopped = await call(client.get_sandbox, box.name)
    assert stopped.status == "stopped" and stopped.stopped_at
    started = await call(client.start_sandbox, box.name, timeout=120)
    assert started.status == "ready" and await call(started.read, "/tmp/kept") == b"kept"
    await call(client.stop_sandbox, box.name)
    # A call to the inside starts the box.
    assert (await call(box.run, "cat /tmp/kept")).stdout == "kept"
    assert (await call(client.get_sandbox, box.name)).status == "ready"


async def test_the_output_and_status_of_a_command_outlive_a_stop(client, box):
    done = await call(box.run, "echo done; exit 3", wait=False)
    await result(done)
    killed = await call(box.run, "echo begun; sleep 1111", wait=False, timeout=0)
    assert (await first(killed)).data == "begun\n"
    await call(client.stop_sandbox, box.name)
    again = await result(await call(box.reconnect, done.command_id))
    assert (again.stdout, again.exit_code) == ("done\n", 3)
    try:
        again = await result(await call(box.reconnect, killed.command_id))
        assert (again.stdout, again.exit_code) == ("begun\n", 137)
    except SandboxOperationError as error:
        assert error.error_type == "CommandError"


@pytest.mark.timeout(120)
async def test_output_that_is_lost_is_an_error(own_server):
    """The client would try to connect again for ever if the connection broke instead."""
    server = own_server()
    client = server.client()
    box = await create(client)
    done = await call(box.run, "echo done", wait=False)
    await result(done)
    await call(client.stop_sandbox, box.name)
    (output,) = server.state.glob("history/*/0.json")
    output.unlink()
    with pytest.raises(SandboxOperationError) as refused:
        await result(await call(box.reconnect, done.command_id))
    assert refused.value.error_type == "CommandError"


async def test_sizes_and_settings_are_applied(client):
    box = await create(
        client,
        vcpus=2,
        mem_bytes=300 << 20,
        fs_capacity_bytes=256 << 20,
        delete_after_stop_seconds=120,
        run_config={"work_dir": "/tmp", "env_vars": {"A": "box", "B": "box"}},
    )
    assert (box.vcpus, box.mem_bytes, box.fs_capacity_bytes) == (2, 300 << 20, 256 << 20)
    assert (box.idle_ttl_seconds, box.delete_after_stop_seconds) == (600, 120)
    assert (await call(box.run, "echo $PWD $A $B", env={"B": "command"})).stdout == "/tmp box command\n"
    changed = await call(client.update_sandbox, box.name, run_config={"env_vars": {"A": "changed"}}, delete_after_stop_seconds=0)
    assert changed.delete_after_stop_seconds == 0
    assert (await call(box.run, "echo $A $B")).stdout == "changed box\n"
    done = await call(box.run, "echo $A $PWD", run_config={"work_dir": "/", "env_vars": {"A": "run"}})
    assert done.stdout == "run /\n"
    full = await call(box.run, "head -c 400M /dev/zero > /tmp/full")
    assert not full.success and "No space left" in full.stderr
    await call(client.delete_sandbox, box.name)


@pytest.mark.parametrize(
    "options, field",
    [
        ({"persistent": False}, "persistent"),
        ({"proxy_config": {"rules": [{"name": "x", "match_hosts": ["a"]}]}}, "proxy_config"),
        ({"access_delegation": {"mode": "INHERIT"}}, "access_delegation"),
        ({"mem_bytes": 1}, "mem_bytes"),
        ({"mem_bytes": 2**64 - 1}, "mem_bytes"),
        ({"fs_capacity_bytes": 2**60}, "fs_capacity_bytes"),
        ({"vcpus": 0}, "vcpus"),
        ({"name": "a/b"}, "name"),
        # The SDK keeps the last word of `run_config.work_dir`.
        ({"run_config": {"work_dir": "relative"}}, "work_dir"),
        ({"run_config": {"user": "root"}}, "user"),
    ],
)
async def test_fields_that_boxes_lack_are_refused(client, options, field):
    with pytest.raises(ValidationError) as refused:
        await create(client, **options)
    assert refused.value.field == field


async def test_sizes_have_the_names_and_units_of_their_request(server):
    for request_body, rule in [
        ({"cpu_millicores": 1}, "between 10 and 1024000"),
        ({"cpu_millicores": 2**64 - 1}, "between 10 and 1024000"),
        ({"mem_bytes": 2**64 - 1}, f"at most {2**50} bytes"),
        ({"mem_bytes": 1}, "mem_bytes: in MiB, 1 is below the minimum of 32"),
    ]:
        refused = await request(server, "POST", "/boxes", json=request_body)
        detail = refused.json()["detail"][0]
        assert (refused.status_code, detail["loc"]) == (422, ["body", *request_body])
        assert rule in detail["msg"]


async def test_a_box_without_an_image_has_one_user(client, box):
    name = new_name("s")
    for function, arguments in [
        (client.update_sandbox, [box.name]),
        (client.capture_snapshot, [box.name, name]),
        (client.create_snapshot, [name, "host", 1 << 30]),
    ]:
        with pytest.raises(ValidationError) as refused:
            await call(function, *arguments, run_config={"user": "root"})
        assert refused.value.field == "user"
    await call(client.update_sandbox, box.name, run_config={"user": "box"})
    assert (await call(box.run, "echo $USER")).stdout == "box\n"


async def test_a_box_on_an_image_may_have_a_user_of_the_image(own_server, image):
    client, name = own_server(env={"BOXD_IMAGES_ALLOW_PULL": "*"}).client(), new_name("s")
    await call(client.create_snapshot, name, image, 1 << 30, timeout=120, run_config={"user": "root"})
    box = await create(client, snapshot=name)
    assert box.run_config.user == "root"
    assert (await call(box.run, "id -u; echo $HOME")).stdout == "0\n/root\n"
    captured = await call(client.capture_snapshot, box.name, name, tag="captured")
    assert captured.run_config.user == "root"
    guest = await create(client, snapshot=name, run_config={"user": "box"})
    assert (await call(guest.run, "echo $USER")).stdout == "box\n"
    with pytest.raises(ValidationError) as refused:
        await create(client, snapshot=name, run_config={"user": "no-such-user"})
    assert refused.value.field == "user"


async def test_input_is_closed_unless_requested(box):
    assert (await call(box.run, "cat; echo end")).stdout == "end\n"
    handle = await call(box.run, "cat", wait=False, close_input=False)
    await call(handle.send_input, "typed")
    await call(handle.close_input if hasattr(handle, "close_input") else handle.close_stdin)
    assert (await result(handle)).stdout == "typed"


async def test_a_command_of_another_user_is_refused(box):
    with pytest.raises(SandboxOperationError):
        await call(box.run, "id", run_config={"user": "no-such-user"})


async def test_registries_are_not_part_of_this_server(client):
    registries = client.registries
    # This client repeats a request after 501.
    registries._client.max_retries = 0
    assert (await call(registries.list)).registries == []
    for function, arguments, options in [
        (registries.create, [], {"name": "r", "url": "https://r", "username": "u", "password": "p"}),
        (registries.retrieve, ["r"], {}),
        (registries.update, ["r"], {"username": "u"}),
        (registries.delete, ["r"], {}),
    ]:
        with pytest.raises(InternalServerError) as refused:
            await call(function, *arguments, **options)
        assert refused.value.status_code == 501, function


async def is_gone(client, name: str) -> bool:
    try:
        await call(client.get_sandbox, name)
    except ResourceNotFoundError:
        return True
    return False


async def test_lifetimes_end_boxes(server, client):
    """The SDK takes whole minutes only; the server takes seconds."""
    names = {key: new_name("l") for key in ("ttl", "idle", "stopped")}
    lifetimes = {
        "ttl": {"ttl_seconds": 3},
        "idle": {"idle_ttl_seconds": 2},
        "stopped": {"idle_ttl_seconds": 2, "delete_after_stop_seconds": 2},
    }
    for key, lifetime in lifetimes.items():
        made = await request(server, "POST", "/boxes", json={"name": names[key], **lifetime})
        assert made.status_code == 201, made.text
    for key in ("ttl", "stopped"):
        await eventually_async(lambda: is_gone(client, names[key]))

    async def is_stopped() -> bool:
        return (await call(client.get_sandbox, names["idle"])).status == "stopped"

    await eventually_async(is_stopped)
    await call(client.delete_sandbox, names["idle"])


async def test_an_unknown_box_is_not_found(client):
    for function, arguments in [
        (client.get_sandbox, []),
        (client.get_sandbox_status, []),
        (client.delete_sandbox, []),
        (client.start_sandbox, []),
        (client.stop_sandbox, []),
        (client.capture_snapshot, [new_name()]),
        (client.service, [80]),
        (client.generate_download_url, ["/etc/passwd"]),
    ]:
        with pytest.raises(ResourceNotFoundError) as refused:
            await call(function, "no-such-box", *arguments)
        assert refused.value.resource_type == "sandbox", function
    with pytest.raises(ResourceNotFoundError) as refused:
        await call(client.update_sandbox, "no-such-box", new_name=new_name())
    assert refused.value.resource_type == "sandbox"
