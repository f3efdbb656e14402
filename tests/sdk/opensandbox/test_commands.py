"""Commands and sessions through the SDK: output, exit codes, limits, background, interrupts."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from conftest import HOST, created, handlers, seconds, texts
from opensandbox import Sandbox
from opensandbox.exceptions import InvalidArgumentException, SandboxApiException, SandboxException
from opensandbox.models.execd import RunCommandOpts
from waiting import eventually


def test_output_is_split_by_stream_and_line(sandbox):
    execution = sandbox.commands.run("echo out; echo err >&2; printf 'a\\n\\nb\\r\\nc\\rd'")
    assert texts(execution.logs.stdout) == ["out", "a", "\n", "b", "c", "d"]
    assert texts(execution.logs.stderr) == ["err"]
    assert execution.exit_code == 0 and execution.error is None and execution.id
    assert execution.complete.execution_time_in_millis >= 0


@pytest.mark.parametrize(
    ("command", "code"),
    [("true", 0), ("exit 7", 7), ("no-such-command", 127), ("kill -9 $$", -1), ("exit 300", 44)],
)
def test_the_exit_code_is_known(sandbox, command, code):
    execution = sandbox.commands.run(command)
    assert execution.exit_code == code
    assert (execution.complete is None) == (code != 0)
    if code:
        assert execution.error.name == "CommandExecError" and execution.error.value == str(code)
        assert isinstance(execution.error.traceback, list) and execution.error.traceback


def test_blank_commands_are_refused(sandbox, execd):
    with pytest.raises(InvalidArgumentException):
        sandbox.commands.run("   ")
    for body in [{}, {"command": ""}, {"command": "  "}, {"command": "ls", "argv": ["ls"]}, {"argv": []}]:
        answer = execd.post("/command", json=body)
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST_BODY"), body
    for body in [{"command": "ls", "gid": 5}, {"command": "ls", "timeout": "soon"}]:
        assert execd.post("/command", json=body).status_code == 400


def test_environment_and_directory(sandbox):
    opts = RunCommandOpts(working_directory="/tmp", envs={"OWN": "a b", "FROM_CREATE": "2"})
    execution = sandbox.commands.run('pwd; echo "$OWN $FROM_CREATE"', opts=opts)
    assert texts(execution.logs.stdout) == ["/tmp", "a b 2"]
    assert texts(sandbox.commands.run("echo $FROM_CREATE").logs.stdout) == ["1"]
    home = texts(sandbox.commands.run("echo ~").logs.stdout)
    for directory in ["~", "$HOME"]:
        run = sandbox.commands.run("pwd", opts=RunCommandOpts(working_directory=directory))
        assert texts(run.logs.stdout) == home
    for missing in ["/no/such/directory", "~/none"]:
        with pytest.raises(SandboxApiException) as error:
            sandbox.commands.run("pwd", opts=RunCommandOpts(working_directory=missing))
        assert error.value.status_code == 400


@pytest.mark.parametrize("value", ["plain", "with 'single' quotes", 'a "b" \\ $HOME', "two\nlines", ""])
def test_set_env_stays_for_later_commands(sandbox, value):
    sandbox.commands.set_env("STAYS", value)
    shown = sandbox.commands.run('printf %s "$STAYS" | od -An -tx1 | tr -d " \\n"')
    assert "".join(texts(shown.logs.stdout)) == value.encode().hex()
    with pytest.raises(InvalidArgumentException):
        sandbox.commands.set_env("1BAD", "x")


def test_another_user_is_not_served(sandbox):
    user = texts(sandbox.commands.run("id -u").logs.stdout)[0]
    own = sandbox.commands.run("id -u", opts=RunCommandOpts(uid=int(user)))
    assert texts(own.logs.stdout) == [user]
    with pytest.raises(SandboxApiException) as error:
        sandbox.commands.run("id -u", opts=RunCommandOpts(uid=4321))
    assert error.value.status_code == 501
    group = int(texts(sandbox.commands.run("id -g").logs.stdout)[0])
    own = sandbox.commands.run("id -g", opts=RunCommandOpts(uid=int(user), gid=group))
    assert texts(own.logs.stdout) == [str(group)]
    with pytest.raises(SandboxApiException) as error:
        sandbox.commands.run("id -g", opts=RunCommandOpts(uid=int(user), gid=group + 1))
    assert error.value.status_code == 501


def test_a_timeout_kills_the_whole_group(sandbox):
    started = time.monotonic()
    command = "touch /tmp/group; (sleep 1000; rm /tmp/group) & sleep 1000"
    execution = sandbox.commands.run(command, opts=RunCommandOpts(timeout=seconds(1)))
    assert time.monotonic() - started < 60
    assert execution.exit_code == -1 and execution.complete is None
    eventually(lambda: sandbox.commands.run("pgrep -f 'sleep 1000'").exit_code != 0)


def test_a_run_ends_with_its_leader_and_leaves_children(sandbox):
    execution = sandbox.commands.run("sleep 1001 & echo $!")
    assert execution.exit_code == 0
    pid = texts(execution.logs.stdout)[0]
    assert sandbox.commands.run(f"kill -0 {pid}").exit_code == 0
    sandbox.commands.run(f"kill {pid}")


def test_a_stream_ends_though_a_child_keeps_the_pipe(sandbox, execd):
    sandbox.commands.run("mkfifo /tmp/later")
    child = "readlink /proc/self/fd/3 3>&1 > /tmp/held; read -r line < /tmp/later; echo late; echo wrote > /tmp/wrote"
    script = f"({child}; exec sleep 1004) & echo $!"
    answer = execd.post("/command", json={"command": script})
    # The whole response is here, and the child still waits for its line.
    events = [json.loads(event) for event in answer.text.split("\n\n") if event]
    assert [event["type"] for event in events if event["type"] != "ping"] == ["init", "stdout", "execution_complete"]
    pid = next(event["text"] for event in events if event["type"] == "stdout").strip()
    held = eventually(lambda: texts(sandbox.commands.run("cat /tmp/held").logs.stdout))
    assert held[0].startswith("pipe:") and sandbox.commands.run(f"kill -0 {pid} && ! test -e /tmp/wrote").exit_code == 0
    # Its later output belongs to no response and does not end it.
    sandbox.commands.run("echo go > /tmp/later")
    eventually(lambda: sandbox.commands.run("cat /tmp/wrote").exit_code == 0)
    assert sandbox.commands.run(f"kill {pid}; rm /tmp/later /tmp/held /tmp/wrote").exit_code == 0


def test_the_cursor_of_logs_counts_bytes(sandbox, execd):
    opts = RunCommandOpts(background=True)
    execution = sandbox.commands.run("printf 'é€😀\\n'; printf 'ü\\n' >&2", opts=opts)
    eventually(lambda: done(sandbox, execution.id))
    whole = sandbox.commands.get_background_command_logs(execution.id)
    assert (whole.content, whole.cursor) == ("é€😀\nü\n", 13)
    for cursor, rest in [(2, "€😀\nü\n"), (5, "😀\nü\n"), (10, "ü\n"), (13, "")]:
        part = sandbox.commands.get_background_command_logs(execution.id, cursor=cursor)
        assert (part.content, part.cursor) == (rest, 13), cursor
    # A cursor within a character, as a client has it that counts the bytes that it read.
    assert execd.get(f"/command/{execution.id}/logs?cursor=3").content == "é€😀\nü\n".encode()[3:]


def test_a_program_that_cannot_start_is_an_execution_error(execd):
    answer = execd.post("/command", json={"argv": ["/no/such/program"]})
    assert answer.status_code == 200
    assert '"type":"init"' in answer.text and '"type":"error"' in answer.text
    assert "execution_complete" not in answer.text


def test_handlers_see_output_while_the_command_runs(sandbox):
    seen = []
    seeing = handlers(
        sandbox,
        on_init=lambda event: seen.append(("init", event.id)),
        on_stdout=lambda message: seen.append((message.text, time.monotonic())),
        on_stderr=lambda message: seen.append((message.text, message.is_error)),
        on_execution_complete=lambda event: seen.append(("complete", event.execution_time_in_millis)),
        on_error=lambda event: seen.append(("error", event.value)),
    )
    execution = sandbox.commands.run("echo first; sleep 1; echo second; echo e >&2", handlers=seeing)
    names = [name for name, _ in seen]
    assert names[0] == "init" and names[-1] == "complete"
    assert set(names[1:-1]) == {"first", "second", "e"}
    at = dict(seen)
    assert at["init"] == execution.id and at["e"] is True
    assert at["second"] - at["first"] > 0.5, "the first line comes while the command runs"
    sandbox.commands.run("exit 4", handlers=seeing)
    assert seen[-1] == ("error", "4")


def test_big_output_is_complete(sandbox):
    execution = sandbox.commands.run("seq 1 200000")
    assert texts(execution.logs.stdout) == [str(number) for number in range(1, 200001)]
    wide = sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end")
    assert [len(text) for text in texts(wide.logs.stdout)] == [3000000, 3]
    odd = sandbox.commands.run("printf 'a\\377b\\u2028c\\xc3\\xa9\\n'")
    assert texts(odd.logs.stdout) == ["a\ufffdb\u2028c\u00e9"]


def test_background_commands_have_status_and_logs(sandbox, execd):
    opts = RunCommandOpts(background=True)
    sandbox.commands.run("mkfifo /tmp/pipe")
    execution = sandbox.commands.run("echo one; read -r line < /tmp/pipe; echo two >&2; exit 3", opts=opts)
    assert execution.exit_code is None and execution.id
    status = sandbox.commands.get_command_status(execution.id)
    assert status.running and status.exit_code is None and status.started_at and not status.finished_at
    eventually(lambda: sandbox.commands.get_background_command_logs(execution.id).content == "one\n")
    first = sandbox.commands.get_background_command_logs(execution.id)
    assert first.cursor == 4
    empty = sandbox.commands.get_background_command_logs(execution.id, cursor=4)
    assert (empty.content, empty.cursor) == ("", 4)
    sandbox.commands.run("echo go > /tmp/pipe")
    status = eventually(lambda: done(sandbox, execution.id))
    assert status.exit_code == 3 and status.finished_at >= status.started_at and "exit status 3" in status.error
    rest = sandbox.commands.get_background_command_logs(execution.id, cursor=4)
    assert (rest.content, rest.cursor) == ("two\n", 8)
    beyond = execd.get(f"/command/{execution.id}/logs?cursor=1000")
    assert beyond.text == "" and beyond.headers["EXECD-COMMANDS-TAIL-CURSOR"] == "8"
    foreground = sandbox.commands.run("true")
    assert sandbox.commands.get_command_status(foreground.id).exit_code == 0
    for command_id, path, code in [("none", "status", 404), ("none", "logs", 400), (foreground.id, "logs", 400)]:
        path = f"/command/status/{command_id}" if path == "status" else f"/command/{command_id}/logs"
        assert execd.get(path).status_code == code
    listed = {item["id"] for item in execd.get("/command").json()["commands"]}
    assert {execution.id, foreground.id} <= listed


def done(sandbox, command_id):
    status = sandbox.commands.get_command_status(command_id)
    return status if not status.running else None


def test_interrupt_ends_a_command(sandbox):
    execution = sandbox.commands.run("trap '' TERM; sleep 1000", opts=RunCommandOpts(background=True))
    sandbox.commands.interrupt(execution.id)
    status = eventually(lambda: done(sandbox, execution.id))
    assert status.exit_code == -1
    for command_id in [execution.id, "none"]:
        with pytest.raises(SandboxApiException) as error:
            sandbox.commands.interrupt(command_id)
        assert error.value.status_code == 500


def test_a_stream_resumes_after_an_event(sandbox, execd):
    execution = sandbox.commands.run("echo one; echo two; echo three", opts=RunCommandOpts(background=True))
    eventually(lambda: done(sandbox, execution.id))
    def events(query):
        text = execd.get(f"/command/{execution.id}/resume{query}").text
        return [json.loads(line) for line in text.split("\n\n") if line]

    everything = events("")
    assert [event["type"] for event in everything] == ["init", *["stdout"] * 3, "execution_complete"]
    for at, event in enumerate(everything[1:-1], start=1):
        rest = events(f"?after_eid={event['eid']}")
        assert [later.get("text") for later in rest] == [later.get("text") for later in everything[at + 1 :]]
    assert execd.get(f"/command/{execution.id}/resume?after_eid=999").status_code == 409
    assert execd.get("/command/none/resume").status_code == 404


def test_a_line_is_not_lost_between_two_readers(sandbox, execd):
    command = "printf 'one\\ntw'; read -r line < /tmp/half; printf 'o\\nthree\\377\\n'; printf last"
    sandbox.commands.run("mkfifo /tmp/half")
    background = sandbox.commands.run(command, opts=RunCommandOpts(background=True)).id
    first = []
    with execd.stream("GET", f"/command/{background}/resume") as stream:
        for line in stream.iter_lines():
            first += [json.loads(line)] if line else []
            if first and first[-1].get("text") == "one":
                break
    sandbox.commands.run("echo go > /tmp/half")
    eventually(lambda: done(sandbox, background))
    rest = execd.get(f"/command/{background}/resume?after_eid={first[-1]['eid']}").text
    rest = [json.loads(line).get("text") for line in rest.split("\n\n") if line]
    seen = [event["text"] for event in first if event.get("eid")]
    assert seen + rest[:-1] == ["one", "two", "three\ufffd", "last"]


def test_a_command_that_mentions_the_readiness_probe_runs(sandbox):
    probe = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/${JUPYTER_PORT:-44771}'"
    execution = sandbox.commands.run(f"echo RAN; {probe} || echo refused; exit 9")
    assert texts(execution.logs.stdout) == ["RAN", "refused"] and execution.exit_code == 9


def test_null_is_the_same_as_nothing(execd):
    body = {"command": "echo ${A-unset}x", "background": None, "envs": {"A": None}, "timeout": None, "cwd": None}
    answer = execd.post("/command", json=body)
    assert answer.status_code == 200 and '"text":"x"' in answer.text


def test_a_session_keeps_directory_and_variables(sandbox):
    session = sandbox.commands.create_session(working_directory="/tmp/new/place")

    def run(command, **options):
        execution = sandbox.commands.run_in_session(session, command, **options)
        return execution.exit_code, texts(execution.logs.stdout)

    assert run("pwd; export KEPT=1; cd /tmp") == (0, ["/tmp/new/place"])
    assert run("pwd; echo $KEPT; echo e >&2; echo; echo z") == (0, ["/tmp", "1", "e", "z"])
    assert run("pwd", working_directory="/usr") == (0, ["/usr"])
    assert run("pwd") == (0, ["/usr"]), "the directory of a run stays"
    failed = sandbox.commands.run_in_session(session, "exit 7")
    assert failed.exit_code == 7 and failed.error.value == "7" and failed.complete is None
    assert run("echo $KEPT")[0] == 0, "the session survives an exit"
    late = sandbox.commands.run_in_session(session, "sleep 1000", timeout=seconds(1))
    assert late.exit_code == -1 and late.complete is None
    assert run("echo on") == (0, ["on"])
    with pytest.raises(InvalidArgumentException):
        sandbox.commands.run_in_session(session, " ")
    sandbox.commands.delete_session(session)
    for call in [lambda: sandbox.commands.run_in_session(session, "true"), lambda: sandbox.commands.delete_session(session)]:
        with pytest.raises((SandboxApiException, SandboxException)) as error:
            call()
        assert error.value.status_code == 404
    other = sandbox.commands.create_session()
    with pytest.raises(SandboxApiException) as error:
        sandbox.commands.run_in_session(other, "pwd", working_directory="/no/such")
    assert error.value.status_code == 400


def test_packages_can_be_installed(sandbox):
    """`pip` and `npm` find a place that they may write to; the registries may be out of reach."""
    for command in [
        "mkdir -p /tmp/pkg/hello_pkg && cd /tmp/pkg && echo 'answer = 42' > hello_pkg/__init__.py && printf "
        "'[build-system]\\nrequires = []\\nbuild-backend = \"own\"\\nbackend-path = [\".\"]\\n"
        "[project]\\nname = \"hello-pkg\"\\nversion = \"1\"\\n' > pyproject.toml",
        "cd /tmp/pkg && printf '%s\\n' 'import zipfile' 'def build_wheel(d, config_settings=None, metadata_directory=None):' "
        "'    n = \"hello_pkg-1-py3-none-any.whl\"' '    z = zipfile.ZipFile(f\"{d}/{n}\", \"w\")' "
        "'    z.write(\"hello_pkg/__init__.py\")' "
        "'    z.writestr(\"hello_pkg-1.dist-info/METADATA\", \"Metadata-Version: 2.1\\nName: hello-pkg\\nVersion: 1\\n\")' "
        "'    z.writestr(\"hello_pkg-1.dist-info/WHEEL\", \"Wheel-Version: 1.0\\nGenerator: own\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n\")' "
        "'    z.writestr(\"hello_pkg-1.dist-info/RECORD\", \"\")' '    z.close()' '    return n' > own.py",
        "cd /tmp/pkg && python3 -m pip install --no-index --no-build-isolation . && cd / && "
        "python3 -c 'import hello_pkg; assert hello_pkg.answer == 42'",
        "mkdir -p /tmp/npm && cd /tmp/npm && echo '{\"name\":\"hello-npm\",\"version\":\"1.0.0\",\"bin\":{\"hello-npm\":\"cli.js\"}}' "
        "> package.json && printf '#!/usr/bin/env node\\nconsole.log(42)\\n' > cli.js && chmod +x cli.js && "
        "npm install -g --offline --no-audit --no-fund . && hello-npm | grep 42",
    ]:
        execution = sandbox.commands.run(command)
        assert execution.exit_code == 0, (texts(execution.logs.stdout), texts(execution.logs.stderr))


@pytest.mark.asyncio
async def test_commands_of_one_sandbox_run_at_once(server):
    sandbox = await Sandbox.create(HOST, connection_config=server.async_config())
    try:
        runs = await asyncio.gather(*(sandbox.commands.run(f"echo {number}; exit {number}") for number in range(20)))
        assert [run.exit_code for run in runs] == list(range(20))
        assert [run.logs.stdout[0].text for run in runs] == [str(number) for number in range(20)]
    finally:
        await sandbox.kill()
        await sandbox.close()


def test_a_dropped_stream_kills_its_command(server):
    with created(server.config()) as sandbox, server.execd(sandbox.id) as execd:
        with execd.stream("POST", "/command", json={"command": "echo $$; exec sleep 1002"}) as response:
            lines = response.iter_lines()
            eventually(lambda: '"type":"stdout"' in next(lines))
        eventually(lambda: sandbox.commands.run("pgrep -f 'sleep 1002'").exit_code != 0)
        execution = sandbox.commands.run("exec sleep 1003", opts=RunCommandOpts(background=True))
        assert sandbox.commands.get_command_status(execution.id).running, "a command in the background stays"
