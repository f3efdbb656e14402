"""Commands and terminals, through E2B's own SDK."""

import time

import httpx
import pytest
from conftest import needs, version
from e2b import Sandbox
from e2b.exceptions import InvalidArgumentException, NotFoundException, SandboxException, TimeoutException
from e2b.sandbox.commands.command_handle import CommandExitException, PtySize
from test_sandbox import stdin_option
from waiting import eventually


def test_output_exit_code_and_environment(sandbox):
    result = sandbox.commands.run("echo out; echo err >&2; echo $A; pwd; whoami", envs={"A": "x y"})
    assert (result.stdout, result.stderr, result.exit_code) == ("out\nx y\n/home/user\nuser\n", "err\n", 0)
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo before; echo why >&2; exit 7", cwd="/tmp")
    assert (failed.value.exit_code, failed.value.stdout, failed.value.stderr) == (7, "before\n", "why\n")


def test_output_is_streamed_as_it_comes(sandbox):
    seen = []
    sandbox.commands.run(
        "for n in 1 2 3; do echo $n; sleep 0.3; done",
        on_stdout=lambda text: seen.append((text, time.monotonic())),
    )
    assert "".join(text for text, _ in seen) == "1\n2\n3\n"
    assert len(seen) == 3 and seen[2][1] - seen[0][1] > 0.3


def test_bytes_are_neither_lost_nor_changed(sandbox):
    # A character of three bytes at every offset of the pieces.
    command = "python3 -c \"import sys; sys.stdout.write('a' + '€' * 700000)\""
    result = sandbox.commands.run(command)
    assert result.stdout == "a" + "€" * 700000
    slow = []

    def read_slowly(text):
        time.sleep(0.005)
        slow.append(text)

    sandbox.commands.run("head -c 6000000 /dev/zero | tr '\\0' x", on_stdout=read_slowly)
    assert sum(map(len, slow)) == 6_000_000


def test_a_deadline_kills_the_command(sandbox):
    with pytest.raises(TimeoutException):
        sandbox.commands.run("touch started; sleep 1000", timeout=1)
    assert sandbox.files.exists("started")
    eventually(lambda: not sandbox.commands.list())


def test_a_lost_connection_keeps_the_command(sandbox):
    handle = sandbox.commands.run("for n in $(seq 400); do echo $n; sleep 0.1; done", background=True)
    pid = handle.pid
    handle.disconnect()
    assert [process.pid for process in sandbox.commands.list()] == [pid]
    again = sandbox.commands.connect(pid)
    for stdout, _, _ in again:
        if stdout:
            break
    assert int(stdout.split()[0]) >= 1
    assert sandbox.commands.kill(pid) is True
    with pytest.raises(CommandExitException) as killed:
        again.wait()
    assert (killed.value.exit_code, killed.value.error) == (-1, "signal: killed")
    assert sandbox.commands.kill(pid) is False


def test_stdin(sandbox):
    handle = sandbox.commands.run("cat", background=True, **stdin_option())
    sandbox.commands.send_stdin(handle.pid, "one\n")
    big = "x" * 300_000 + "\n"
    sandbox.commands.send_stdin(handle.pid, big)
    if hasattr(sandbox.commands, "close_stdin"):
        sandbox.commands.close_stdin(handle.pid)
        assert handle.wait().stdout == "one\n" + big
    else:
        seen = ""
        for stdout, _, _ in handle:
            seen += stdout or ""
            if len(seen) == len(big) + 4:
                break
        assert seen == "one\n" + big
        assert handle.kill()


@needs("sandbox_sync.commands.command.Commands.stream_input")
def test_a_stream_of_input_is_in_order(sandbox):
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    pieces = [f"{number} ü\n" for number in range(2000)] + [b"\0\n", "x" * 300_000]
    sandbox.commands.stream_input(handle.pid, iter(pieces))
    # The end of a stream is no end of stdin.
    sandbox.commands.stream_input(handle.pid, ["later"])
    sandbox.commands.close_stdin(handle.pid)
    expected = "".join(piece if isinstance(piece, str) else piece.decode() for piece in pieces) + "later"
    assert handle.wait().stdout == expected
    with pytest.raises(NotFoundException):
        sandbox.commands.stream_input(handle.pid, ["too late"])


@needs("sandbox_sync.commands.command.Commands.stream_input")
def test_a_stream_of_input_to_a_terminal(sandbox):
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    sandbox.pty.stream_input(terminal.pid, iter([b"echo in-$((40", b"+2))\n", b"exit 5\n"]))
    seen = []
    with pytest.raises(CommandExitException) as ended:
        terminal.wait(on_pty=seen.append)
    assert ended.value.exit_code == 5 and b"in-42" in b"".join(seen)


def test_a_terminal(sandbox):
    seen = []
    terminal = sandbox.pty.create(PtySize(rows=30, cols=100), envs={"A": "x"}, timeout=60)
    sandbox.pty.send_stdin(terminal.pid, b"stty size; echo $A-$TERM\n")
    for _, _, data in terminal:
        seen.append(data or b"")
        if b"x-xterm" in b"".join(seen):
            break
    assert b"30 100" in b"".join(seen)
    sandbox.pty.resize(terminal.pid, PtySize(rows=40, cols=120))
    sandbox.pty.send_stdin(terminal.pid, b"stty size\n")
    for _, _, data in terminal:
        seen.append(data or b"")
        if b"40 120" in b"".join(seen):
            break
    # ^C reaches the program in front.
    sandbox.pty.send_stdin(terminal.pid, b"sleep 1000\n")
    eventually(lambda: "sleep" in sandbox.commands.run("ps -eo comm || true").stdout)
    sandbox.pty.send_stdin(terminal.pid, b"\x03")
    sandbox.pty.send_stdin(terminal.pid, b"exit 5\n")
    with pytest.raises(CommandExitException) as ended:
        terminal.wait()
    assert ended.value.exit_code == 5


def test_errors_of_a_start_are_told(sandbox):
    with pytest.raises(InvalidArgumentException, match="cwd"):
        sandbox.commands.run("true", cwd="/missing")
    with pytest.raises(SandboxException, match="user"):
        sandbox.commands.run("true", user="guest")


def test_root_is_the_user_of_the_sandbox(sandbox):
    # Frameworks send `root` with each call. It has no further rights.
    sandbox.files.write("of-root", "x", user="root")
    ran = sandbox.commands.run("id -un; pwd; cat of-root; touch /etc/x 2>/dev/null || echo refused", user="root")
    assert ran.stdout == "user\n/home/user\nxrefused\n"
    assert sandbox.files.get_info("of-root", user="root").owner == "user"


def test_a_gone_sandbox_ends_its_streams(server):
    sandbox = Sandbox.create(timeout=600)
    handle = sandbox.commands.run("sleep 1000", background=True)
    sandbox.kill()
    with pytest.raises((TimeoutException, SandboxException)) as gone:
        handle.wait()
    assert version() < (2, 63) or "killed" in str(gone.value)


def test_malformed_calls_are_refused(sandbox, server):
    def call(body: bytes, kind: str = "application/connect+json") -> httpx.Response:
        headers = {
            "Content-Type": kind,
            "X-Access-Token": sandbox._envd_access_token,
            "E2b-Sandbox-Id": sandbox.sandbox_id,
        }
        return httpx.post(f"{server.url}/e2b/envd/process.Process/Start", headers=headers, content=body)

    def enveloped(body: bytes) -> bytes:
        return b"\0" + len(body).to_bytes(4, "big") + body

    bad = [b"{", b"{}", b'{"process": {"cmd": ""}}', b'{"process": {"cmd": "true", "cwd": "\\u0000"}}']
    for body in [b"", b"\0\0\0\0\5{}", *map(enveloped, bad)]:
        answer = call(body)
        assert answer.status_code == 200 and answer.content[0] == 2, answer.content
        assert b"invalid_argument" in answer.content, answer.content
    assert b"unimplemented" in call(b"\0\0\0\0\0", "application/connect+proto").content
