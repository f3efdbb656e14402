"""`/v1/shell`: commands, and sessions that keep their state."""

import threading
import uuid

import pytest
import requests
from agent_sandbox.core.api_error import ApiError
from conftest import run
from waiting import eventually


def test_a_command_has_output_and_an_exit_code(client):
    result = run(client, "echo out; echo err >&2; (exit 3)")
    assert (result.output, result.exit_code, result.status) == ("out\nerr\n", 3, "completed")
    assert result.command == "echo out; echo err >&2; (exit 3)"
    assert result.console[0].output == result.output


def test_commands_without_a_session_share_nothing(client):
    first = run(client, "cd /tmp; export A=1; x=2; pwd")
    second = run(client, "pwd; echo $A$x.")
    assert (first.output, second.output) == ("/tmp\n", "/home/gem\n.\n")
    assert first.session_id != second.session_id


def test_a_returned_session_keeps_its_state(client):
    first = run(client, "cd /tmp; x=2; f() { echo f$1; }")
    assert run(client, "pwd; f $x", id=first.session_id).output == "/tmp\nf2\n"


def test_a_created_session_keeps_its_state_and_is_created_once(client):
    session = str(uuid.uuid4())
    created = client.shell.create_session(id=session, exec_dir="/tmp").data
    assert (created.session_id, created.working_dir) == (session, "/tmp")
    assert run(client, "export A=1; cd /", id=session).exit_code == 0
    assert client.shell.create_session(id=session).data.session_id == session
    assert run(client, "echo $A; pwd", id=session).output == "1\n/\n"
    client.shell.cleanup_session(session)
    with pytest.raises(ApiError) as refused:
        run(client, "true", id=session)
    assert refused.value.status_code == 404


def test_an_unknown_session_is_404_and_nothing_runs(client):
    with pytest.raises(ApiError) as refused:
        run(client, "touch /tmp/ran", id="unknown")
    assert refused.value.status_code == 404
    assert refused.value.body == {"success": False, "message": "Session not found", "data": None}
    for call in [
        lambda: client.shell.view(id="unknown"),
        lambda: client.shell.wait_for_process(id="unknown"),
        lambda: client.shell.write_to_process(id="unknown", input="x", press_enter=True),
        lambda: client.shell.kill_process(id="unknown"),
        lambda: client.shell.update_session(id="unknown", no_change_timeout=1),
    ]:
        with pytest.raises(ApiError) as refused:
            call()
        assert refused.value.status_code == 404
    assert client.shell.cleanup_session("unknown").success
    assert run(client, "test -e /tmp/ran").exit_code == 1


def test_silence_returns_and_the_command_continues(client):
    session = client.shell.create_session().data.session_id
    result = run(client, "echo first; read line; echo got $line", id=session, no_change_timeout=1)
    assert (result.status, result.output, result.exit_code) == ("no_change_timeout", "first\n", None)
    assert client.shell.view(id=session).data.status == "running"
    client.shell.write_to_process(id=session, input="it", press_enter=True)
    assert client.shell.wait_for_process(id=session, seconds=120).data.status == "completed"
    viewed = client.shell.view(id=session).data
    assert (viewed.output, viewed.exit_code) == ("first\ngot it\n", 0)


def test_output_restarts_the_silence(sandbox):
    # Longer than the limit as a whole; each gap has five seconds to spare.
    result = run(sandbox, "for i in $(seq 12); do echo $i; sleep 1; done", no_change_timeout=6)
    assert (result.status, result.output) == ("completed", "".join(f"{n}\n" for n in range(1, 13)))


def test_input_that_a_command_does_not_read_is_counted(client):
    session = client.shell.create_session().data.session_id
    run(client, "until [ -e /tmp/go ]; do sleep 0.1; done; head -c 300000 | wc -c", id=session, async_mode=True)
    with pytest.raises(ApiError) as refused:
        client.shell.write_to_process(id=session, input="x" * 300_000, press_enter=False)
    body = refused.value.body
    accepted = body["data"]["accepted"]
    assert refused.value.status_code == 400 and 0 < accepted < 300_000
    assert f"{accepted} of 300000 bytes were written" in body["message"]
    run(client, "touch /tmp/go")
    client.shell.write_to_process(id=session, input="x" * (300_000 - accepted), press_enter=False)
    assert client.shell.wait_for_process(id=session, seconds=120).data.status == "completed"
    assert client.shell.view(id=session).data.output.strip() == "300000"


@pytest.mark.parametrize(
    ("limit", "status"),
    [("no_change_timeout", "no_change_timeout"), ("timeout", "running"), ("hard_timeout", "hard_timeout")],
)
def test_the_limits_of_a_command_count_while_its_session_is_busy(sandbox, limit, status):
    sandbox.shell.create_session(id="busy")
    run(sandbox, "sleep 600", id="busy", async_mode=True)
    late = run(sandbox, "touch /tmp/ran", id="busy", **{limit: 1})
    assert (late.status, late.output) == (status, "")
    assert run(sandbox, "test -e /tmp/ran").exit_code == 1
    sandbox.shell.kill_process(id="busy")
    # A killed command does not run; another one has its turn now.
    assert run(sandbox, "test -e /tmp/ran", id="busy").exit_code == (1 if limit == "hard_timeout" else 0)


def test_a_silent_command_is_answered_before_its_limit(sandbox):
    # A client with the same limit for its requests would have left at 10 seconds.
    result = run(sandbox, "sleep 9.9; echo late", no_change_timeout=10)
    assert (result.status, result.output) == ("no_change_timeout", "")


def test_the_silence_of_a_session_can_change(client):
    session = client.shell.create_session(no_change_timeout=1).data.session_id
    assert run(client, "sleep 600", id=session).status == "no_change_timeout"
    client.shell.kill_process(id=session)
    client.shell.update_session(id=session, no_change_timeout=200)
    assert run(client, "sleep 3; echo done", id=session).output == "done\n"


def test_silence_without_a_session_leaves_the_command_running(client):
    result = run(client, "sleep 2; echo late > /tmp/late; sleep 600", no_change_timeout=1)
    assert result.status == "no_change_timeout"
    eventually(lambda: run(client, "cat /tmp/late 2>/dev/null").output == "late\n")
    assert client.shell.view(id=result.session_id).data.status == "running"
    assert client.shell.kill_process(id=result.session_id).data.status == "terminated"


def test_a_soft_timeout_returns_running(client):
    session = client.shell.create_session().data.session_id
    result = run(client, "echo a; sleep 3; echo b", id=session, timeout=0.5)
    assert result.status == "running"
    assert client.shell.wait_for_process(id=session, max_wait_seconds=120).data.status == "completed"
    assert client.shell.view(id=session).data.output == "a\nb\n"


def test_a_hard_timeout_kills_the_whole_tree(client):
    session = client.shell.create_session().data.session_id
    marker = "37.4242"
    result = run(client, f"echo before; (sleep {marker} & sleep {marker}; true)", id=session, hard_timeout=1.5)
    # The shell says that it lost a child.
    assert result.status == "hard_timeout" and result.output.startswith("before\n")
    eventually(lambda: marker not in run(client, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output)
    assert run(client, "echo usable", id=session).output == "usable\n"


def test_a_builtin_loop_and_a_trap_do_not_survive_a_hard_timeout(client):
    session = client.shell.create_session().data.session_id
    result = run(client, "trap '' TERM INT; while :; do :; done", id=session, hard_timeout=1)
    assert result.status == "hard_timeout"
    assert run(client, "echo usable", id=session).output == "usable\n"


def test_asynchronous_commands_are_viewed_and_awaited(client):
    session = client.shell.create_session().data.session_id
    started = run(client, "sleep 1; echo done", id=session, async_mode=True)
    assert (started.status, started.session_id) == ("running", session)
    assert client.shell.wait_for_process(id=session, seconds=120).data.status == "completed"
    assert client.shell.view(id=session).data.output == "done\n"


def test_a_kill_ends_the_command_and_keeps_the_session(client):
    session = client.shell.create_session(exec_dir="/tmp").data.session_id
    run(client, "sleep 600 & sleep 600", id=session, async_mode=True)
    killed = client.shell.kill_process(id=session).data
    assert killed.status == "terminated"
    assert run(client, "echo alive", id=session).output.endswith("alive\n")


def test_long_output_is_truncated_unless_asked(client):
    command = "head -c 200000 /dev/zero | tr '\\0' x"
    cut = run(client, command)
    assert len(cut.output) <= 30000 and "truncated" in cut.output
    whole = run(client, command, truncate=False)
    assert len(whole.output) == 200000


def test_output_is_text_without_carriage_returns_or_prompts(client):
    result = run(client, "printf 'a\\nb\\n'; printf '\\377\\n'; echo é")
    assert result.output == "a\nb\n\ufffd\né\n"


@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        ("exit 7", "", 7),
        ("set -e; false; echo no", "", 1),
        ("exec true", "", 0),
        ("cat <<'END'\nline $x\nEND", "line $x\n", 0),
        ("echo 'unbalanced", None, None),
        ("sleep 600 & echo here", "here\n", 0),
        ("echo $((1 +", None, None),
    ],
)
def test_no_command_breaks_its_session(sandbox, command, output, code):
    session = sandbox.shell.create_session().data.session_id
    result = run(sandbox, command, id=session)
    assert result.status == "completed"
    if output is not None:
        assert (result.output, result.exit_code) == (output, code)
    assert run(sandbox, "echo usable", id=session).output == "usable\n"


def test_a_command_may_be_long(sandbox):
    assert run(sandbox, "wc -c <<'END'\n" + "x" * 200_000 + "\nEND").output.strip() == "200001"


def test_a_directory_of_a_command(client):
    client.file.write_file(file="/home/gem/sub/x", content="")
    assert run(client, "pwd", exec_dir="/home/gem/sub").output == "/home/gem/sub\n"
    assert run(client, "pwd", exec_dir="/missing").output == "/home/gem\n"
    for call in [
        lambda: run(client, "touch /tmp/ran", exec_dir="/missing", strict=True),
        lambda: run(client, "touch /tmp/ran", exec_dir="/opt/../tmp"),
        lambda: client.bash.exec(command="touch /tmp/ran", exec_dir="/opt/../tmp"),
        lambda: client.shell.create_session(exec_dir="/opt/../tmp"),
        lambda: client.bash.create_session(exec_dir="/opt/../tmp"),
    ]:
        with pytest.raises(ApiError) as refused:
            call()
        assert refused.value.status_code == 400 and "exec_dir" in refused.value.body["message"]
    assert run(client, "test -e /tmp/ran").exit_code == 1


def test_sessions_are_listed_and_counted(client):
    names = [f"s{number}" for number in range(3)]
    for name in names:
        client.shell.create_session(id=name)
    run(client, "sleep 600", id="s0", async_mode=True)
    listed = client.shell.list_sessions().data.sessions
    assert set(names) <= set(listed)
    assert listed["s0"].current_command == "sleep 600"
    assert listed["s1"].working_dir == "/home/gem" and listed["s1"].age_seconds >= 0
    stats = client.shell.get_session_stats().data
    assert stats.total_sessions == len(listed) and stats.max_sessions > 10
    client.shell.cleanup_all_sessions()
    assert client.shell.list_sessions().data.sessions == {}


def test_a_named_run_survives_its_caller(sandbox, box_url):
    sandbox.shell.create_session(id="kept")
    body = {"command": "sleep 2; echo late > /tmp/late", "id": "kept"}
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(f"{box_url}/v1/shell/exec", json=body, timeout=(60, 0.5))
    eventually(lambda: run(sandbox, "cat /tmp/late 2>/dev/null").output == "late\n")
    assert sandbox.shell.view(id="kept").data.status == "completed"


def test_an_unnamed_run_is_killed_with_its_caller(sandbox, box_url):
    body = {"command": "touch /tmp/begun; sleep 601.5; touch /tmp/late"}
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(f"{box_url}/v1/shell/exec", json=body, timeout=(60, 3))
    eventually(lambda: "601.5" not in run(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output)
    assert run(sandbox, "test -e /tmp/late").exit_code == 1


def test_a_malformed_request_is_422(box_url):
    for body in [{}, {"command": 7}, {"command": "true", "timeout": "x"}]:
        answer = requests.post(f"{box_url}/v1/shell/exec", json=body, timeout=60)
        assert answer.status_code == 422 and answer.json()["detail"][0]["msg"]
    answer = requests.post(f"{box_url}/v1/shell/exec", data="{", timeout=60)
    assert answer.status_code == 422
    answer = requests.post(f"{box_url}/v1/shell/exec", json={"command": "true", "timeout": -1}, timeout=60)
    assert answer.status_code == 400


def test_one_id_is_created_once_by_many_callers(sandbox):
    results, barrier = [], threading.Barrier(8)

    def create():
        barrier.wait()
        results.append(sandbox.shell.create_session(id="one").data.session_id)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["one"] * 8
    assert list(sandbox.shell.list_sessions().data.sessions) == ["one"]
