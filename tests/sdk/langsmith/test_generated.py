"""The second client of the newest release, which is generated from LangSmith's own description of the API."""

import asyncio
import inspect

import pytest
from conftest import TOKEN, call, new_name, request
from langsmith._client import AsyncLangsmith, Langsmith
from langsmith._exceptions import (
    AuthenticationError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
    UnprocessableEntityError,
)
from waiting import eventually_async

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=[Langsmith, AsyncLangsmith])
def sandboxes(request, server):
    return request.param(api_key=TOKEN, base_url=server.url, max_retries=0, timeout=120).sandboxes


async def test_a_box_is_created_listed_changed_and_deleted(sandboxes):
    boxes, name = sandboxes.boxes, new_name("g")
    made = await call(boxes.create, name=name, labels={"team": name}, env_vars={"A": "1"}, cpu_millicores=500, idle_ttl_seconds=0)
    assert (made.name, made.status, made.labels) == (name, "ready", {"team": name})
    assert (made.cpu_millicores, made.vcpus, made.persistent, made.idle_ttl_seconds) == (500, 1, True, 0)
    found = await call(boxes.retrieve, name)
    assert found.id == made.id and found.run_config.env_vars is None
    by_id = await call(boxes.retrieve, made.id)
    assert by_id.name == name
    changed = await call(boxes.update, name, body_name=name + "-b", idle_ttl_seconds=60)
    assert (changed.name, changed.id, changed.idle_ttl_seconds) == (name + "-b", made.id, 60)
    with pytest.raises(UnprocessableEntityError):
        await call(boxes.update, name + "-b", mem_bytes=1 << 34)
    assert (await call(boxes.get_status, name + "-b")).status == "ready"
    await call(boxes.stop, name + "-b")
    assert (await call(boxes.retrieve, name + "-b")).status == "stopped"
    await call(boxes.start, name + "-b")

    async def is_ready() -> bool:
        return (await call(boxes.get_status, name + "-b")).status == "ready"

    await eventually_async(is_ready)
    await call(boxes.delete, name + "-b")
    with pytest.raises(NotFoundError):
        await call(boxes.retrieve, name + "-b")


async def test_variables_of_a_box_lie_above_its_run_config(server, sandboxes):
    boxes, name = sandboxes.boxes, new_name("g")
    below = {"A": "below", "C": "below"}
    made = await call(boxes.create, name=name, env_vars={"A": "own", "B": "own"}, run_config={"env_vars": below})
    inside = server.client()

    async def said(box: str) -> str:
        found = await call(inside.get_sandbox, box)
        return (await call(found.run, "echo $A $B $C")).stdout

    assert made.run_config.env_vars == below and await said(name) == "own own below\n"
    changes = {"A": "changed", "B": "changed", "C": "changed"}
    changed = await call(boxes.update, name, run_config={"env_vars": changes})
    assert changed.run_config.env_vars == changes and await said(name) == "own own changed\n"
    # The gateway keeps both with the box; this client sends no `ttl_seconds`.
    changed = await request(server, "PATCH", f"/boxes/{name}", json={"ttl_seconds": 600})
    assert (changed.json()["run_config"], changed.json()["ttl_seconds"]) == ({"env_vars": changes}, 600)
    snapshot = await call(boxes.create_snapshot, name, body_name=name, run_config={"env_vars": {"C": "captured"}})
    assert snapshot.run_config.env_vars == {"A": "changed", "B": "changed", "C": "captured"}
    await call(boxes.create, name=name + "-b", snapshot_id=snapshot.id)
    assert await said(name + "-b") == "changed changed captured\n"
    for box in (name, name + "-b"):
        await call(boxes.delete, box)
    await call(sandboxes.snapshots.delete, snapshot.id)


async def pages(boxes, **filters) -> list:
    """Reads all pages of a list."""
    listed = boxes.list(**filters)
    if hasattr(listed, "__aiter__"):
        return [box async for box in listed]
    return await asyncio.to_thread(lambda: list(listed))


async def test_lists_are_filtered_sorted_and_cut_into_pages(sandboxes):
    boxes, mark = sandboxes.boxes, new_name("m")
    names = [f"{mark}-{letter}" for letter in "cab"]
    for name in names:
        await call(boxes.create, name=name, labels={"mark": mark, "name": name})
    try:
        listed = await pages(boxes, label=[f"mark={mark}"], page_size=2)
        assert [box.name for box in listed] == names
        assert [box.name for box in await pages(boxes, name_contains=mark, sort_by="name")] == sorted(names)
        down = await pages(boxes, label=["mark", f"mark={mark}"], sort_by="name", sort_order="desc", page_size=1)
        assert [box.name for box in down] == sorted(names, reverse=True)
        assert [box.name for box in await pages(boxes, label=[f"name={names[0]}"])] == [names[0]]
        assert await pages(boxes, name_contains=mark, status="stopped") == []
    finally:
        for name in names:
            await call(boxes.delete, name)


async def test_snapshots_links_and_service_urls(sandboxes):
    boxes, name = sandboxes.boxes, new_name("g")
    box = await call(boxes.create, name=name)
    made = await call(boxes.create_snapshot, name, body_name=name, tag="v1", labels={"a": "b"}, description="for a test")
    assert made.tags == ["v1"] and made.labels == {"a": "b"} and made.source_sandbox_id == box.id

    async def is_ready() -> bool:
        return (await call(sandboxes.snapshots.retrieve, made.id)).status == "ready"

    await eventually_async(is_ready)
    by_name = await call(sandboxes.snapshots.retrieve_by_name, name)
    assert by_name.name == name and [(tag.tag, tag.snapshot_id) for tag in by_name.tags] == [("v1", made.id)]
    with pytest.raises(UnprocessableEntityError):
        await call(boxes.create_snapshot, name, body_name=name, include_memory=True)
    listed = sandboxes.snapshots.list(name_contains=name)
    items = [item async for item in listed] if hasattr(listed, "__aiter__") else await asyncio.to_thread(lambda: list(listed))
    assert [item.id for item in items] == [made.id]
    link = await call(boxes.generate_download_url, name, path="/etc/passwd")
    assert link.download_url.startswith("http")
    service = await call(boxes.generate_service_url, name, port=80)
    assert service.token in service.browser_url
    urls = boxes.list_service_urls(name)
    urls = [url async for url in urls] if hasattr(urls, "__aiter__") else await asyncio.to_thread(lambda: list(urls))
    assert urls == []
    await call(boxes.delete, name)
    await call(sandboxes.snapshots.delete, made.id)


async def test_every_box_of_a_list_can_be_deleted_while_it_is_read(sandboxes):
    boxes, mark = sandboxes.boxes, new_name("d")
    names = [f"{mark}-{number}" for number in range(5)]
    for name in names:
        await call(boxes.create, name=name)
    for order in ("asc", "desc"):
        first = await call(boxes.list, name_contains=mark, page_size=2, sort_by="name", sort_order=order)
        seen = [box.name for box in first.items]
        await call(boxes.delete, seen[-1])
        rest = await call(first.get_next_page)
        expected = sorted(names, reverse=order == "desc")
        assert [box.name for box in rest.items] == expected[2:4]
        await call(boxes.create, name=seen[-1])

    def delete_all() -> list:
        seen = []
        for box in boxes.list(name_contains=mark, page_size=2):
            seen.append(box.name)
            boxes.delete(box.name)
        return seen

    async def delete_all_async() -> list:
        seen = []
        async for box in boxes.list(name_contains=mark, page_size=2):
            seen.append(box.name)
            await boxes.delete(box.name)
        return seen

    is_async = inspect.iscoroutinefunction(boxes.delete)
    seen = await delete_all_async() if is_async else await asyncio.to_thread(delete_all)
    assert sorted(seen) == names and await pages(boxes, name_contains=mark) == []


async def test_unsupported_fields_of_lists_and_urls_are_refused(sandboxes):
    boxes, name = sandboxes.boxes, new_name("g")
    await call(boxes.create, name=name, cpu_millicores=500)
    for filters in ({"created_by": "you"}, {"tag_value_id": ["x"]}):
        with pytest.raises(UnprocessableEntityError, match=next(iter(filters))):
            await pages(boxes, **filters)
    assert name in [box.name for box in await pages(boxes, created_by="me")]
    for options in ({"csp_sandbox": False}, {"csp_sandbox_flags": ["allow-scripts"]}, {"csp_source_bundles": ["any"]}):
        with pytest.raises(UnprocessableEntityError, match=next(iter(options))):
            await call(boxes.generate_download_url, name, path="/etc/passwd", **options)
    assert (await call(boxes.generate_download_url, name, path="/etc/passwd", csp_sandbox=True)).download_url
    # Without a login, this is the only mode.
    assert (await call(boxes.generate_service_url, name, port=80, access="off")).token
    # The sizes that the server shows are no change.
    assert (await call(boxes.update, name, vcpus=1)).cpu_millicores == 500
    with pytest.raises(UnprocessableEntityError):
        await call(boxes.update, name, vcpus=2)
    await call(boxes.delete, name)


async def test_volumes_of_a_box_have_their_id_and_their_name_of_now(server, sandboxes):
    volume, name = new_name("v"), new_name("g")
    made = await request(server, "POST", "/volumes", json={"name": volume, "size": "16Mi"})
    assert made.status_code == 201
    box = await call(sandboxes.boxes.create, name=name, volumes=[{"volume": volume, "mount_path": "/data"}])
    seen = [(one.volume_id, one.volume_name, one.mount_path, one.read_only) for one in box.volumes]
    assert seen == [(made.json()["id"], volume, "/data", False)]
    assert (await request(server, "PATCH", f"/volumes/{volume}", json={"name": f"{volume}-b"})).status_code == 200
    box = await call(sandboxes.boxes.retrieve, name)
    assert [(one.volume_id, one.volume_name) for one in box.volumes] == [(made.json()["id"], f"{volume}-b")]
    await call(sandboxes.boxes.delete, name)
    assert (await request(server, "DELETE", f"/volumes/{volume}-b")).status_code == 204


KINDS = pytest.mark.parametrize("kind", [Langsmith, AsyncLangsmith])


def boxes_of(kind, server, token: str = TOKEN):
    return kind(api_key=token, base_url=server.url, max_retries=0, timeout=120).sandboxes.boxes


@KINDS
async def test_errors_have_the_class_of_their_status(server, kind):
    with pytest.raises(AuthenticationError):
        await pages(boxes_of(kind, server, "wrong"))
    boxes, name = boxes_of(kind, server), new_name("g")
    for one in (name, name + "-b"):
        await call(boxes.create, name=one)
    with pytest.raises(ConflictError) as refused:
        await call(boxes.update, name, body_name=name + "-b")
    assert refused.value.status_code == 409 and name + "-b" in str(refused.value)
    with pytest.raises(ConflictError):
        await call(boxes.create, name=name)
    # This server cannot revoke a URL.
    with pytest.raises(InternalServerError) as refused:
        await call(boxes.delete_service_url, name, port=80)
    assert refused.value.status_code == 501
    for function in (boxes.retrieve, boxes.get_status, boxes.start, boxes.stop, boxes.delete):
        with pytest.raises(NotFoundError):
            await call(function, "no-such-box")
    for one in (name, name + "-b"):
        await call(boxes.delete, one)


@KINDS
async def test_too_many_boxes_and_calls_exceed_a_rate(own_server, kind):
    server = own_server(env={"BOXD_RUNTIME_MAX_BOXES_PER_TOKEN": "1", "BOXD_SERVER_CALLS_PER_TOKEN": "1"})
    boxes = boxes_of(kind, server)
    await call(boxes.create, name="one")
    with pytest.raises(RateLimitError, match="sandbox limit"):
        await call(boxes.create, name="two")
    box = server.client().get_sandbox("one")
    # A command that runs is a call.
    running = box.run("exec sleep 4444", wait=False, timeout=0)
    with pytest.raises(RateLimitError, match="calls_per_token"):
        await call(boxes.retrieve, "one")
    running.kill()


async def test_a_volume_that_is_read_only_keeps_its_data(server, sandboxes):
    volume, boxes, inside = new_name("v"), sandboxes.boxes, server.client()
    made = await request(server, "POST", "/volumes", json={"name": volume, "size": "16Mi"})
    assert made.status_code == 201
    for read_only, command, done in [
        (False, "echo kept > /data/file", ("", 0)),
        (True, "cat /data/file; echo lost 2>/dev/null > /data/file || exit 3", ("kept\n", 3)),
        (False, "cat /data/file", ("kept\n", 0)),
    ]:
        mounts = [{"volume": volume, "mount_path": "/data", "read_only": read_only}]
        box = await call(boxes.create, name=new_name("g"), volumes=mounts)
        assert [one.read_only for one in box.volumes] == [read_only]
        ran = await call((await call(inside.get_sandbox, box.name)).run, command)
        assert (ran.stdout, ran.exit_code) == done
        await call(boxes.delete, box.name)
    assert (await request(server, "DELETE", f"/volumes/{volume}")).status_code == 204


async def test_a_box_has_the_labels_of_its_snapshot(sandboxes):
    boxes, snapshots, name = sandboxes.boxes, sandboxes.snapshots, new_name("g")
    await call(boxes.create, name=name, labels={"of": "the box"})
    labels = {"team": "a", "stage": "snapshot"}
    made = await call(boxes.create_snapshot, name, body_name=name, labels=labels)
    assert made.labels == labels

    async def is_ready() -> bool:
        return (await call(snapshots.retrieve, made.id)).status == "ready"

    await eventually_async(is_ready)
    for options, inherited in [({}, labels), ({"labels": {"stage": "own"}}, {"team": "a", "stage": "own"})]:
        copy = await call(boxes.create, snapshot=name, **options)
        assert copy.labels == inherited
        await call(boxes.delete, copy.id)
    await call(boxes.delete, name)
    await call(snapshots.delete, made.id)


@pytest.mark.parametrize(
    "options",
    [
        {"preserve_memory_on_stop": True},
        {"restore_memory": True},
        {"mount_config": {"mounts": [{"type": "s3", "mount_path": "/data"}]}},
        {"tag_value_ids": ["01234567-89ab-7def-8123-456789abcdef"]},
    ],
)
async def test_fields_that_boxes_lack_are_refused(sandboxes, options):
    (field,) = options
    name = new_name("g")
    with pytest.raises(UnprocessableEntityError, match=field):
        await call(sandboxes.boxes.create, name=name, **options)
    assert await pages(sandboxes.boxes, name_contains=name) == []
