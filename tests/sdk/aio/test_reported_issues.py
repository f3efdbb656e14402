"""What users of the original server complain about, each as a test."""

import concurrent.futures
import contextlib
import pathlib
import subprocess
import time

import pytest
import requests
from agent_sandbox import Sandbox
from agent_sandbox.core.api_error import ApiError
from conftest import Provisioner, base, run
from program import BOXD, environment
from waiting import eventually


def test_sessions_have_no_limit_of_ten_and_none_is_evicted(sandbox):
    names = [f"s{number}" for number in range(40)]
    for name in names:
        sandbox.shell.create_session(id=name)
        run(sandbox, f"x={name}", id=name)
    assert [run(sandbox, "echo $x", id=name).output.strip() for name in names] == names


def test_the_limit_of_sessions_is_the_one_that_the_server_reports(sandbox):
    limit = sandbox.shell.get_session_stats().data.max_sessions
    assert sandbox.jupyter.get_info().data.max_sessions == limit
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: sandbox.shell.create_session(id=f"s{number}"), range(limit)))
    with pytest.raises(ApiError) as refused:
        sandbox.bash.create_session(session_id="surplus")
    assert refused.value.status_code == 507 and str(limit) in refused.value.body["message"]
    # A named session is not evicted for another one.
    assert sandbox.shell.get_session_stats().data.total_sessions == limit
    sandbox.shell.cleanup_session("s0")
    assert sandbox.bash.create_session(session_id="surplus").data.session_id == "surplus"


def test_commands_without_a_session_do_not_lock_the_box(sandbox):
    """Sessions whose command went on after its request are busy at first, and idle later."""

    limit = sandbox.shell.get_session_stats().data.max_sessions

    def leave(_):
        with contextlib.suppress(ApiError):
            return run(sandbox, "until [ -e /tmp/go ]; do sleep 0.5; done", timeout=0.05).status

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        left = list(pool.map(leave, range(limit + 8)))
    assert left.count("running") == limit
    with pytest.raises(ApiError) as refused:
        run(sandbox, "true")
    assert refused.value.status_code == 507
    sandbox.file.write_file(file="/tmp/go", content="")
    eventually(lambda: all(entry.status == "idle" for entry in sandbox.shell.list_sessions().data.sessions.values()))
    assert run(sandbox, "echo usable").output == "usable\n"
    assert sandbox.bash.exec(command="echo usable").data.stdout == "usable\n"
    assert sandbox.code.execute_code(language="python", code="print('usable')").data.stdout == "usable\n"


def test_a_session_that_the_client_uses_by_its_id_is_not_evicted(sandbox):
    twice = run(sandbox, "x=twice").session_id
    run(sandbox, "true", id=twice)
    asked = run(sandbox, "x=asked").session_id
    sandbox.shell.create_session(id=asked)
    updated = run(sandbox, "x=updated").session_id
    sandbox.shell.update_session(id=updated)
    stateful = sandbox.code.execute_code(language="python", code="x = 5", stateful=True).data.session_id
    for number in range(24):
        run(sandbox, "true")
        if number < 12:
            sandbox.jupyter.execute_code(code="1")
    eventually(lambda: len(sandbox.shell.list_sessions().data.sessions) <= 3 + 5)
    for session, text in [(twice, "twice"), (asked, "asked"), (updated, "updated")]:
        assert run(sandbox, "echo $x", id=session).output == f"{text}\n"
    again = sandbox.code.execute_code(language="python", code="print(x)", session_id=stateful).data
    assert again.stdout == "5\n"


def test_a_session_that_the_client_only_watches_by_its_id_is_not_evicted(sandbox):
    watched = run(sandbox, "echo watched", async_mode=True).session_id
    assert sandbox.shell.wait_for_process(id=watched, seconds=120).data.status == "completed"
    viewed = run(sandbox, "echo viewed").session_id
    sandbox.shell.view(id=viewed)
    read = sandbox.bash.exec(command="echo read", async_mode=True).data.session_id
    eventually(lambda: sandbox.bash.output(session_id=read).data.stdout == "read\n")
    for _ in range(24):
        run(sandbox, "true")
        sandbox.bash.exec(command="true")
    eventually(lambda: len(sandbox.shell.list_sessions().data.sessions) <= 2 + 5)
    eventually(lambda: len(sandbox.bash.sessions().data) <= 1 + 5)
    assert sandbox.shell.view(id=watched).data.output == "watched\n"
    assert sandbox.shell.view(id=viewed).data.output == "viewed\n"
    assert sandbox.bash.output(session_id=read).data.stdout == "read\n"


def test_unnamed_calls_leave_few_sessions_and_evict_no_named_one(sandbox):
    sandbox.shell.create_session(id="named")
    run(sandbox, "x=kept", id="named")
    for _ in range(40):
        run(sandbox, "true")
    eventually(lambda: len(sandbox.shell.list_sessions().data.sessions) <= 1 + 5)
    assert run(sandbox, "echo $x", id="named").output == "kept\n"


def test_a_server_in_the_background_outlives_the_calls_after_it(sandbox):
    run(sandbox, "sleep 602.5 > /dev/null 2>&1 & setsid sleep 602.6 &")
    for _ in range(20):
        run(sandbox, "true")
    eventually(lambda: len(sandbox.shell.list_sessions().data.sessions) <= 5)
    found = run(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output
    assert "602.5" in found and "602.6" in found


def test_parallel_calls_do_not_mix_their_output(sandbox):
    def ask(number):
        return run(sandbox, f"for i in 1 2 3 4 5; do echo {number}; done").output

    # Each call leaves a session to end, and ending them must not fill the box with calls.
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        outputs = list(pool.map(ask, range(256)))
    assert outputs == [f"{number}\n" * 5 for number in range(256)]


def test_parallel_calls_of_one_session_run_one_after_the_other(sandbox):
    sandbox.shell.create_session(id="one")

    def step(number):
        return run(sandbox, f"n=$((n+1)); echo {number} $n; echo {number} $n", id="one").output

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(step, range(24)))
    counts = []
    for number, output in enumerate(outputs):
        first, second = output.splitlines()
        assert first == second and first.split()[0] == str(number)
        counts.append(int(first.split()[1]))
    assert sorted(counts) == list(range(1, 25))


def test_a_busy_session_does_not_delay_another(sandbox):
    sandbox.shell.create_session(id="busy")
    run(sandbox, "sleep 600", id="busy", async_mode=True)
    assert run(sandbox, "echo free").output == "free\n"
    assert requests.get(f"{sandbox._client_wrapper.get_base_url()}/v1/sandbox", timeout=60).status_code == 200


def test_a_repeated_create_and_a_late_delete_leave_nothing(sandbox):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            list(pool.map(lambda _: sandbox.shell.create_session(id="again"), range(8)))
            sandbox.shell.cleanup_session("again")
    assert sandbox.shell.list_sessions().data.sessions == {}
    with pytest.raises(ApiError):
        run(sandbox, "true", id="again")


def test_a_long_silent_job_is_not_killed(sandbox):
    sandbox.shell.create_session(id="silent")
    # The request returns long before its end, and the job goes on.
    first = run(sandbox, "sleep 5; echo done", id="silent", no_change_timeout=0.2)
    assert (first.status, first.exit_code) == ("no_change_timeout", None)
    assert sandbox.shell.wait_for_process(id="silent", seconds=120).data.status == "completed"
    assert sandbox.shell.view(id="silent").data.output == "done\n"


def test_exit_does_not_hang_and_a_time_limit_holds(sandbox):
    assert run(sandbox, "exit 0").status == "completed"
    begun = time.monotonic()
    assert run(sandbox, "sleep 600", hard_timeout=1).status == "hard_timeout"
    assert time.monotonic() - begun < 120


def test_no_zombie_and_no_orphan_stays(sandbox):
    for _ in range(10):
        run(sandbox, "(sleep 0.01 &) ; sh -c 'sleep 0.01 & exit 0'; true")
    run(sandbox, "sleep 603.5 & sleep 603.5", hard_timeout=0.5)
    states = "for f in /proc/[0-9]*/stat; do awk '{print $3}' $f; done 2>/dev/null"
    eventually(lambda: "Z" not in run(sandbox, states).output.split())
    eventually(lambda: "603.5" not in run(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output)


def resident_bytes(server) -> int:
    """The memory of the server and of all its descendants that no other process shares."""
    children: dict[int, list[int]] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    total, queue = 0, [server.process.pid]
    while queue:
        pid = queue.pop()
        queue += children.get(pid, [])
        try:
            rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        lines = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
        total += int(lines["Pss"].split()[0]) * 1024
    return total


def test_an_idle_box_needs_little_memory(own_server):
    server = own_server()
    provisioner = Provisioner(base(server))
    run(Sandbox(base_url=provisioner.create("first").json()["sandbox_url"]), "true")
    before, boxes = resident_bytes(server), 10
    for number in range(boxes):
        url = provisioner.create(f"b{number}").json()["sandbox_url"]
        assert requests.get(f"{url}/v1/sandbox", timeout=60).status_code == 200
    # The original needs 500 MB; the build under test is not optimised.
    assert (resident_bytes(server) - before) / boxes < 8 * 1024 * 1024


def test_a_box_does_not_end_by_idleness(own_server):
    server = own_server(env={"BOXD_RUNTIME_IDLE_TTL_SEC": "1"})
    url = Provisioner(base(server)).create("kept").json()["sandbox_url"]
    endpoint = environment(BOXD_ENDPOINT=f"ws://127.0.0.1:{server.port}/rpc/ws")

    def boxd(*arguments: str) -> str:
        return subprocess.run([BOXD, *arguments], env=endpoint, check=True, capture_output=True, text=True).stdout

    boxd("run", "--name", "other", "true")
    # Another box does end, after the other one was made.
    eventually(lambda: "other" not in boxd("ps"))
    assert run(Sandbox(base_url=url), "echo here").output == "here\n"


def test_an_upload_belongs_to_the_user_of_commands(sandbox):
    sandbox.file.upload_file(file=("x", b"1"), path="/mnt/user-data/uploads/x")
    result = run(sandbox, "echo 2 >> /mnt/user-data/uploads/x && stat -c %U /mnt/user-data/uploads/x")
    assert (result.output, result.exit_code) == ("gem\n", 0)


def test_a_secret_of_a_command_is_not_on_a_command_line_nor_in_a_session(sandbox):
    sandbox.bash.exec(command="true", env={"SECRET": "s3cr3t-value"})
    held = sandbox.bash.exec(command="cat /proc/[0-9]*/cmdline | tr '\\0' ' '", env={"SECRET": "s3cr3t-value"}).data
    assert "s3cr3t-value" not in held.stdout
    assert "s3cr3t-value" not in run(sandbox, "env").output


def test_a_missing_directory_is_an_error_not_an_empty_list(sandbox):
    with pytest.raises(ApiError) as refused:
        sandbox.file.list_path(path="/missing", recursive=True)
    assert refused.value.status_code == 404


def test_a_heredoc_does_not_hang_the_session(sandbox):
    sandbox.shell.create_session(id="h")
    assert run(sandbox, "cat > /tmp/x <<'EOF'\na\nEOF\ncat /tmp/x", id="h").output == "a\n"
    result = run(sandbox, "cat <<'EOF'\nnever ended", id="h")
    assert result.status == "completed"
    assert run(sandbox, "echo usable", id="h").output == "usable\n"


def test_health_is_answered_under_load(sandbox, box_url):
    loops = [f"load{number}" for number in range(4)]
    for loop in loops:
        sandbox.shell.create_session(id=loop)
        run(sandbox, "while :; do :; done", id=loop, async_mode=True)
    for _ in range(10):
        answer = requests.get(f"{box_url}/v1/sandbox", timeout=60)
        assert (answer.status_code, answer.json()["home_dir"]) == (200, "/home/gem"), answer.text
    # The load did not end before the last answer.
    assert [sandbox.shell.view(id=loop).data.status for loop in loops] == ["running"] * 4
    assert run(sandbox, "echo usable").output == "usable\n"
    sandbox.shell.cleanup_all_sessions()
