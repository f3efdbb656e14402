"""Fixtures: the real `boxd`, LangBot's own client connected to it, and LangBot's own server for comparison.

The packages are LangBot's, unmodified, from the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib
from dataclasses import dataclass

import pytest
import pytest_asyncio
from langbot_plugin.box.client import ActionRPCBoxClient
from langbot_plugin.box.models import BoxSpec
from langbot_plugin.entities.io.context import ActionContext
from langbot_plugin.runtime.io.controllers.stdio.client import StdioClientController
from langbot_plugin.runtime.io.controllers.ws.client import WebSocketClientController
from langbot_plugin.runtime.io.handler import Handler
from program import BOXD, Program, environment, free_port, numbers
from waiting import eventually_async

TOKEN = "a-secret-of-langbot-and-its-runtime-0123456789"
INSTANCE = "inst-0001"


@dataclass
class Server(Program):
    """A `boxd serve --langbot`."""

    token: str = TOKEN

    def options(self) -> list[str]:
        return [f"--langbot=127.0.0.1:{self.port}"]

    def settings(self) -> dict[str, str]:
        return {"LANGBOT_BOX_CONTROL_TOKEN": self.token} if self.token else {}

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/rpc/ws"

    @property
    def relay_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def headers(self, instance: str = INSTANCE) -> dict[str, str]:
        headers = {"X-LangBot-Instance-Id": instance}
        if self.token:
            headers["X-LangBot-Box-Control-Token"] = self.token
        return headers

    def relay_headers(self, context: ActionContext) -> dict[str, str]:
        return {
            **self.headers(context.instance_uuid),
            "X-LangBot-Workspace-Id": context.workspace_uuid,
            "X-LangBot-Placement-Generation": str(context.placement_generation),
        }


@contextlib.asynccontextmanager
async def connected(controller):
    """Connects LangBot's own client with a new controller."""

    ready = asyncio.get_running_loop().create_future()

    async def on_connection(connection):
        handler = Handler(connection)
        ready.set_result(handler)
        await handler.run()

    task = asyncio.create_task(controller.run(on_connection))
    done, _ = await asyncio.wait([task, ready], timeout=30, return_when=asyncio.FIRST_COMPLETED)
    if ready not in done:
        task.cancel()
        raise ConnectionError("not connected")
    client = ActionRPCBoxClient(logger=logging.getLogger("box"))
    client.set_handler(ready.result())
    try:
        yield client
    finally:
        with contextlib.suppress(Exception):
            await client.handler.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        close = getattr(controller, "close", None)
        if close is not None:
            await close()


def websocket(server: Server, headers: dict[str, str] | None = None):
    async def failed(_controller, error):
        raise error or ConnectionError("not connected")

    return WebSocketClientController(
        ws_url=server.url,
        make_connection_failed_callback=failed,
        additional_headers=server.headers() if headers is None else headers,
    )


def stdio(directory: pathlib.Path, port: int, **more: str):
    env = environment(
        LANGBOT_BOX_CONTROL_TOKEN=TOKEN,
        LANGBOT_BOX_TRUSTED_INSTANCE_UUID=INSTANCE,
        **more,
    )
    arguments = ["stdio", "--langbot", "--ws-control-port", str(port)]
    return StdioClientController(command=BOXD, args=arguments, env=env, working_dir=str(directory))


@pytest.fixture(scope="session")
def server_class():
    return Server


@pytest.fixture
def context() -> ActionContext:
    """A new workspace for each test."""
    return ActionContext(
        instance_uuid=INSTANCE, workspace_uuid=f"workspace-{os.getpid()}-{next(numbers)}", placement_generation=1
    )


@pytest_asyncio.fixture(params=["websocket", "stdio"])
async def client(request, tmp_path):
    """LangBot's client, over both of its transports."""
    if request.param == "websocket":
        server = request.getfixturevalue("server")
        controller, relay = websocket(server), server.port
    else:
        relay = free_port()
        controller = stdio(tmp_path, relay)
    async with connected(controller) as client:
        client.relay_port = relay
        yield client


async def exists(path: pathlib.Path) -> None:
    async def is_file() -> bool:
        return path.exists()

    await eventually_async(is_file)


def spec(**members) -> BoxSpec:
    return BoxSpec(**{"session_id": "s1", "cmd": "true", **members})
