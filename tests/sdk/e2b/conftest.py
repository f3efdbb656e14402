"""Fixtures: the real `boxd`, and E2B's own SDKs pointed at it by the variables that its users set."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import pathlib
import subprocess
from dataclasses import dataclass

import pytest
from program import Program, environment, free_port, numbers  # noqa: F401
from registry import image  # noqa: F401

# Environments with older versions have neither the code interpreter nor the SDK of npm; `inspect_ai` has its own.
MODULES = {
    "test_agents.py": "agents",
    "test_code.py": "e2b_code_interpreter",
    "test_domain.py": "e2b_code_interpreter",
    "test_inspect.py": "inspect_sandboxes",
    "test_langchain.py": "langchain_e2b",
    "test_results.py": "e2b_code_interpreter",
    "test_smolagents.py": "smolagents",
}
collect_ignore = [name for name, module in MODULES.items() if importlib.util.find_spec(module) is None]
if not (pathlib.Path(os.environ.get("NODE_PATH", "")) / "e2b").is_dir():
    collect_ignore.append("test_node.py")

# Of the form that the SDKs of old versions check.
TOKEN = "e2b_" + "0123456789abcdef" * 2 + "01234567"
OTHER = "e2b_" + "fedcba9876543210" * 2 + "fedcba98"


@dataclass
class Server(Program):
    """A `boxd serve` for two callers, or for all programs of this machine."""

    has_tokens: bool = True

    def settings(self) -> dict[str, str]:
        tokens = {"BOXD_TOKENS": f"ann {TOKEN}\nbob {OTHER}"} if self.has_tokens else {}
        return {"BOXD_IMAGES_ALLOW_PULL": "*", **tokens}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def variables(self, token: str = TOKEN) -> dict[str, str]:
        return {
            "E2B_API_KEY": token,
            "E2B_API_URL": f"{self.url}/e2b/api",
            "E2B_SANDBOX_URL": f"{self.url}/e2b/envd",
        }


@pytest.fixture(scope="session")
def server_class():
    return Server


@pytest.fixture(scope="session")
def server(server):
    os.environ.update(server.variables())
    return server


@pytest.fixture
def own_server(own_server):
    before = dict(os.environ)
    yield own_server
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def sandbox(server):
    from e2b import Sandbox

    sandbox = Sandbox.create(timeout=600)
    yield sandbox
    sandbox.kill()


def version() -> tuple[int, ...]:
    """Returns the version of the SDK."""
    from importlib.metadata import version

    return tuple(int(part) for part in version("e2b").split("."))


def has(wanted: str) -> bool:
    """Returns whether the SDK of this environment has a class, a method, or a parameter as in `Sandbox.create(network)`."""
    import e2b

    path, _, parameter = wanted.rstrip(")").partition("(")
    found = functools.reduce(lambda place, name: getattr(place, name, None), path.split("."), e2b)
    return found is not None and (not parameter or parameter in inspect.signature(found).parameters)


def needs(*wanted: str):
    """Leaves out a test of calls that the SDK of this environment does not have."""
    return lambda test: test if all(map(has, wanted)) else None


def node(server: Server, name: str, **more: str) -> str:
    """Runs a program of Node with the SDK of npm, and returns what it prints."""
    program = pathlib.Path(__file__).parent / name
    env = environment(**server.variables(), **more)
    # Modules find packages only beside themselves or above, so the program is read from stdin.
    ran = subprocess.run(
        ["node", "-"],
        input=program.read_text(),
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
