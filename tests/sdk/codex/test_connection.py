"""What happens to processes when a connection is cut, and who may use a server."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import uuid

import pytest
from conftest import WAIT, encoded, ours, over_socket, over_stdio
from program import BOXD, environment
from waiting import eventually
from websockets.exceptions import InvalidStatus

TOKEN = "ann-token-of-thirty-two-bytes-or-more"


def url(server, box: str | None = None) -> str:
    return f"ws://127.0.0.1:{server.port}/codex" + (f"?box={box}" if box else "")


@pytest.fixture
def box() -> str:
    return f"box-{uuid.uuid4().hex[:12]}"


def running(peer, mark: str) -> bool:
    """Returns whether the box has a process with this argument."""
    script = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep {mark[0]}[{mark[1]}]{mark[2:]}' || true"
    return peer.run(uuid.uuid4().hex, script, "file:///").streams["stdout"] != b"0\n"


def test_a_client_that_connects_again_reads_what_it_missed(server, box):
    peer = over_socket(url(server, box))
    session = peer.initialize()
    peer.start("p", "read line; echo $line; seq 1 1000; read line; exit 3", "file:///", pipeStdin=True)
    write = {"processId": "p", "chunk": encoded("begin\n"), "writeId": "1"}
    assert peer.call("process/write", write) == {"status": "accepted"}
    assert peer.note()["params"]["seq"] == 1
    other = over_socket(url(server, box))
    attached = {"clientName": "x", "resumeSessionId": session}
    assert other.fails("initialize", attached) == -32010
    peer.socket.socket.close()
    peer.close()
    eventually(lambda: "result" in other.ask("initialize", attached))
    other.send({"method": "initialized"})
    # A client repeats a write whose answer it did not get.
    assert other.call("process/write", write) == {"status": "accepted"}
    assert other.call("process/write", {**write, "writeId": "2"}) == {"status": "accepted"}
    chunks, after = [], 0
    while True:
        read = other.call("process/read", {"processId": "p", "afterSeq": after, "maxBytes": 1000, "waitMs": 10_000})
        chunks += read["chunks"]
        after = read["nextSeq"] - 1
        if read["closed"] and not read["chunks"]:
            break
    assert [chunk["seq"] for chunk in chunks] == list(range(1, len(chunks) + 1))
    text = "begin\n" + "".join(f"{number}\n" for number in range(1, 1001))
    assert "".join(base64.b64decode(chunk["chunk"]).decode() for chunk in chunks) == text
    assert read["exitCode"] == 3
    other.close()


def test_processes_of_a_client_that_never_returns_are_killed(server, box):
    peer = over_socket(url(server, box))
    peer.initialize()
    peer.start("p", "sleep 81234 & sleep 81234", "file:///")
    watcher = over_socket(url(server, box))
    watcher.initialize()
    assert running(watcher, "81234")
    peer.close()
    eventually(lambda: not running(watcher, "81234"))
    watcher.close()


def test_a_session_is_only_for_its_box(server, box):
    peer = over_socket(url(server, box))
    session = peer.initialize()
    peer.close()
    other = over_socket(url(server, f"{box}-2"))
    assert other.fails("initialize", {"clientName": "x", "resumeSessionId": session}) == -32600
    other.close()


def test_the_box_of_a_path_must_exist(server):
    peer = over_socket(f"ws://127.0.0.1:{server.port}/boxes/no-such-box/codex")
    peer.initialize()
    answer = peer.start("p", "true", "file:///")
    assert answer["error"]["code"] == -32603 and "no-such-box" in answer["error"]["message"], answer
    peer.close()


def test_a_server_with_tokens_refuses_a_client_without_one(own_server):
    server = own_server(env={"BOXD_TOKENS": f"ann {TOKEN}"})
    with pytest.raises(InvalidStatus) as refused:
        over_socket(url(server))
    assert refused.value.response.status_code == 401


def test_the_end_of_the_input_ends_the_box(workspace):
    mark = f"8{uuid.uuid4().int % 10**9:09}"
    with over_stdio(ours(), workspace) as peer:
        peer.initialize()
        peer.start("p", ["sleep", mark], workspace.as_uri())
        seen = subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True)
        assert seen.returncode == 0, "a process of a box is a process of this machine"
        peer.close()
        assert peer.program.wait(WAIT) == 0
    eventually(lambda: subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True).returncode == 1)


def fill(peer, process: str) -> None:
    """Writes to a process that does not read its stdin, until a write fails."""
    for number in itertools.count():
        write = {"processId": process, "chunk": encoded(b"x" * 65_536), "writeId": f"fill {number}"}
        answer = peer.ask("process/write", write)
        if "error" in answer:
            assert answer["error"]["code"] == -32603 and "does not read its stdin" in answer["error"]["message"], answer
            return
        assert answer["result"] == {"status": "accepted"} and number < 1000


def test_reads_that_wait_delay_no_other_request(workspace):
    with over_stdio(ours(), workspace) as peer:
        peer.initialize()
        peer.start("p", ["sleep", "1000"], workspace.as_uri())
        read = {"processId": "p", "waitMs": 600_000}
        reads = [peer.begin("process/read", read) for _ in range(100)]
        # Those beyond the limit do not wait.
        for number in reads[64:]:
            assert peer.finish(number)["result"]["chunks"] == []
        assert peer.call("environment/status") == {"status": "ready"}
        ending = peer.begin("process/terminate", {"processId": "p"})
        waited = set(reads[:64])
        while waited or ending:
            message = peer.next()
            number = message.get("id")
            assert "method" in message or message["result"].get("running", True), message
            waited.discard(number)
            ending = None if number == ending else ending


def test_the_input_that_waits_has_a_limit_of_bytes(workspace):
    with over_stdio(ours(), workspace) as peer:
        peer.initialize()
        peer.start("p", ["sleep", "1000"], workspace.as_uri(), pipeStdin=True)
        accepted = 0
        for number in itertools.count():
            write = {"processId": "p", "chunk": encoded(b"x" * 1_000_000), "writeId": str(number)}
            answer = peer.ask("process/write", write)
            if "error" in answer:
                break
            accepted += 1
        # The agent holds the first megabyte.
        assert 3 <= accepted <= 6 and "4194304 bytes" in answer["error"]["message"], (accepted, answer)


def test_after_writes_that_wait_for_their_process_other_requests_are_served(workspace):
    with over_stdio(ours(), workspace) as peer:
        peer.initialize()
        peer.start("p", "until [ -e go ]; do sleep 0.1; done; wc -c", workspace.as_uri(), pipeStdin=True)
        peer.start("q", ["sleep", "1000"], workspace.as_uri(), pipeStdin=True)
        fill(peer, "p")
        fill(peer, "q")
        assert peer.call("process/terminate", {"processId": "q"}) == {"running": True}
        assert peer.ended("q")["q"].code == 137
        peer.run("go", "touch go", workspace.as_uri())
        # A refused write can be repeated when the process reads.
        write = {"processId": "p", "chunk": encoded("x"), "writeId": "again"}
        eventually(lambda: "result" in peer.ask("process/write", write))
        assert peer.call("process/terminate", {"processId": "p"}) == {"running": True}


def test_the_end_of_the_input_is_noticed_behind_writes_that_wait(workspace):
    with over_stdio(ours(), workspace) as peer:
        peer.initialize()
        peer.start("p", ["sleep", "1000"], workspace.as_uri(), pipeStdin=True)
        fill(peer, "p")
        for number in range(100):
            peer.begin("process/write", {"processId": "p", "chunk": encoded("x"), "writeId": str(number)})
        peer.close()
        assert peer.program.wait(WAIT) == 0


@pytest.mark.parametrize("place", ["here", "server"])
def test_a_process_that_does_not_read_its_input_can_be_ended(workspace, server, place):
    options = ["--endpoint", f"unix:{server.state}/boxd.sock"] if place == "server" else []
    with over_stdio(ours(*options), workspace) as peer:
        peer.initialize()
        peer.start("p", ["sleep", "1000"], workspace.as_uri(), pipeStdin=True)
        for number in range(4):
            write = {"processId": "p", "chunk": encoded(b"x" * 1_000_000), "writeId": str(number)}
            assert peer.call("process/write", write) == {"status": "accepted"}
        assert peer.call("process/terminate", {"processId": "p"}) == {"running": True}
        assert peer.ended("p")["p"].code == 137


def test_files_of_several_megabytes(server, box):
    peer = over_socket(url(server, box))
    peer.initialize()
    data = bytes(range(256)) * 4 * 1024 * 10
    path = {"path": "file:///tmp/big"}
    peer.call("fs/writeFile", {**path, "dataBase64": encoded(data)})
    assert peer.call("fs/readFile", path)["dataBase64"] == encoded(data)
    assert peer.run("grow", "truncate -s 12M /tmp/big", "file:///").code == 0
    assert peer.fails("fs/readFile", path) == -32600
    peer.call("fs/open", {**path, "handleId": "h"})
    blocks = [peer.call("fs/readBlock", {"handleId": "h", "offset": n << 20, "len": 1 << 20}) for n in range(13)]
    assert [block["eof"] for block in blocks] == [False] * 12 + [True]
    assert blocks[0]["chunk"] == encoded(data[: 1 << 20])
    # A reader never gets parts of two versions.
    peer.run("change", "echo x >> /tmp/big", "file:///")
    assert peer.fails("fs/readBlock", {"handleId": "h", "offset": 0, "len": 1}) == -32603
    peer.close()


@pytest.mark.parametrize("member", [{"arg0": "other"}, {"enforceManagedNetwork": True}, {"env": {"A=B": "x"}}, {"argv": ["a\0b"]}])
def test_unsupported_process_options_are_refused(workspace, member):
    with over_stdio(ours(), workspace) as peer:
        peer.initialize()
        params = {"processId": "p", "argv": ["true"], "cwd": workspace.as_uri(), "env": {}, "tty": False, **member}
        answer = peer.ask("process/start", params)
        assert answer["error"]["code"] == -32602, answer
        assert next(iter(member)) in answer["error"]["message"], answer


def test_a_directory_that_the_box_does_not_have_is_named(workspace):
    with over_stdio(ours(), workspace) as peer:
        peer.initialize()
        answer = peer.start("p", "true", "file:///no/such/place")
    assert "/no/such/place" in answer["error"]["message"] and "--workspace" in answer["error"]["message"], answer


def test_a_message_over_the_limit_ends_the_server_with_an_error(workspace):
    program = subprocess.run(
        ours(), input=b"x" * (17 << 20), cwd=workspace, capture_output=True, env=environment(), timeout=WAIT
    )
    assert program.returncode == 125 and b"16777216" in program.stderr, program.stderr


def test_the_policy_of_the_operator_applies(own_server, box):
    profile = '[{ name = "small", memory_mb = 128 }]'
    server = own_server(env={"BOXD_POLICY_PROFILES": profile, "BOXD_POLICY_GATEWAYS": '{ codex = "small" }'})
    peer = over_socket(url(server, box))
    peer.initialize()
    assert peer.run("p", "true", "file:///").code == 0
    boxd = [BOXD, "--endpoint", f"ws://127.0.0.1:{server.port}/rpc/ws", "--json", "inspect", box]
    found = json.loads(subprocess.run(boxd, capture_output=True, check=True, env=environment(), timeout=WAIT).stdout)["box"]
    assert found["memory_mb"] == 128, found
    peer.close()
