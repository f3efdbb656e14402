"""URLs of ports and of files."""

import asyncio
import datetime

import httpx
import pytest
from conftest import call, create
from langsmith.sandbox import ResourceNotFoundError, ValidationError
from waiting import eventually_async

pytestmark = pytest.mark.asyncio


async def web_server(box) -> None:
    await call(box.write, "/srv-files/index.html", b"<p>hello</p>")
    await call(box.run, "cd /srv-files && nohup python3 -m http.server 8123 > /tmp/web.log 2>&1", wait=False, timeout=0, idle_timeout=-1)

    async def listens() -> bool:
        probe = await call(box.run, "(exec 3<>/dev/tcp/127.0.0.1/8123) 2>/dev/null && echo up || true")
        return probe.stdout == "up\n"

    await eventually_async(listens)


async def test_a_service_answers_through_its_url(client, box):
    await web_server(box)
    service = await call(box.service, 8123)
    answer = await call(service.get, "/index.html")
    assert (answer.status_code, answer.text) == (200, "<p>hello</p>")
    is_async = hasattr(service, "get_browser_url")
    browser = await service.get_browser_url() if is_async else service.browser_url
    base = await service.get_service_url() if is_async else service.service_url
    token = await service.get_token() if is_async else service.token
    expires = await service.get_expires_at() if is_async else service.expires_at
    left = datetime.datetime.fromisoformat(expires.replace("Z", "+00:00")) - datetime.datetime.now(datetime.timezone.utc)
    assert 500 < left.total_seconds() <= 600
    async with httpx.AsyncClient() as web:
        assert (await web.get(browser)).text == "<p>hello</p>"
        assert (await web.get(f"{base}/index.html")).status_code == 401
        header = {"X-Langsmith-Sandbox-Service-Token": token}
        assert (await web.get(f"{base}/index.html", headers=header)).text == "<p>hello</p>"
        other = base.replace("/port/8123", "/port/8124")
        assert (await web.get(f"{other}/index.html", headers=header)).status_code == 401
        execute = base.replace("/port/8123", "/execute")
        assert (await web.post(execute, headers=header, json={"command": "id"})).status_code == 401


async def test_a_login_page_is_refused(client, box):
    with pytest.raises(ValidationError) as refused:
        await call(client.service, box.name, 8123, access="workspace")
    assert refused.value.field == "access"
    with pytest.raises(ResourceNotFoundError):
        await call(client.service, "no-such-box", 8123)


async def test_a_link_downloads_one_file(client, box):
    await call(box.write, "/tmp/dir/report \u00fc.html", b"<b>0123456789</b>")
    await call(box.write, "/tmp/other", b"secret")
    link = await call(box.generate_download_url, "/tmp/dir/report \u00fc.html", expires_in_seconds=60)
    other = await call(box.generate_download_url, "/tmp/other")
    inline = await call(
        box.generate_download_url, "/tmp/dir/report \u00fc.html", content_type="text/html", content_disposition="inline"
    )
    assert link.expires_at and other.expires_at is None
    async with httpx.AsyncClient() as web:
        answer = await web.get(link.download_url)
        assert (answer.status_code, answer.content) == (200, b"<b>0123456789</b>")
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment; ")
        shown = await web.get(inline.download_url)
        assert shown.headers["content-type"] == "text/html" and shown.headers["content-disposition"].startswith("inline; ")
        assert "sandbox" in shown.headers["content-security-policy"]
        part = await web.get(link.download_url, headers={"Range": "bytes=3-5"})
        assert (part.status_code, part.content) == (206, b"012")
        assert (await web.head(link.download_url)).headers["content-length"] == "17"
        # The signature of one link does not open another file.
        place = link.download_url.rsplit("/", 1)[0]
        forged = f"{place}/{other.download_url.rsplit('/', 1)[1]}"
        assert (await web.get(forged)).status_code == 401


async def test_urls_live_as_long_as_their_box(own_server):
    server = own_server()
    client = server.client()
    box = await create(client, name="kept")
    await web_server(box)
    port = (await call(box.service, 8123)).browser_url
    file = (await call(box.generate_download_url, "/srv-files/index.html")).download_url

    async def statuses() -> tuple[int, int]:
        async with httpx.AsyncClient() as web:
            return (await web.get(port)).status_code, (await web.get(file)).status_code

    assert await statuses() == (200, 200)
    await call(client.stop_sandbox, box.name)
    box = await call(client.start_sandbox, box.name, timeout=120)
    await web_server(box)
    assert await statuses() == (200, 200)
    server.kill()
    server.start()

    async def answers() -> bool:
        return await statuses() == (200, 200)

    await eventually_async(answers)
    await call(client.delete_sandbox, box.name)
    assert await statuses() == (401, 401)
    await web_server(await create(client, name="kept"))
    assert await statuses() == (401, 401)


async def test_a_link_ends_with_its_box(server):
    client = server.client()
    box = await create(client)
    await call(box.write, "/tmp/file", b"x")
    link = await call(box.generate_download_url, "/tmp/file")
    await call(client.delete_sandbox, box.name)
    answer = await asyncio.to_thread(httpx.get, link.download_url)
    assert answer.status_code == 401
