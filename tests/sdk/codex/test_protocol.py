"""The same requests get the same answers from the exec-server of Codex and from ours."""

from __future__ import annotations

import json
import os
import uuid

import pytest
from conftest import THEIRS, encoded, ours, over_stdio


def essence(answer: dict):
    """Leaves out what differs between two runs: times, the text of errors, and the order of a directory."""
    if "error" in answer:
        return answer["error"]["code"]
    result = answer["result"]
    if isinstance(result, dict):
        result = {name: value for name, value in result.items() if name not in ("createdAtMs", "modifiedAtMs")}
        if "entries" in result:
            result["entries"] = sorted(result["entries"], key=lambda entry: json.dumps(entry, sort_keys=True))
        if "errors" in result:
            result["errors"] = sorted(error["path"] for error in result["errors"])
    return result


def tree(directory) -> None:
    (directory / "f").write_text("hello")
    (directory / "dir" / "sub").mkdir(parents=True)
    (directory / "dir" / "sub" / "x").write_text("x")
    (directory / "dir" / ".h").write_text("")
    (directory / "ä #1%").write_text("named")
    (directory / "link").symlink_to("f")
    (directory / "dirlink").symlink_to("dir")
    (directory / "dangling").symlink_to("nothing")
    os.mkfifo(directory / "pipe")


WALK = {"maxDepth": 4, "maxDirectories": 10, "maxEntries": 100, "followDirectorySymlinks": False}

READING = [
    ("fs/readFile", {"path": "f"}),
    ("fs/readFile", {"path": "f", "sandbox": None, "followSymlinks": None}),
    ("fs/readFile", {"path": "link"}),
    ("fs/readFile", {"path": "dir/../f"}),
    ("fs/readFile", {"path": "%C3%A4%20%231%25"}),
    ("fs/readFile", {"path": "nothing"}),
    ("fs/readFile", {"path": "dir"}),
    ("fs/readFile", {"path": "pipe"}),
    ("fs/readFile", {"path": "f/x"}),
    ("fs/readFile", {}),
    ("fs/getMetadata", {"path": "f"}),
    ("fs/getMetadata", {"path": "link"}),
    ("fs/getMetadata", {"path": "link", "followSymlinks": False}),
    ("fs/getMetadata", {"path": "f", "followSymlinks": False}),
    ("fs/getMetadata", {"path": "dangling"}),
    ("fs/getMetadata", {"path": "dir"}),
    ("fs/getMetadata", {"path": "pipe"}),
    ("fs/getMetadata", {"path": "nothing"}),
    ("fs/getMetadata", {"path": "f/x"}),
    ("fs/canonicalize", {"path": "dirlink/sub/../sub/x"}),
    ("fs/canonicalize", {"path": "link"}),
    ("fs/canonicalize", {"path": "%C3%A4%20%231%25"}),
    ("fs/canonicalize", {"path": "dangling"}),
    ("fs/canonicalize", {"path": "nothing"}),
    ("fs/readDirectory", {"path": ""}),
    ("fs/readDirectory", {"path": "dir"}),
    ("fs/readDirectory", {"path": "dirlink"}),
    ("fs/readDirectory", {"path": "f"}),
    ("fs/readDirectory", {"path": "nothing"}),
    ("fs/walk", {"path": "", "options": WALK}),
    ("fs/walk", {"path": "", "options": {**WALK, "followDirectorySymlinks": True}}),
    ("fs/walk", {"path": "", "options": {**WALK, "maxDepth": 0}}),
    ("fs/walk", {"path": "", "options": {**WALK, "maxDirectories": 1}}),
    ("fs/walk", {"path": "dir", "options": {**WALK, "maxEntries": 1}}),
    ("fs/walk", {"path": "f", "options": WALK}),
    ("fs/walk", {"path": "nothing", "options": WALK}),
    ("fs/walk", {"path": "", "options": {**WALK, "maxEntries": 0}}),
    ("fs/walk", {"path": "", "options": {**WALK, "maxDepth": 65}}),
    ("fs/walk", {"path": "", "options": {}}),
    ("fs/open", {"handleId": "a", "path": "f"}),
    ("fs/open", {"handleId": "a", "path": "f"}),
    ("fs/open", {"handleId": "b", "path": "nothing"}),
    ("fs/open", {"handleId": "b", "path": "dir"}),
    ("fs/open", {"handleId": "x" * 33, "path": "f"}),
    ("fs/readBlock", {"handleId": "a", "offset": 0, "len": 2}),
    ("fs/readBlock", {"handleId": "a", "offset": 2, "len": 9}),
    ("fs/readBlock", {"handleId": "a", "offset": 99, "len": 9}),
    ("fs/readBlock", {"handleId": "a", "offset": 0, "len": 0}),
    ("fs/readBlock", {"handleId": "a", "offset": 0, "len": 1 << 30}),
    ("fs/readBlock", {"handleId": "c", "offset": 0, "len": 1}),
    ("fs/close", {"handleId": "a"}),
    ("fs/close", {"handleId": "a"}),
    ("fs/readBlock", {"handleId": "a", "offset": 0, "len": 1}),
    ("environment/status", None),
    ("no/such", {}),
]

CHANGING = [
    ("fs/writeFile", {"path": "new", "dataBase64": encoded("one")}),
    ("fs/writeFile", {"path": "new", "dataBase64": encoded("other")}),
    ("fs/writeFile", {"path": "empty", "dataBase64": ""}),
    ("fs/writeFile", {"path": "no/file", "dataBase64": ""}),
    ("fs/writeFile", {"path": "dir", "dataBase64": ""}),
    ("fs/writeFile", {"path": "link", "dataBase64": encoded("through")}),
    ("fs/readFile", {"path": "f"}),
    ("fs/writeFile", {"path": "new"}),
    ("fs/createDirectory", {"path": "a/b"}),
    ("fs/createDirectory", {"path": "a/b"}),
    ("fs/createDirectory", {"path": "a/b", "recursive": False}),
    ("fs/createDirectory", {"path": "c/d", "recursive": False}),
    ("fs/createDirectory", {"path": "c", "recursive": False}),
    ("fs/createDirectory", {"path": "f"}),
    ("fs/createDirectory", {"path": "f/x"}),
    ("fs/copy", {"sourcePath": "f", "destinationPath": "f2", "recursive": False}),
    ("fs/copy", {"sourcePath": "new", "destinationPath": "f2", "recursive": False}),
    ("fs/readFile", {"path": "f2"}),
    ("fs/copy", {"sourcePath": "dir", "destinationPath": "dir2", "recursive": False}),
    ("fs/copy", {"sourcePath": "dir", "destinationPath": "dir2", "recursive": True}),
    ("fs/copy", {"sourcePath": "dir", "destinationPath": "dir/in", "recursive": True}),
    ("fs/copy", {"sourcePath": "nothing", "destinationPath": "z", "recursive": True}),
    ("fs/copy", {"sourcePath": "link", "destinationPath": "link2", "recursive": False}),
    ("fs/copy", {"sourcePath": "f", "destinationPath": "no/z", "recursive": False}),
    ("fs/copy", {"sourcePath": "f", "destinationPath": "dir2", "recursive": False}),
    ("fs/copy", {"sourcePath": "pipe", "destinationPath": "z", "recursive": False}),
    ("fs/copy", {"sourcePath": "f", "destinationPath": "z"}),
    ("fs/walk", {"path": "", "options": WALK}),
    ("fs/remove", {"path": "f2"}),
    ("fs/remove", {"path": "f2"}),
    ("fs/remove", {"path": "f2", "force": False}),
    ("fs/remove", {"path": "dir2", "recursive": False}),
    ("fs/remove", {"path": "c", "recursive": False}),
    ("fs/remove", {"path": "dir2"}),
    ("fs/remove", {"path": "dirlink"}),
    ("fs/walk", {"path": "", "options": WALK}),
]


@pytest.mark.parametrize("requests", [READING, CHANGING], ids=["reading", "changing"])
def test_the_file_system(both, requests):
    def scenario(peer, uri):
        def located(name, value):
            is_path = name.lower().endswith("path")
            return f"{uri}/{value}".rstrip("/") if is_path else value

        answers = []
        for method, params in requests:
            params = params and {name: located(name, value) for name, value in params.items()}
            answers.append((method, params, essence(peer.ask(method, params))))
        return answers

    answers = both(scenario, tree)
    assert len(answers) == len(requests)


@pytest.mark.parametrize("path", ["/etc/passwd", "", "relative", "http://x/y", "file:///a%00b"])
def test_a_path_that_is_no_uri_of_a_file_is_refused(both, path):
    assert both(lambda peer, _: peer.fails("fs/readFile", {"path": path})) == -32602


def test_the_handshake_comes_first(workspace, tmp_path):
    def scenario(argv):
        with over_stdio(argv, workspace, CODEX_HOME=str(tmp_path)) as peer:
            codes = [
                peer.fails("fs/readFile", {"path": workspace.as_uri()}),
                peer.fails("environment/info"),
                peer.fails("initialize"),
                peer.fails("initialize", {"clientName": 1}),
                peer.fails("initialize", {"clientName": "a", "resumeSessionId": "unknown"}),
            ]
            assert peer.call("initialize", {"clientName": "a"})["sessionId"]
            codes.append(peer.fails("environment/status"))
            codes.append(peer.fails("initialize", {"clientName": "a"}))
            peer.send({"method": "initialized"})
            return codes, peer.call("environment/status")

    assert scenario(ours()) == scenario(THEIRS)


@pytest.mark.parametrize("line", ["{bad", "[1]", '"x"', '{"id":null,"method":"a"}', '{"id":1.5,"method":"a"}', '{"id":1,"method":2}'])
def test_a_line_that_is_no_message_gets_an_error_and_the_next_is_served(both, line):
    def scenario(peer, _):
        peer.send(line)
        refusal = peer.next()
        peer.send('{"id":"text","method":"environment/status","jsonrpc":"2.0"}')
        return refusal["id"], refusal["error"]["code"], peer.next()

    assert both(scenario)[:2] == (-1, -32600)


def test_processes(both):
    def scenario(peer, uri):
        ran = {}

        def run(name, argv, **more):
            ran[name] = peer.run(name, argv, uri, **more).summary()

        run("both", "echo out; echo err >&2; exit 3")
        run("silent", ["/bin/true"])
        run("killed", "kill -9 $$")
        run("input-closed", ["cat"])
        run("variables", "echo $A $B", env={"PATH": "/bin:/usr/bin", "A": "a"}, envPolicy={
            "inherit": "all", "ignoreDefaultExcludes": True, "exclude": [], "set": {"A": "x", "B": "b"}, "includeOnly": []})
        run("directory", "pwd")
        run("binary", r"printf '\000\377\n'")
        run("terminal", "stty size; test -t 0 && echo yes; echo err >&2", tty=True)
        run("with-sandbox", "echo in", sandbox=None, metadata={"threadId": str(uuid.uuid4()), "toolCallId": "c"}, enforceManagedNetwork=False, managedNetwork=None)
        codes = [
            peer.start("both", "true", uri)["error"]["code"],
            peer.start("no-arguments", [], uri)["error"]["code"],
            peer.start("no-program", ["/no/such"], uri)["error"]["code"],
            peer.start("no-name", ["no-such-program"], uri)["error"]["code"],
            peer.start("no-directory", "true", f"{uri}/nothing")["error"]["code"],
            peer.start("a-file", "true", "file:///etc/passwd")["error"]["code"],
            peer.start("a-path", "true", "/tmp")["error"]["code"],
            peer.start("no-tty", "true", uri, tty=None)["error"]["code"],
        ]
        return ran, codes

    ran, _ = both(scenario)
    assert ran["both"] == ({"stdout": b"out\n", "stderr": b"err\n"}, 3)
    assert ran["terminal"] == ({"pty": b"24 80\r\nyes\r\nerr\r\n"}, 0)


def test_output_is_read_again_by_number(both):
    def scenario(peer, uri):
        peer.run("p", "echo one; sleep 0.2; echo two >&2; sleep 0.2; exit 5", uri)
        read = lambda **more: peer.ask("process/read", {"processId": "p", **more})
        return [
            read(), read(afterSeq=None, maxBytes=None, waitMs=None), read(afterSeq=1), read(maxBytes=1), read(afterSeq=1, maxBytes=1),
            read(afterSeq=2, maxBytes=99, waitMs=10), read(afterSeq=99, waitMs=10), peer.fails("process/read", {"processId": "none"}),
            peer.fails("process/read", {}),
        ]  # fmt: skip

    answers = both(scenario)
    assert [chunk["seq"] for chunk in answers[0]["result"]["chunks"]] == [1, 2]


def test_a_reader_waits_for_output(both):
    def scenario(peer, uri):
        peer.start("cat", ["cat"], uri, pipeStdin=True)
        read = lambda **more: peer.call("process/read", {"processId": "cat", **more})
        nothing = read(afterSeq=0, waitMs=50)
        waiting = peer.begin("process/write", {"processId": "cat", "chunk": encoded("a\n"), "writeId": "1"})
        return nothing, peer.finish(waiting), read(afterSeq=0, waitMs=60_000)

    nothing, _, found = both(scenario)
    assert nothing["chunks"] == [] and not nothing["exited"]
    assert found["chunks"] == [{"seq": 1, "stream": "stdout", "chunk": encoded("a\n")}]


def test_large_output_arrives_to_its_last_byte(both):
    def scenario(peer, uri):
        return peer.run("big", "seq 1 400000; seq 400000 -1 1 >&2", uri).summary()

    streams, code = both(scenario)
    assert code == 0
    assert streams["stdout"] == b"".join(b"%d\n" % number for number in range(1, 400_001))
    assert streams["stderr"] == b"".join(b"%d\n" % number for number in range(400_000, 0, -1))


def test_input_and_its_answers(both):
    def scenario(peer, uri):
        write = lambda process, text, number: peer.ask(
            "process/write", {"processId": process, "chunk": encoded(text), "writeId": number}
        )
        peer.start("cat", ["head", "-n", "2"], uri, pipeStdin=True)
        peer.start("closed", ["sleep", "1000"], uri)
        answers = [
            write("cat", "one\n", "1"), write("cat", "one\n", "1"), write("cat", "two\n", "2"), write("closed", "x", "1"), write("none", "x", "1"),
            peer.fails("process/write", {"processId": "cat", "chunk": "", "writeId": ""}),
            peer.fails("process/write", {"processId": "cat", "chunk": "!", "writeId": "3"}),
            peer.fails("process/write", {"processId": "cat", "chunk": ""}),
        ]  # fmt: skip
        ended = peer.ended("cat")["cat"].summary()
        return answers, ended, peer.ask("process/terminate", {"processId": "closed"}), peer.ended("closed")["closed"].summary()

    answers, ended, *_ = both(scenario)
    assert answers[:2] == [{"result": {"status": "accepted"}}] * 2
    assert ended == ({"stdout": b"one\ntwo\n"}, 0)


def test_two_processes_at_once(both):
    def scenario(peer, uri):
        # Each waits for the other, over two pipes.
        peer.run("pipes", "mkfifo a b", uri)
        peer.start("one", "echo from one > a; cat b", uri)
        peer.start("two", "cat a; echo from two > b", uri)
        return {process: ended.summary() for process, ended in peer.ended("one", "two").items()}

    assert both(scenario)["one"] == ({"stdout": b"from two\n"}, 0)


def test_signals_and_the_end_of_a_process_tree(both):
    def scenario(peer, uri):
        peer.start("trap", "trap 'echo got; exit 4' INT; echo ready; while :; do sleep 0.1; done", uri)
        ready = peer.note()["params"]["chunk"]
        peer.call("process/signal", {"processId": "trap", "signal": "interrupt"})
        trapped = peer.ended("trap", seen=1)["trap"].streams
        peer.start("tree", "sleep 4711 & sleep 4711 & echo ready; wait", uri)
        ready = ready, peer.note()["params"]["chunk"]
        terminated = peer.call("process/terminate", {"processId": "tree"})
        code = peer.ended("tree", seen=1)["tree"].code
        left = peer.run("left", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 471[1]' || true", uri)
        answers = [
            peer.call("process/terminate", {"processId": "tree"}), peer.call("process/terminate", {"processId": "none"}),
            peer.call("process/signal", {"processId": "none", "signal": "interrupt"}),
            peer.call("process/signal", {"processId": "tree", "signal": "interrupt"}),
            peer.fails("process/signal", {"processId": "none", "signal": "kill"}),
        ]  # fmt: skip
        return ready, trapped, terminated, code, left.streams, answers

    _, trapped, terminated, code, left, _ = both(scenario)
    assert trapped == {"stdout": b"got\n"}
    assert (terminated, code, left) == ({"running": True}, 137, {"stdout": b"0\n"})


def test_the_first_requests_of_the_client(workspace):
    with over_stdio(ours(), workspace) as peer:
        peer.initialize()
        info = peer.call("environment/info")
    assert info["shell"] == {"name": "bash", "path": "/bin/bash"}
    assert (info["cwd"], info["platformOs"], info["capabilities"]) == (workspace.as_uri(), "linux", {})
