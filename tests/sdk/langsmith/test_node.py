"""LangSmith's client for Node."""

import hashlib
import json
import pathlib
import subprocess
import threading

from conftest import TOKEN, fail
from cutter import Cutter
from lost import CUTS, KILLS, LINES, WAITS, data, lines
from program import environment
from waiting import eventually


class Node:
    """A script of Node that runs, and the lines that it has printed."""

    def __init__(self, script: str, *arguments: str):
        command = ["node", str(pathlib.Path(__file__).with_name(script)), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment(), text=True, **pipes)
        self.lines = []
        self.reading = threading.Thread(target=self.read, daemon=True)
        self.reading.start()

    def read(self) -> None:
        with self.process.stdout as printed:
            for line in printed:
                self.lines.append(line)

    def is_further_than(self, lines: int) -> bool:
        assert self.process.poll() is None, self.lines[-3:]
        return len(self.lines) > lines

    def seen(self) -> dict:
        """Waits for the end, and returns the JSON of the last line."""
        assert self.process.wait(280) == 0
        self.reading.join(60)
        return json.loads(self.lines[-1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


def node(script: str, *arguments: str) -> dict:
    """Runs a script of Node, and returns the JSON of its last line."""
    with Node(script, *arguments) as running:
        return running.seen()


def arrived(out: str, err: str, exit_code: int) -> dict:
    """Returns what `node_read.mjs` prints if exactly this has arrived."""
    digests = [hashlib.sha256(part.encode()).hexdigest() for part in (out, err)]
    return {"isExact": True, "exit": exit_code, "stdout": digests[0], "stderr": digests[1]}


def test_the_client_for_node_works(server):
    assert node("node_client.mjs", f"{server.url}/v2/sandboxes", TOKEN) == {
        "status": "ready",
        "run": ["out\n", "err\n", 3],
        "text": "1\n2\n3\n",
        "exit": 0,
        "rest": "2\n3\n",
        "callbacks": "called\n",
        "input": "got input\n",
        "read": "from node \u00fc",
        "killed": 137,
        "timeout": "LangSmithCommandTimeoutError",
        "missing": "LangSmithResourceNotFoundError",
        "pty": True,
        "stat": 18,
        "range": "234",
        "glob": ["x.txt"],
        "ls": ["x.txt"],
        "grep": ["x.txt"],
        "link": 18,
        "service": [200, "<p>hello</p>", 401],
        "state": "ready",
        "stopped": "stopped",
        "started": "ready",
        "waited": "ready",
        "renamed": True,
        "env": "1\n",
        "built": "ready",
        "found": True,
        "snapshots": 1,
        "snapshot": "ready",
        "copy": "from node \u00fc",
        "listed": True,
        "gone": "LangSmithResourceNotFoundError",
    }


def test_random_cuts_lose_and_repeat_nothing_for_node(server):
    out, err = data(1, 24 << 20), data(2, 4 << 20)
    client = server.client()
    box = client.create_sandbox(timeout=120)
    cutter = Cutter(server.port, CUTS, seed=11)
    try:
        box.write("/tmp/out", out, timeout=300)
        box.write("/tmp/err", err, timeout=300)
        command = "cat /tmp/err >&2 & cat /tmp/out; wait; exit 5"
        # The waiting times of the SDK would add up to minutes.
        seen = node("node_read.mjs", f"http://127.0.0.1:{cutter.port}/v2/sandboxes", TOKEN, box.name, command, "0.001")
        assert seen == arrived(out.decode(errors="replace"), err.decode(errors="replace"), 5)
        assert cutter.made == CUTS
    finally:
        cutter.close()
        client.delete_sandbox(box.name)


def test_kills_of_the_server_lose_and_repeat_nothing_for_node(own_server):
    server = own_server()
    client = server.client()
    box = client.create_sandbox(timeout=120)
    with Node("node_read.mjs", f"{server.url}/v2/sandboxes", TOKEN, box.name, LINES) as reader:
        for _ in range(KILLS):
            before = len(reader.lines)
            eventually(lambda before=before: reader.is_further_than(before), "a piece of output")
            server.kill()
            server.start()
        box.write("/tmp/stop", b"")
        seen = reader.seen()
    last = int(box.read("/tmp/last"))
    assert last > KILLS and seen == arrived(*lines(last), 0)


def test_a_restart_with_boxes_is_followed_by_node(own_server):
    server = own_server(env={"BOXD_SERVER_KEEP_BOXES": "true", "BOXD_SERVER_DRAIN_SEC": "1"})
    client = server.client()
    box = client.create_sandbox(timeout=120)
    with Node("node_read.mjs", f"{server.url}/v2/sandboxes", TOKEN, box.name, WAITS) as reader:
        eventually(lambda: reader.is_further_than(1), "both streams")
        server.stop()
        server.start()
        box.write("/tmp/go", b"")
        assert reader.seen() == arrived("begun\non\n", "error\n", 0)


def test_errors_of_calls_have_their_classes_in_node(server):
    client = server.client()
    box = client.create_sandbox(timeout=120)
    wanted = {
        "key": ["SandboxAuthenticationError"],
        "path": ["SandboxAPIError"],
        "field": ["ValidationError", "user"],
        "name": ["ResourceNameConflictError", "sandbox"],
        "late": ["ResourceTimeoutError", "sandbox"],
        "snapshot": ["ResourceCreationError", "snapshot"],
        "get": ["ResourceNotFoundError", "sandbox"],
        # The SDK does not name the resource of this one.
        "stop": ["ResourceNotFoundError"],
        "delete": ["ResourceNotFoundError", "sandbox"],
        "directory": ["SandboxOperationError", "ReadError", "read"],
        "file": ["ResourceNotFoundError", "file"],
        "command": ["SandboxOperationError", "CommandError", "command"],
        "timeout": ["CommandTimeoutError", "CommandTimeout", "command"],
        "unknown": ["SandboxOperationError", "CommandNotFound", "reconnect"],
    }
    assert errors(server, box.name, *wanted) == wanted
    client.delete_sandbox(box.name)
    for snapshot in client.list_snapshots(name_contains=f"{box.name}-s"):
        client.delete_snapshot(snapshot.id)


def test_errors_of_servers_have_their_classes_in_node(own_server):
    limited = own_server(env={"BOXD_RUNTIME_MAX_BOXES_PER_TOKEN": "1"})
    box = limited.client().create_sandbox(timeout=120)
    assert errors(limited, box.name, "create") == {"create": ["QuotaExceededError", "sandbox_count"]}
    fail(box)
    eventually(lambda: limited.client().get_sandbox_status(box.name).status == "failed", "the box fails")
    assert errors(limited, box.name, "read") == {"read": ["SandboxNotReadyError"]}


def test_a_box_that_this_machine_cannot_make_is_a_creation_error_in_node(own_server):
    server = own_server(env={"BOXD_IMAGES_STRICT": "true"})
    assert errors(server, "none", "create") == {"create": ["SandboxCreationError", "SandboxConfig"]}


def test_a_server_that_is_gone_is_a_connection_error_in_node(own_server):
    server = own_server()
    box = server.client().create_sandbox(timeout=120)
    with Node("node_errors.mjs", f"{server.url}/v2/sandboxes", TOKEN, box.name, "gone") as script:
        eventually(lambda: "ready\n" in script.lines, "the command runs")
        server.kill()
        print("gone", file=script.process.stdin, flush=True)
        seen = script.seen()
    prefix = "LangSmithSandbox"
    assert seen == {"lost": [f"{prefix}ConnectionError", "6 times"], "gone": [f"{prefix}ConnectTimeoutError"]}


def errors(server, *arguments: str) -> dict:
    """Returns the errors of the named calls, without the prefix of their names."""
    seen = node("node_errors.mjs", f"{server.url}/v2/sandboxes", TOKEN, *arguments)
    return {name: [error[0].removeprefix("LangSmith"), *error[1:]] for name, error in seen.items()}
