"""The real `boxd` for the suites of `tests/sdk`: each suite drives it with a protocol's own unmodified packages.

`BOXD` names the program; `cargo xtask test` sets it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field

import pytest

BOXD = os.environ.get("BOXD", "")

numbers = itertools.count()


def pytest_configure(config):
    if not os.access(BOXD, os.X_OK):
        pytest.exit("BOXD must name the program; `cargo xtask test` sets it", returncode=3)


def free_port() -> int:
    """Returns a port below the kernel's ephemeral range; concurrent runs start at different ports."""
    while True:
        port = 12000 + (os.getpid() * 97 + next(numbers)) % 20000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment without settings of `boxd` and of its clients."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BOXD", "LANGBOT"))}
    return {**kept, **more}


@dataclass
class Program:
    """A `boxd serve` with an HTTP port; a suite adds the options and headers of its protocol."""

    directory: pathlib.Path
    port: int = 0
    process: subprocess.Popen | None = None
    env: dict[str, str] = field(default_factory=dict)
    # Short, because the paths of its sockets are limited in length.
    state: pathlib.Path = field(default_factory=lambda: pathlib.Path(tempfile.mkdtemp(prefix="boxd-")))

    def settings(self) -> dict[str, str]:
        """Returns the variables of all servers of a suite; `env` has those of one server."""
        return {}

    def options(self) -> list[str]:
        """Returns the options of the port."""
        return [f"--http=127.0.0.1:{self.port}"]

    def start(self):
        self.process = subprocess.Popen(
            [BOXD, "serve", *self.options(), "--state-dir", str(self.state)],
            stdout=subprocess.PIPE,
            stderr=(self.directory / "log").open("ab"),
            env=environment(**{**self.settings(), **self.env}),
            cwd=self.directory,
            text=True,
        )
        line = self.process.stdout.readline()
        assert line.startswith("boxd ready"), (line, (self.directory / "log").read_text())
        self.port = int(line.split("http://127.0.0.1:")[1].split()[0])
        return self

    def ended(self) -> None:
        self.process.wait(30)
        self.process.stdout.close()
        self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.ended()

    def kill(self) -> None:
        self.process.kill()
        self.ended()

    @contextlib.contextmanager
    def running(self):
        """Starts the server for a block, which leaves nothing of it."""
        try:
            yield self.start()
        finally:
            self.end()
            shutil.rmtree(self.state, ignore_errors=True)

    def end(self) -> None:
        """Stops the server and ends all boxes, also those that it keeps or that a killed one has left."""
        has_left_boxes = self.process is None or self.env.pop("BOXD_SERVER_KEEP_BOXES", None)
        self.stop()
        if has_left_boxes:
            self.start()
            self.stop()


@pytest.fixture(scope="session")
def server_class():
    """The class of the servers; a suite with a class of its own replaces this fixture."""
    return Program


@pytest.fixture(scope="session")
def server(server_class, tmp_path_factory):
    """The server of all tests."""
    with server_class(tmp_path_factory.mktemp("boxd")).running() as server:
        yield server


@pytest.fixture
def own_server(server_class, tmp_path):
    """Starts servers of one test, which may stop or configure them."""
    with contextlib.ExitStack() as servers:
        yield lambda **options: servers.enter_context(server_class(tmp_path, **options).running())
