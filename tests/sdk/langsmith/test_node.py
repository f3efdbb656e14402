"""LangSmith's client for Node."""

import hashlib
import json
import pathlib
import subprocess

from conftest import TOKEN
from cutter import Cutter
from program import environment
from test_reconnect import data

# Each needs a new connection of Node, so there are fewer than for Python.
CUTS = 100


def node(script: str, *arguments: str) -> dict:
    """Runs a script of Node, and returns the JSON of its last line."""
    command = ["node", str(pathlib.Path(__file__).with_name(script)), *arguments]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


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
        "service": True,
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
    out, err = data(1, 8 << 20), data(2, 1 << 20)
    client = server.client()
    box = client.create_sandbox(timeout=120)
    cutter = Cutter(server.port, CUTS, seed=11)
    try:
        box.write("/tmp/out", out, timeout=300)
        box.write("/tmp/err", err, timeout=300)
        command = "cat /tmp/err >&2 & cat /tmp/out; wait; exit 5"
        seen = node("node_cuts.mjs", f"http://127.0.0.1:{cutter.port}/v2/sandboxes", TOKEN, box.name, command)
        digests = [hashlib.sha256(part.decode(errors="replace").encode()).hexdigest() for part in (out, err)]
        assert seen == {"isExact": True, "exit": 5, "stdout": digests[0], "stderr": digests[1]}
        assert cutter.made == CUTS
    finally:
        cutter.close()
        client.delete_sandbox(box.name)
