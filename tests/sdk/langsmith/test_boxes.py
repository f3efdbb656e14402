"""The life of a box."""

import asyncio
import contextlib
import datetime
import time

import pytest
from conftest import HAS_TEMPLATES, OTHER_TOKEN, TOKEN, call, create, default_template, fail, new_name, request
from langsmith.sandbox import (
    AsyncSandboxClient,
    ResourceNameConflictError,
    ResourceNotFoundError,
    SandboxAPIError,
    SandboxAuthenticationError,
    SandboxClient,
    SandboxClientError,
    SandboxNotReadyError,
    SandboxOperationError,
)
from waiting import eventually_async

pytestmark = pytest.mark.asyncio


async def test_a_box_is_created_found_listed_and_deleted(client):
    name = new_name()
    box = await create(client, name=name)
    assert (box.name, box.status, box.status_message) == (name, "ready", None)
    assert box.id and box.created_at and box.updated_at
    assert box.dataplane_url.startswith("http://127.0.0.1:") and not box.dataplane_url.endswith("/")
    found = await call(client.get_sandbox, name)
    assert (found.id, found.dataplane_url) == (box.id, box.dataplane_url)
    assert name in [box.name for box in await call(client.list_sandboxes)]
    status = await call(client.get_sandbox_status, name)
    assert (status.status, status.status_message) == ("ready", None)
    await call(client.delete_sandbox, name)
    with pytest.raises(ResourceNotFoundError) as refused:
        await call(client.get_sandbox, name)
    assert refused.value.resource_type == "sandbox"


async def test_a_name_is_made_up(client, box):
    assert box.name and box.name != box.id


async def test_a_new_name_keeps_the_id_and_the_commands(client, box):
    name = new_name()
    renamed = await call(client.update_sandbox, box.name, new_name=name)
    assert (renamed.name, renamed.id) == (name, box.id)
    assert (await call(box.run, "echo still here")).stdout == "still here\n"
    with pytest.raises(ResourceNotFoundError):
        await call(client.get_sandbox, box.name)
    box.name = name


async def test_a_taken_name_is_a_conflict(client, box):
    other = await create(client)
    try:
        with pytest.raises(ResourceNameConflictError):
            await call(client.update_sandbox, other.name, new_name=box.name)
        with pytest.raises(SandboxClientError) as refused:
            await create(client, name=box.name)
        assert type(refused.value) is SandboxClientError
    finally:
        await call(client.delete_sandbox, other.name)


async def test_a_box_that_is_not_waited_for_becomes_ready(client):
    box = await create(client, wait_for_ready=False)
    ready = await call(client.wait_for_sandbox, box.name)
    assert ready.status == "ready"
    assert (await call(ready.run, "echo ready")).stdout == "ready\n"
    await call(client.delete_sandbox, box.name)


async def test_lifetimes_are_shown_and_changed(client):
    box = await create(client, idle_ttl_seconds=120)
    assert box.idle_ttl_seconds == 120
    changed = await call(client.update_sandbox, box.name, idle_ttl_seconds=0)
    assert changed.idle_ttl_seconds == 0
    await call(client.delete_sandbox, box.name)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_context_deletes_its_box(server, kind, fails):
    client = server.client(kind)
    options = {"template_name": await default_template(client)} if HAS_TEMPLATES else {}
    names = []

    def use() -> None:
        with client, client.sandbox(timeout=120, **options) as box:
            names.append(box.name)
            assert box.run("true").success
            assert not fails, "of this test"

    async def use_async() -> None:
        async with client, await client.sandbox(timeout=120, **options) as box:
            names.append(box.name)
            assert (await box.run("true")).success
            assert not fails, "of this test"

    with pytest.raises(AssertionError, match="of this test") if fails else contextlib.nullcontext():
        await (asyncio.to_thread(use) if kind is SandboxClient else use_async())
    with pytest.raises(ResourceNotFoundError):
        await asyncio.to_thread(server.client().get_sandbox, names[0])


async def test_boxes_of_a_template_are_deleted_at_the_end_of_their_lifetimes(server):
    """The SDK takes whole minutes only; the server takes seconds."""
    client, template = server.client(), new_name()
    made = await request(server, "POST", "/templates", json={"name": template, "image": "host"})
    assert made.status_code == 201, made.text
    names = []
    for lifetime in ({"ttl_seconds": 3}, {"idle_ttl_seconds": 2}, {}):
        names.append(new_name("l"))
        made = await request(server, "POST", "/boxes", json={"name": names[-1], "template_name": template, **lifetime})
        assert made.status_code == 201, made.text
        assert lifetime.items() <= made.json().items()

    async def are_left() -> bool:
        listed = [box.name for box in await call(client.list_sandboxes)]
        return [name for name in names if name in listed] == names[2:]

    await eventually_async(are_left)
    for name in names[:2]:
        with pytest.raises(ResourceNotFoundError):
            await call(client.get_sandbox, name)
    # Without them, a box stays.
    kept = await call(client.get_sandbox, names[2])
    assert (kept.status, kept.idle_ttl_seconds) == ("ready", 0)
    await call(client.delete_sandbox, names[2])
    assert (await request(server, "DELETE", f"/templates/{template}")).is_success


async def test_boxes_of_other_tokens_do_not_exist(server, client, box):
    stranger = server.client(token=OTHER_TOKEN)
    with pytest.raises(ResourceNotFoundError):
        await asyncio.to_thread(stranger.get_sandbox, box.name)
    assert box.name not in [other.name for other in await asyncio.to_thread(stranger.list_sandboxes)]
    box_of_ann = await asyncio.to_thread(server.client().get_sandbox, box.name)
    box_of_ann._client = stranger
    with pytest.raises(SandboxOperationError) as refused:
        await asyncio.to_thread(box_of_ann.run, "true")
    assert refused.value.error_type == "SandboxNotFound"
    with pytest.raises(ResourceNotFoundError):
        await asyncio.to_thread(box_of_ann.read, "/etc/hostname")
    with pytest.raises(ResourceNotFoundError):
        await asyncio.to_thread(box_of_ann.write, "/tmp/file", b"x")
    for function in (stranger.delete_sandbox, stranger.get_sandbox_status):
        with pytest.raises(ResourceNotFoundError):
            await asyncio.to_thread(function, box.name)
    assert (await call(box.run, "ls /tmp/file")).exit_code != 0


async def test_a_wrong_key_is_refused(server):
    wrong = server.client(token="wrong")
    with pytest.raises(SandboxAuthenticationError):
        await asyncio.to_thread(wrong.list_sandboxes)
    with pytest.raises(SandboxAuthenticationError):
        await asyncio.to_thread(wrong.get_sandbox, "any")


async def test_both_prefixes_serve_the_api(server):
    for prefix in ["/v2/sandboxes", "/api/v2/sandboxes", "/api/v2/sandboxes/"]:
        client = SandboxClient(api_endpoint=f"{server.url}{prefix}", api_key=TOKEN)
        assert isinstance(await asyncio.to_thread(client.list_sandboxes), list)


async def test_errors_have_the_format_of_the_api(server):
    unknown = await request(server, "GET", "/no-such-path")
    assert (unknown.status_code, unknown.json()["detail"]["error"]) == (404, "NotFound")
    listed = await request(server, "POST", "/boxes", json=[])
    assert (listed.status_code, listed.json()["detail"][0]["loc"]) == (422, ["body"])


async def test_a_failed_box_is_not_ready(server, client):
    """The client must not repeat calls into a box whose processes are gone."""
    box = await create(client)
    await asyncio.to_thread(fail, await asyncio.to_thread(server.client().get_sandbox, box.name))

    async def has_failed() -> bool:
        return (await call(client.get_sandbox_status, box.name)).status == "failed"

    await eventually_async(has_failed)
    begun = time.monotonic()
    with pytest.raises(SandboxNotReadyError):
        await call(box.read, "/etc/hostname")
    # Repeated requests would take seven seconds.
    assert time.monotonic() - begun < 6
    await call(client.delete_sandbox, box.name)


async def test_another_endpoint_is_an_api_error(server):
    client = SandboxClient(api_endpoint=f"{server.url}/v2/sandboxes/other", api_key=TOKEN, max_retries=0)
    with pytest.raises(SandboxAPIError):
        await asyncio.to_thread(client.list_sandboxes)


async def test_boxes_survive_a_restart_of_the_server(own_server):
    server = own_server()
    client = server.client()
    box = await create(client, name="stays")
    await call(box.write, "/tmp/file", b"kept")
    server.kill()
    server.start()
    again = await call(client.get_sandbox, "stays")
    assert (again.id, again.created_at) == (box.id, box.created_at)
    assert await call(again.read, "/tmp/file") == b"kept"


async def test_a_box_expires_at_the_time_that_it_reports(client):
    option = "ttl_seconds" if HAS_TEMPLATES else "idle_ttl_seconds"
    box = await create(client, **{option: 60})
    assert getattr(box, option) == 60
    if HAS_TEMPLATES:
        left = datetime.datetime.fromisoformat(box.expires_at.replace("Z", "+00:00"))
        left -= datetime.datetime.now(datetime.timezone.utc)
        assert 0 < left.total_seconds() <= 60
        changed = await call(client.update_sandbox, box.name, ttl_seconds=0)
        assert changed.expires_at is None
    await call(client.delete_sandbox, box.name)


async def test_a_box_has_the_files_of_its_image(own_server, image):
    server = own_server(env={"BOXD_IMAGES_ALLOW_PULL": "*"})
    client, name = server.client(), new_name()
    if HAS_TEMPLATES:
        await call(client.create_template, name=name, image=image)
        options = {"template_name": name}
    else:
        snapshot = await call(client.create_snapshot, name, image, 1 << 30, timeout=120)
        assert (snapshot.status, snapshot.docker_image) == ("ready", image)
        options = {"snapshot_id": snapshot.id}
    for _ in range(2):
        # What one box wrote is not in the next.
        box = await call(client.create_sandbox, timeout=120, **options)
        assert await call(box.read, "/etc/of-the-image") == b"of the image\n"
        ran = await call(box.run, "cat /made; echo made > /made; cat /made; command -v python3 || echo none")
        assert (ran.stdout, ran.exit_code) == ("made\nnone\n", 0)
        await call(client.delete_sandbox, box.name)
