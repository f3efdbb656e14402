"""Fixtures: the real `boxd`, and LangSmith's own clients connected to it.

The packages are LangSmith's, unmodified, from the registry. The suite runs with the oldest and the newest release that
the gateway supports. The older one has templates, volumes and pools; the newer one has snapshots and a second client.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
import os
import pathlib
import signal

import httpx
import pytest
import pytest_asyncio
from langsmith.sandbox import AsyncSandboxClient, SandboxClient
from program import Program, numbers
from registry import image  # noqa: F401
from waiting import eventually

TOKEN = "a-token-of-ann-0123456789-0123456789"
OTHER_TOKEN = "a-token-of-bob-0123456789-0123456789"

# The last release with templates is 0.7.33.
VERSION = tuple(int(part) for part in importlib.metadata.version("langsmith").split("."))
HAS_TEMPLATES = VERSION < (0, 7, 34)

collect_ignore = (
    ["test_deepagents.py", "test_generated.py", "test_links.py", "test_node.py", "test_snapshots.py", "test_sse.py"]
    if HAS_TEMPLATES
    else ["test_catalog.py"]
)


class Server(Program):
    """A `boxd serve --http` with two tokens."""

    def settings(self) -> dict[str, str]:
        return {"BOXD_TOKENS": f"ann {TOKEN}\nbob {OTHER_TOKEN}"}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, kind=SandboxClient, token: str = TOKEN, port: int | None = None, **options):
        endpoint = f"http://127.0.0.1:{port or self.port}/v2/sandboxes"
        return kind(api_endpoint=endpoint, api_key=token, **options)


@pytest.fixture(scope="session")
def server_class():
    return Server


async def request(server, method: str, path: str, **options) -> httpx.Response:
    """Sends a request that the SDK does not send."""
    headers = {"X-Api-Key": TOKEN}
    async with httpx.AsyncClient(headers=headers, timeout=options.pop("timeout", 120)) as web:
        return await web.request(method, f"{server.url}/v2/sandboxes{path}", **options)


def new_name(prefix: str = "n") -> str:
    return f"{prefix}-{os.getpid()}-{next(numbers)}"


async def call(function, *arguments, **options):
    """Calls a method of the synchronous or of the asynchronous client."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **options)
    answer = await asyncio.to_thread(function, *arguments, **options)
    return await answer if inspect.isawaitable(answer) else answer


async def create(client, **options):
    """Creates a box with default settings."""
    if HAS_TEMPLATES:
        options.setdefault("template_name", await default_template(client))
    return await call(client.create_sandbox, timeout=120, **options)


async def default_template(client) -> str:
    known = await call(client.list_templates)
    if not any(template.name == "base" for template in known):
        await call(client.create_template, name="base", image="host", cpu="2", memory="1Gi")
    return "base"


async def result(handle):
    """Waits for the end of a command."""
    answer = await asyncio.to_thread(lambda: handle.result)
    return await answer if inspect.isawaitable(answer) else answer


async def chunks(handle) -> list:
    """Reads the output of a command to its end."""
    if hasattr(handle, "__aiter__"):
        return [chunk async for chunk in handle]
    return await asyncio.to_thread(lambda: list(handle))


async def first(handle):
    """Reads the first piece of output."""
    if hasattr(handle, "__aiter__"):
        async for chunk in handle:
            return chunk
    return await asyncio.to_thread(lambda: next(iter(handle)))


def open_input(box) -> dict:
    """Newer releases close the input unless a caller asks for it."""
    return {"close_input": False} if "close_input" in inspect.signature(type(box).run).parameters else {}


async def pieces(handle):
    """Reads the output of a command piece by piece. The client reads nothing while the caller uses a piece."""
    if hasattr(handle, "__aiter__"):
        async for chunk in handle:
            yield chunk
        return
    reader = iter(handle)
    while (chunk := await asyncio.to_thread(next, reader, None)) is not None:
        yield chunk


async def leave(handle) -> None:
    """Closes the connection of a handle, and leaves its command alone."""
    await call(handle._control._ws.close)


def fail(box) -> None:
    """Ends the first process of a box of the synchronous client, so that the box fails."""
    mark = f"9{os.getpid()}{next(numbers)}"
    box.run(f"exec sleep {mark}", wait=False, timeout=0)
    os.kill(eventually(lambda: first_process(mark), "the command runs"), signal.SIGKILL)


def process_of(mark: str) -> int | None:
    """Returns the process of the command `sleep` with this argument."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.joinpath("cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", mark.encode()]:
                return int(process.name)
    return None


def parent_of(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])


def first_process(mark: str) -> int | None:
    """Returns the first process of the box of that command, which is the parent of its others."""
    if (pid := process_of(mark)) is None:
        return None
    names = os.readlink(f"/proc/{pid}/ns/pid")
    while os.readlink(f"/proc/{(parent := parent_of(pid))}/ns/pid") == names:
        pid = parent
    return pid


def text_of(stream: str, output: list) -> str:
    return "".join(chunk.data for chunk in output if chunk.stream == stream)


def check_offsets(output: list, stdout: int = 0, stderr: int = 0) -> None:
    """Checks that every byte came once: each chunk begins where the one before has ended."""
    expected = {"stdout": stdout, "stderr": stderr}
    for chunk in output:
        assert chunk.offset == expected[chunk.stream], (chunk.stream, chunk.offset, expected)
        expected[chunk.stream] += len(chunk.data.encode())


@pytest_asyncio.fixture(params=["sync", "async"])
async def client(request, server):
    """Both clients of the SDK."""
    client = server.client(SandboxClient if request.param == "sync" else AsyncSandboxClient)
    yield client
    await call(client.close if request.param == "sync" else client.aclose)


@pytest_asyncio.fixture
async def box(client):
    """A box of one test."""
    box = await create(client)
    yield box
    await call(client.delete_sandbox, box.name)
