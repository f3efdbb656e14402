"""Fixtures: the real `boxd`, and the clients of the unmodified `agent-sandbox`, synchronous and asynchronous."""

from __future__ import annotations

import uuid

import pytest
import requests
from agent_sandbox import AsyncSandbox, Sandbox
from blocking import Blocking
from program import Program


def base(server: Program) -> str:
    return f"http://127.0.0.1:{server.port}"


class Provisioner:
    """deer-flow's requests to its provisioner."""

    def __init__(self, url: str, key: str = ""):
        self.url = f"{url}/api/sandboxes"
        self.headers = {"X-API-Key": key} if key else {}

    def create(self, sandbox: str, **more) -> requests.Response:
        body = {
            "sandbox_id": sandbox,
            "thread_id": "thread-1",
            "user_id": "user-1",
            "include_legacy_skills": False,
            "provision_lark_cli_runtime": False,
            "provision_lark_cli_broker": False,
            **more,
        }
        return requests.post(self.url, json=body, headers=self.headers, timeout=120)

    def get(self, sandbox: str) -> requests.Response:
        return requests.get(f"{self.url}/{sandbox}", headers=self.headers, timeout=120)

    def list(self) -> requests.Response:
        return requests.get(self.url, headers=self.headers, timeout=120)

    def delete(self, sandbox: str) -> requests.Response:
        return requests.delete(f"{self.url}/{sandbox}", headers=self.headers, timeout=120)


@pytest.fixture
def provisioner(server) -> Provisioner:
    return Provisioner(base(server))


@pytest.fixture
def box_url(provisioner):
    """The base URL of a new box."""
    sandbox = uuid.uuid4().hex[:16]
    yield provisioner.create(sandbox).json()["sandbox_url"]
    provisioner.delete(sandbox)


@pytest.fixture(params=["sync", "async"])
def client(request, box_url):
    """A client of a new box, of both kinds."""
    if request.param == "sync":
        return Sandbox(base_url=box_url, timeout=300)
    return Blocking(AsyncSandbox(base_url=box_url, timeout=300))


@pytest.fixture
def sandbox(box_url) -> Sandbox:
    """The synchronous client of a new box."""
    return Sandbox(base_url=box_url, timeout=300)


def run(client, command: str, **options):
    """Runs a command and returns its result."""
    return client.shell.exec_command(command=command, **options).data
