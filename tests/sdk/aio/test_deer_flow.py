"""The behaviours of deer-flow's `AioSandbox`, without mocks.

`deer_flow_calls.json` has the requests that its unmodified class sent to this server, in order, and the answers that it
accepted. The class itself is on no registry.
"""

import json
import operator
import pathlib
import threading
import uuid

import pytest
from agent_sandbox.core.api_error import ApiError
from conftest import run

CALLS = json.loads((pathlib.Path(__file__).parent / "deer_flow_calls.json").read_text())
WORK = "/mnt/user-data/workspace"
# deer-flow's limits: its client's, and that of silent commands.
SILENCE = 600


def as_data(result):
    """Returns the data of an answer as JSON."""
    data = getattr(result, "data", None)
    return json.loads(data.json()) if data is not None else None


def contains(answer, expected) -> bool:
    """Returns whether an answer has at least the expected members."""
    if isinstance(expected, dict):
        return isinstance(answer, dict) and all(contains(answer.get(name), value) for name, value in expected.items())
    if isinstance(expected, list):
        return len(answer) == len(expected) and all(map(contains, answer, expected))
    return answer == expected


def test_recorded_calls_have_the_recorded_answers(client):
    for entry in CALLS:
        call = operator.attrgetter(entry["call"])(client)
        try:
            result = call(**entry["arguments"])
            result = list(result) if entry["call"] == "file.download_file" else result
            status = 200
        except ApiError as error:
            result, status = None, error.status_code
        assert status == entry["status"], entry
        if "data" in entry:
            assert contains(as_data(result), entry["data"]), (entry, as_data(result))


def test_concurrent_commands_do_not_overlap_in_one_session(sandbox):
    sandbox.shell.create_session(id="scope")
    run(sandbox, "rm -f /tmp/order", id="scope")

    def worker(number):
        run(sandbox, f"echo in{number} >> /tmp/order; sleep 0.05; echo out{number} >> /tmp/order", id="scope")

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = run(sandbox, "cat /tmp/order").output.split()
    assert len(lines) == 6
    assert all(lines[at].replace("in", "out") == lines[at + 1] for at in (0, 2, 4)), lines


def test_a_fresh_session_is_usable_at_once_and_released(client):
    fresh = str(uuid.uuid4())
    with pytest.raises(ApiError) as refused:
        run(client, "echo x", id=fresh, no_change_timeout=SILENCE)
    assert refused.value.status_code == 404
    assert client.shell.create_session(id=fresh).data.session_id == fresh
    assert run(client, "echo recovered", id=fresh, no_change_timeout=SILENCE).output == "recovered\n"
    client.shell.cleanup_session(fresh)
    client.shell.cleanup_session(fresh)
    assert fresh not in client.shell.list_sessions().data.sessions


def test_no_output_looks_like_the_corruption_of_a_session(sandbox):
    outputs = []

    def worker(number):
        outputs.append(run(sandbox, f"echo {number}", no_change_timeout=SILENCE).output)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, outputs)) == list(range(24))
    assert not any("ErrorObservation" in output for output in outputs)


def test_a_directory_is_listed_by_a_command(client):
    for name in ["a", "b/c"]:
        client.file.write_file(file=f"{WORK}/{name}", content="x")
    command = f"find {WORK} -maxdepth 2 -type f -o -type d 2>/dev/null | head -500"
    output = run(client, command, no_change_timeout=SILENCE).output
    assert set(output.strip().split("\n")) == {WORK, f"{WORK}/a", f"{WORK}/b", f"{WORK}/b/c"}


def test_appends_under_a_lock_keep_both_writes(client):
    lock = threading.Lock()
    client.file.write_file(file=f"{WORK}/shared.log", content="seed\n")

    def append(text):
        with lock:
            content = client.file.read_file(file=f"{WORK}/shared.log").data.content
            client.file.write_file(file=f"{WORK}/shared.log", content=content + text)

    threads = [threading.Thread(target=append, args=(text,)) for text in ["A\n", "B\n"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.file.read_file(file=f"{WORK}/shared.log").data.content in {"seed\nA\nB\n", "seed\nB\nA\n"}


def test_downloads_are_whole_and_confined(client):
    for name, content in [("one", "hello"), ("empty", "")]:
        client.file.write_file(file=f"/mnt/user-data/outputs/{name}", content=content)
        assert b"".join(client.file.download_file(path=f"/mnt/user-data/outputs/{name}")) == content.encode()
    for path in ["/mnt/workspace/../../etc/passwd", "../secret", "/a/b/../../../etc/shadow"]:
        with pytest.raises(ApiError) as refused:
            list(client.file.download_file(path=path))
        assert refused.value.status_code == 400


def test_a_closed_client_keeps_the_box_for_another(box_url):
    from agent_sandbox import Sandbox

    first = Sandbox(base_url=box_url)
    assert run(first, "echo 1 > /tmp/x").exit_code == 0
    inner = first._client_wrapper.httpx_client.httpx_client
    inner.close()
    inner.close()
    with pytest.raises(RuntimeError):
        run(first, "true")
    assert run(Sandbox(base_url=box_url), "cat /tmp/x").output == "1\n"
