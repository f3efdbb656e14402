"""Clients of the official `mcp` packages, old and new, over both transports."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from program import BOXD, Program, environment

VERSION = importlib.metadata.version("mcp")
IS_NEW = not VERSION.startswith("1.")

TOKENS = {name: f"{name}-token-of-thirty-two-bytes-or-more" for name in ("ann", "bob")}

# The lifecycles that the package has: `initialize`, and `server/discover` of 2026-07-28.
MODES = ["legacy", "auto"] if IS_NEW else ["legacy"]


@dataclass
class Tools:
    """A connected client. Results are plain JSON, in the names of the protocol."""

    client: Any

    async def names(self) -> set[str]:
        return {tool["name"] for tool in await self.list()}

    async def list(self) -> list[dict]:
        return plain(await self.client.list_tools())["tools"]

    async def call_raw(self, name: str, arguments: dict, progress=None) -> dict:
        return plain(await self.client.call_tool(name, arguments, progress_callback=progress))

    async def call(self, tool: str, /, progress=None, **arguments) -> dict:
        """Returns the structured content of a call that succeeds, if it has any, with the text as `said`."""
        result = await self.call_raw(tool, arguments, progress)
        assert not result.get("isError"), result
        return {**result.get("structuredContent", {}), "said": result["content"][0]["text"], "content": result["content"]}

    async def refused(self, tool: str, /, **arguments) -> str:
        """Returns the text of a call that fails."""
        result = await self.call_raw(tool, arguments)
        assert result["isError"], result
        return result["content"][0]["text"]

    async def cancelled(self, name: str, when, **arguments) -> None:
        """Starts a call, and cancels it as this package does once `when` returns."""
        first_id = None if IS_NEW else self.client._request_id
        task = asyncio.create_task(self.client.call_tool(name, arguments))
        while not IS_NEW and self.client._request_id == first_id:
            await asyncio.sleep(0)
        await when()
        if not IS_NEW:
            # This package leaves it to its user to tell the server.
            from mcp import types

            params = types.CancelledNotificationParams(requestId=first_id)
            note = types.CancelledNotification(method="notifications/cancelled", params=params)
            await self.client.send_notification(types.ClientNotification(note))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def plain(model) -> dict:
    return model.model_dump(by_alias=True, mode="json", exclude_none=True)


@contextlib.asynccontextmanager
async def connected(transport, mode: str):
    """Connects a client of this package."""
    if IS_NEW:
        from mcp import Client

        async with Client(transport, mode=mode) as client:
            expected = "2026-07-28" if mode == "auto" else "2025-11-25"
            assert client.protocol_version == expected
            yield Tools(client)
        return
    async with transport as streams, ClientSession(*streams[:2]) as session:
        await session.initialize()
        yield Tools(session)


class Server(Program):
    """A `boxd serve` with the tokens of two callers."""

    def settings(self) -> dict[str, str]:
        return {"BOXD_TOKENS": "\n".join(f"{name} {token}" for name, token in TOKENS.items())}

    def url(self, path: str = "/mcp") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    @contextlib.asynccontextmanager
    async def client(self, mode: str, path: str = "/mcp", token: str = "ann"):
        if IS_NEW:
            import httpx2 as httpx
        else:
            import httpx
        headers = {"Authorization": f"Bearer {TOKENS[token]}"} if token else {}
        async with httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(300)) as http:
            async with connected(streamable_http_client(self.url(path), http_client=http), mode) as tools:
                yield tools


@pytest.fixture(scope="session")
def server_class():
    return Server


@contextlib.asynccontextmanager
async def over_stdio(mode: str, *options: str, **variables: str):
    params = StdioServerParameters(command=BOXD, args=["mcp", *options], env=environment(**variables))
    async with connected(stdio_client(params), mode) as tools:
        yield tools


@pytest_asyncio.fixture(params=[(transport, mode) for transport in ("stdio", "http") for mode in MODES], ids="-".join)
async def tools(request, server):
    """A client over each transport and in each lifecycle, each with a box of its own."""
    transport, mode = request.param
    name = f"box-{os.getpid()}-{mode}-{abs(hash(request.node.name)) % 10**9}"
    opened = over_stdio(mode) if transport == "stdio" else server.client(mode, f"/mcp?box={name}")
    # The fixture must enter and leave the client in one task.
    ready, done = asyncio.get_running_loop().create_future(), asyncio.Event()

    async def hold():
        try:
            async with opened as tools:
                tools.transport = transport
                ready.set_result(tools)
                await done.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    holder = asyncio.create_task(hold())
    yield await ready
    done.set()
    await holder


@pytest.fixture
def node():
    """Runs a script of Node with these arguments, and returns its output."""

    def run(script: str, *arguments: str) -> str:
        path = os.path.join(os.path.dirname(__file__), script)
        ran = subprocess.run(["node", path, *arguments], capture_output=True, text=True, timeout=280, env=os.environ)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    return run
