"""The published `codex`, as a client of boxes and as the exec-server that ours is compared with."""

from __future__ import annotations

import base64
import contextlib
import glob
import itertools
import json
import os
import pathlib
import queue
import subprocess
import threading

import pytest
from websockets.sync.client import connect

from program import BOXD, environment

PACKAGES = os.environ.get("NODE_PATH", "")

# The program of the package for this machine, and the command that npm installs.
CODEX = (glob.glob(f"{PACKAGES}/@openai/codex-*/vendor/*/bin/codex") or [""])[0]
COMMAND = f"{PACKAGES}/.bin/codex"

WAIT = 120


def encoded(data: bytes | str) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


class Peer:
    """A connection to an exec-server, ours or that of Codex."""

    def __init__(self, send, close):
        self.send_text, self.close = send, close
        self.ids = itertools.count(1)
        self.arrived: queue.Queue = queue.Queue()
        self.notes: list[dict] = []

    def pump(self, lines) -> None:
        def run():
            with contextlib.suppress(Exception):
                for line in lines:
                    self.arrived.put(json.loads(line))
            self.arrived.put(None)

        threading.Thread(target=run, daemon=True).start()

    def send(self, message: dict | str) -> None:
        self.send_text(message if isinstance(message, str) else json.dumps(message))

    def next(self) -> dict:
        message = self.arrived.get(timeout=WAIT)
        assert message is not None, "the server has closed the connection"
        return message

    def begin(self, method: str, params=None) -> int:
        number = next(self.ids)
        self.send({"id": number, "method": method, "params": params})
        return number

    def finish(self, number) -> dict:
        """Returns the answer to a request; notifications before it are kept."""
        while (message := self.next()).get("id") != number:
            assert "method" in message, message
            self.notes.append(message)
        return {name: value for name, value in message.items() if name != "id"}

    def ask(self, method: str, params=None) -> dict:
        return self.finish(self.begin(method, params))

    def call(self, method: str, params=None) -> dict:
        """Returns the result of a request that succeeds."""
        answer = self.ask(method, params)
        assert "result" in answer, (method, params, answer)
        return answer["result"]

    def fails(self, method: str, params=None) -> int:
        """Returns the code of a request that fails."""
        answer = self.ask(method, params)
        assert answer["error"]["message"], answer
        return answer["error"]["code"]

    def note(self) -> dict:
        message = self.notes.pop(0) if self.notes else self.next()
        assert "method" in message, message
        return message

    def initialize(self, session: str | None = None) -> str:
        opened = self.call("initialize", {"clientName": "test", "resumeSessionId": session})
        self.send({"method": "initialized", "params": {}})
        return opened["sessionId"]

    def start(self, process: str, argv: list[str] | str, cwd: str, **more) -> dict:
        argv = ["sh", "-c", argv] if isinstance(argv, str) else argv
        params = {"processId": process, "argv": argv, "cwd": cwd, "env": {"PATH": "/usr/bin:/bin"}, "tty": False, "arg0": None}
        return self.ask("process/start", {**params, **more})

    def ended(self, *processes: str, seen: int = 0) -> dict[str, Ended]:
        """Reads notifications until processes are closed; the test has read the first ones."""
        ended = {process: Ended(seen) for process in processes}
        while not all(found.is_complete() for found in ended.values()):
            note = self.note()
            if (found := ended.get(note["params"]["processId"])) is not None:
                found.add(note)
        return ended

    def run(self, process: str, argv, cwd: str, **more) -> Ended:
        answer = self.start(process, argv, cwd, **more)
        assert "result" in answer, answer
        assert answer["result"]["processId"] == process
        return self.ended(process)[process]


class Ended:
    """What a client has learned of a process."""

    def __init__(self, seen: int):
        self.seen = seen
        self.streams: dict[str, bytes] = {}
        self.seqs: list[int] = []
        self.code = None
        self.closed = False

    def add(self, note: dict) -> None:
        params = note["params"]
        self.seqs.append(params["seq"])
        if note["method"] == "process/output":
            chunk = base64.b64decode(params["chunk"])
            self.streams[params["stream"]] = self.streams.get(params["stream"], b"") + chunk
        elif note["method"] == "process/exited":
            self.code = params["exitCode"]
            assert params["sandboxDenied"] is False
        else:
            assert note["method"] == "process/closed"
            self.closed = True

    def is_complete(self) -> bool:
        # The server of Codex may send an event before an earlier one.
        return self.closed and self.seen + len(self.seqs) == max(self.seqs)

    def summary(self):
        assert sorted(self.seqs) == list(range(1, len(self.seqs) + 1)), "each event has the next number"
        return self.streams, self.code


@contextlib.contextmanager
def over_stdio(argv: list[str], cwd: pathlib.Path, **variables: str):
    """Starts an exec-server, which serves until its input ends."""
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd, text=True, env=environment(**variables)
    ) as program:

        def send(text: str) -> None:
            program.stdin.write(text + "\n")
            program.stdin.flush()

        peer = Peer(send, program.stdin.close)
        peer.program = program
        peer.pump(program.stdout)
        try:
            yield peer
        finally:
            with contextlib.suppress(BrokenPipeError):
                program.stdin.close()
            try:
                program.wait(WAIT)
            finally:
                program.kill()


def over_socket(url: str) -> Peer:
    socket = connect(url, max_size=None, open_timeout=WAIT)
    peer = Peer(socket.send, socket.close)
    peer.socket = socket
    peer.pump(socket)
    return peer


def ours(*options: str) -> list[str]:
    return [BOXD, "codex-exec", *options]


THEIRS = [CODEX, "exec-server", "--listen", "stdio"]


@pytest.fixture(scope="session", autouse=True)
def package():
    assert os.access(CODEX, os.X_OK), f"NODE_PATH has no @openai/codex: {PACKAGES!r}"


@pytest.fixture
def workspace(tmp_path) -> pathlib.Path:
    directory = tmp_path / "work space"
    directory.mkdir()
    return directory


@pytest.fixture
def both(workspace, tmp_path):
    """Runs a scenario with the exec-server of Codex and with ours, in the same directory, and compares what it returns."""

    def compare(scenario, prepare=lambda directory: None):
        results = []
        for argv in (THEIRS, ours("--workspace", ".")):
            subprocess.run(["find", str(workspace), "-mindepth", "1", "-delete"], check=True)
            prepare(workspace)
            with over_stdio(argv, workspace, CODEX_HOME=str(tmp_path)) as peer:
                peer.initialize()
                results.append(scenario(peer, workspace.as_uri()))
        theirs, own = results
        if isinstance(own, list):
            for one, other in zip(own, theirs, strict=True):
                assert one == other
        assert own == theirs
        return own

    return compare
