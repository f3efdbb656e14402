"""Fixtures: the real `boxd`, and OpenSandbox's own unmodified SDKs connected to it."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from datetime import timedelta

import httpx
import pytest
from blocking import Blocking
from opensandbox import Sandbox, SandboxManager
from opensandbox.config import ConnectionConfig
from opensandbox.config.connection_sync import ConnectionConfigSync
from opensandbox.models.execd import ExecutionHandlers
from opensandbox.models.execd_sync import ExecutionHandlersSync
from opensandbox.sync.manager import SandboxManagerSync
from opensandbox.sync.sandbox import SandboxSync
from program import Program
from registry import image  # noqa: F401

ANN = "a-token-of-ann-0123456789-0123456789"
BOB = "a-token-of-bob-0123456789-0123456789"

# The image of sandboxes that use the system directories of the machine.
HOST = "host"


@dataclass
class Server(Program):
    """A `boxd serve --http` with the tokens of two callers."""

    mounts: str = ""

    def options(self) -> list[str]:
        mounts = [f"--allow-mount={self.mounts}"] if self.mounts else []
        return [*super().options(), *mounts]

    def settings(self) -> dict[str, str]:
        return {"BOXD_TOKENS": f"ann {ANN}\nbob {BOB}\n"}

    @property
    def domain(self) -> str:
        return f"127.0.0.1:{self.port}"

    def config(self, proxy: bool = False, key: str = ANN) -> ConnectionConfigSync:
        return ConnectionConfigSync(domain=self.domain, protocol="http", api_key=key, use_server_proxy=proxy)

    def async_config(self, proxy: bool = False, key: str = ANN) -> ConnectionConfig:
        return ConnectionConfig(domain=self.domain, protocol="http", api_key=key, use_server_proxy=proxy)

    def api(self, key: str = ANN) -> httpx.Client:
        """Returns a plain client of the lifecycle API."""
        headers = {"OPEN-SANDBOX-API-KEY": key}
        return httpx.Client(base_url=f"http://{self.domain}/v1", headers=headers, timeout=60)

    def execd(self, sandbox_id: str) -> httpx.Client:
        """Returns a plain client of execd, with the headers that the endpoint lookup gives."""
        with self.api() as api:
            found = api.get(f"/sandboxes/{sandbox_id}/endpoints/44772").raise_for_status().json()
        return httpx.Client(base_url=f"http://{found['endpoint']}", headers=found["headers"], timeout=60)


@pytest.fixture(scope="session")
def mounts(tmp_path_factory):
    return tmp_path_factory.mktemp("mounts")


@pytest.fixture(scope="session")
def server_class(mounts):
    return functools.partial(Server, mounts=str(mounts))


Config = ConnectionConfigSync | ConnectionConfig


def sandboxes(config: Config):
    """Returns the class of sandboxes of a configuration; the asynchronous one is called as the synchronous one."""
    return SandboxSync if isinstance(config, ConnectionConfigSync) else Blocking(Sandbox)


def managed(config: Config):
    """Returns a manager of sandboxes."""
    manager = SandboxManagerSync if isinstance(config, ConnectionConfigSync) else Blocking(SandboxManager)
    return manager.create(connection_config=config)


def handlers(of, **calls):
    """Returns handlers of the kind that the methods of an object need."""
    if not isinstance(of, Blocking):
        return ExecutionHandlersSync(**calls)

    def asynchronous(call):
        async def called(event):
            call(event)

        return called

    return ExecutionHandlers(**{name: asynchronous(call) for name, call in calls.items()})


@contextlib.contextmanager
def created(config: Config, **options):
    """Creates a sandbox for a block."""
    sandbox = sandboxes(config).create(options.pop("image", HOST), connection_config=config, **options)
    try:
        yield sandbox
    finally:
        with contextlib.suppress(Exception):
            sandbox.kill()
        sandbox.close()


@pytest.fixture(params=["direct", "proxy", "async"], scope="module")
def config(request, server):
    if request.param == "async":
        return server.async_config()
    return server.config(proxy=request.param == "proxy")


@pytest.fixture(scope="module")
def sandbox(config):
    with created(config, env={"FROM_CREATE": "1"}) as sandbox:
        yield sandbox


@pytest.fixture
def execd(server, sandbox):
    with server.execd(sandbox.id) as client:
        yield client


def texts(messages) -> list[str]:
    return [message.text for message in messages]


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)
