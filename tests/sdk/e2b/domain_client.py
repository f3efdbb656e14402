"""A client that has only the variables `E2B_DOMAIN` and `E2B_API_KEY`.

The SDK resolves the names below `localhost` by itself, and `httpx` needs help on some machines.
"""

import asyncio
import os
import pathlib
import socket
import tempfile
import time

DOMAIN = os.environ["E2B_DOMAIN"]
resolve = socket.getaddrinfo


def resolved(host, *more, **named):
    name = host.decode() if isinstance(host, bytes) else host
    return resolve("127.0.0.1" if name.endswith(".localhost") else host, *more, **named)


socket.getaddrinfo = resolved

import e2b_code_interpreter as interpreter  # noqa: E402
import httpx  # noqa: E402
from e2b import AsyncSandbox, Sandbox, Template  # noqa: E402


def get(address: str, **more) -> httpx.Response:
    return httpx.get(address, timeout=30, **more)


def sandboxes() -> None:
    sandbox = Sandbox.create(timeout=300, metadata={"kind": "domain"})
    assert sandbox.connection_config.domain == DOMAIN
    assert sandbox.commands.run("echo hello").stdout == "hello\n"
    sandbox.files.write("site/index.html", "hello from a port")
    assert sandbox.files.read("site/index.html") == "hello from a port"
    assert [item.sandbox_id for item in Sandbox.list().next_items()] == [sandbox.sandbox_id]
    # Ports.
    sandbox.commands.run("cd site && python3 -m http.server 8000", background=True)
    address = f"https://{sandbox.get_host(8000)}/"
    end = time.monotonic() + 60
    while (answer := get(address)).status_code != 200:
        assert time.monotonic() < end, answer.text
    assert answer.text == "hello from a port"
    # Signed addresses, which are below the name of the sandbox.
    download = sandbox.download_url("site/index.html")
    assert download.startswith(f"https://49983-{sandbox.sandbox_id}.{DOMAIN}/files?")
    assert get(download).text == "hello from a port"
    other = Sandbox.create(timeout=300)
    moved = download.replace(sandbox.sandbox_id, other.sandbox_id)
    assert get(moved).status_code == 401
    assert get(download.replace("index", "other")).status_code == 401
    sent = httpx.post(sandbox.upload_url("sent.txt"), files={"file": ("sent.txt", b"sent")})
    assert sent.status_code == 200 and sandbox.files.read("sent.txt") == "sent"
    assert other.kill() and sandbox.kill() and not sandbox.is_running()


def code() -> None:
    sandbox = interpreter.Sandbox.create(timeout=300)
    assert sandbox.run_code("x = 6; x * 7").text == "42"
    context = sandbox.create_code_context()
    assert sandbox.run_code("1 + 1", context=context).text == "2"
    sandbox.kill()


def builds() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "a.txt").write_text("copied")
        Template.build(Template(file_context_path=folder).from_base_image().copy("a.txt", "a.txt"), "by-domain")
    sandbox = Sandbox.create("by-domain", timeout=120)
    assert sandbox.files.read("a.txt") == "copied"
    sandbox.kill()


async def asynchronous() -> None:
    sandbox = await AsyncSandbox.create(timeout=300)
    assert (await sandbox.commands.run("echo hello")).stdout == "hello\n"
    await sandbox.kill()


sandboxes()
code()
builds()
asyncio.run(asynchronous())
print("done")
