"""`/v1/bash`: commands with an environment of their own, and output by offsets."""

import pytest
from agent_sandbox.core.api_error import ApiError
from waiting import eventually


def test_streams_are_separate_and_the_environment_is_of_one_command(client):
    result = client.bash.exec(command="echo $TOKEN; echo e >&2; exit 4", env={"TOKEN": "s3cret"}).data
    assert (result.stdout, result.stderr, result.exit_code, result.status) == ("s3cret\n", "e\n", 4, "completed")
    assert (result.offset, result.stderr_offset) == (7, 2)
    again = client.bash.exec(command="echo .$TOKEN", session_id=result.session_id).data
    assert again.stdout == ".\n"


def test_a_session_keeps_only_its_directory(client):
    session = client.bash.create_session(session_id="b1", exec_dir="/tmp").data
    assert (session.session_id, session.status, session.working_dir) == ("b1", "ready", "/tmp")
    client.bash.exec(command="export A=1; cd /; x=1", session_id="b1")
    assert client.bash.exec(command="pwd; echo .$A$x", session_id="b1").data.stdout == "/tmp\n.\n"
    assert client.bash.create_session(session_id="b1").data.command_count == 2
    assert [entry.session_id for entry in client.bash.sessions().data] == ["b1"]
    client.bash.close_session("b1")
    with pytest.raises(ApiError) as refused:
        client.bash.exec(command="true", session_id="b1")
    assert refused.value.status_code == 404


def test_a_directory_of_a_command_is_that_of_later_ones(client):
    client.bash.create_session(session_id="b")
    assert client.bash.exec(command="pwd; cd /", session_id="b", exec_dir="/tmp").data.stdout == "/tmp\n"
    assert client.bash.exec(command="pwd", session_id="b").data.stdout == "/tmp\n"
    assert [entry.working_dir for entry in client.bash.sessions().data] == ["/tmp"]
    unnamed = client.bash.exec(command="true", exec_dir="/usr").data.session_id
    assert client.bash.exec(command="pwd", session_id=unnamed).data.stdout == "/usr\n"


def test_output_is_read_by_offsets(client):
    client.bash.create_session(session_id="b")
    command = "echo one; read x; echo $x; echo problem >&2; read y"
    started = client.bash.exec(command=command, session_id="b", async_mode=True).data
    assert started.status == "running"
    first = client.bash.output(session_id="b", wait=True, wait_timeout=60).data
    assert (first.stdout, first.command.status, first.offset) == ("one\n", "running", 4)
    client.bash.write(session_id="b", input="two\n")
    seen = {"out": "", "offset": first.offset}

    def complete():
        more = client.bash.output(session_id="b", offset=seen["offset"], wait=True, wait_timeout=5).data
        seen["out"] += more.stdout
        seen["offset"] = more.offset
        return more.stderr == "problem\n"

    eventually(complete)
    assert seen["out"] == "two\n"
    client.bash.kill(session_id="b", signal="SIGKILL")
    eventually(lambda: client.bash.output(session_id="b").data.command.status == "killed")
    by_id = client.bash.output(session_id="b", command_id=started.command_id).data
    assert by_id.stdout == "one\ntwo\n"


def test_input_that_a_command_does_not_read_has_a_time_limit(client):
    client.bash.create_session(session_id="unread")
    client.bash.exec(command="sleep 600", session_id="unread", async_mode=True)
    with pytest.raises(ApiError) as refused:
        client.bash.write(session_id="unread", input="x" * 300_000)
    assert refused.value.status_code == 400 and 0 < refused.value.body["data"]["accepted"] < 300_000


def test_limits_of_time_and_output(client):
    soft = client.bash.exec(command="sleep 600", timeout=0.5).data
    assert soft.status == "running"
    hard = client.bash.exec(command="echo a; sleep 600", hard_timeout=1).data
    assert (hard.status, hard.stdout) == ("timed_out", "a\n")
    command = "head -c 100000 /dev/zero | tr '\\0' x"
    assert len(client.bash.exec(command=command).data.stdout) <= 50000
    assert len(client.bash.exec(command=command, max_output_length=0).data.stdout) == 100000


@pytest.mark.parametrize(("limit", "status"), [("timeout", "pending"), ("hard_timeout", "timed_out")])
def test_the_limits_of_a_command_count_while_its_session_is_busy(sandbox, limit, status):
    sandbox.bash.create_session(session_id="busy")
    sandbox.bash.exec(command="sleep 600", session_id="busy", async_mode=True)
    late = sandbox.bash.exec(command="echo late", session_id="busy", **{limit: 1}).data
    assert (late.status, late.stdout) == (status, "")


def test_a_child_that_holds_stdout_does_not_block(client):
    assert client.bash.exec(command="sleep 600 & echo here").data.stdout == "here\n"


def test_a_wrong_name_or_signal_is_400(client):
    for call in [
        lambda: client.bash.exec(command="true", env={"A=B": "x"}),
        lambda: client.bash.exec(command="true", env={"": "x"}),
    ]:
        with pytest.raises(ApiError) as refused:
            call()
        assert refused.value.status_code == 400
    client.bash.create_session(session_id="k")
    with pytest.raises(ApiError) as refused:
        client.bash.kill(session_id="k", signal="SIGFOO")
    assert refused.value.status_code == 400


@pytest.mark.parametrize("signal", [None, "SIGTERM", "SIGINT", "SIGKILL"])
def test_a_signal_that_ends_a_command_kills_it(client, signal):
    client.bash.create_session(session_id="k")
    client.bash.exec(command="echo begun; sleep 600", session_id="k", async_mode=True)
    assert client.bash.output(session_id="k", wait=True, wait_timeout=60).data.stdout == "begun\n"
    client.bash.kill(session_id="k", **({"signal": signal} if signal else {}))
    eventually(lambda: client.bash.output(session_id="k").data.command.status == "killed")


def test_a_missing_directory_is_400_and_nothing_runs(client):
    with pytest.raises(ApiError) as refused:
        client.bash.exec(command="touch /tmp/ran", exec_dir="/missing")
    assert refused.value.status_code == 400 and "exec_dir" in refused.value.body["message"]
    assert client.bash.exec(command="ls /tmp/ran").data.exit_code != 0


def test_lost_output_is_named_where_it_is_missing(client):
    client.bash.create_session(session_id="long")
    client.bash.exec(command="seq 1000000", session_id="long")
    text = client.bash.output(session_id="long").data.stdout
    assert text.startswith("... [") and text.endswith("\n999999\n1000000\n") and text.count("dropped") == 1
