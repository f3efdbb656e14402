"""The life of sandboxes, through E2B's own SDK."""

import datetime
import inspect
import os
import socket
import subprocess
import time

import httpx
import pytest
from conftest import OTHER, TOKEN, needs
from e2b import Sandbox
from e2b.exceptions import AuthenticationException, NotFoundException, SandboxException, TimeoutException
from program import BOXD
from waiting import eventually


def test_a_sandbox_is_created_used_and_killed(server):
    sandbox = Sandbox.create(timeout=60, metadata={"purpose": "test"}, envs={"GREETING": "hello"})
    assert sandbox.is_running()
    assert sandbox.commands.run("echo $GREETING").stdout == "hello\n"
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"purpose": "test"}
    left = info.end_at - datetime.datetime.now(datetime.timezone.utc)
    assert 0 < left.total_seconds() <= 60
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert not sandbox.is_running()
    with pytest.raises(TimeoutException, match="was not found"):
        sandbox.commands.run("true")
    with pytest.raises(TimeoutException, match="was not found"):
        sandbox.files.read("/etc/hostname")


def test_sandboxes_of_another_caller_do_not_exist(sandbox, server):
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id, api_key=OTHER)
    assert Sandbox.kill(sandbox.sandbox_id, api_key=OTHER) is False
    with pytest.raises(AuthenticationException):
        Sandbox.connect(sandbox.sandbox_id, api_key="e2b_" + "0" * 40)
    # The token of one sandbox does not open another, and a request without one opens none.
    other = Sandbox.create(timeout=60)
    headers = {"E2b-Sandbox-Id": other.sandbox_id}
    url = f"{server.url}/e2b/envd/files?path=/etc/hostname"
    assert httpx.get(url, headers=headers).status_code == 401
    forged = httpx.get(url, headers={**headers, "X-Access-Token": "0" * 32 + "~" + "A" * 44})
    assert forged.status_code == 502
    assert httpx.get(url, headers={**headers, "X-API-KEY": OTHER}).status_code == 502
    other.kill()


def test_a_timeout_ends_the_sandbox(server):
    sandbox = Sandbox.create(timeout=600)
    sandbox.set_timeout(1)
    eventually(lambda: not sandbox.is_running())
    with pytest.raises(NotFoundException):
        sandbox.get_info()


def test_connect_reaches_the_same_sandbox(sandbox):
    sandbox.files.write("here", "x")
    same = Sandbox.connect(sandbox.sandbox_id, timeout=700)
    assert same.sandbox_id == sandbox.sandbox_id
    assert same.files.read("here") == "x"
    left = same.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)
    assert left.total_seconds() > 600


def paused(sandbox) -> None:
    pause = getattr(sandbox, "pause", None) or sandbox.beta_pause
    pause()


def test_a_paused_sandbox_keeps_files_and_processes(sandbox):
    handle = sandbox.commands.run("read line; echo got $line", background=True, **stdin_option())
    sandbox.files.write("kept", "1")
    paused(sandbox)
    assert not sandbox.is_running()
    with pytest.raises(TimeoutException, match="was not found"):
        sandbox.commands.run("true")
    states = [item.state.value for item in Sandbox.list().next_items() if item.sandbox_id == sandbox.sandbox_id]
    assert states == ["paused"]
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.is_running() and again.files.read("kept") == "1"
    again.commands.send_stdin(handle.pid, "word\n")
    assert handle.wait().stdout == "got word\n"


def test_a_paused_sandbox_has_no_timeout(sandbox, server):
    paused(sandbox)
    api = httpx.Client(base_url=os.environ["E2B_API_URL"], headers={"X-API-Key": TOKEN})
    for call, body in [("timeout", {"timeout": 1}), ("refreshes", {"duration": 1})]:
        refused = api.post(f"/sandboxes/{sandbox.sandbox_id}/{call}", json=body)
        assert refused.status_code == 404, refused.text
    assert described(sandbox)["endAt"].startswith("9999")
    assert Sandbox.connect(sandbox.sandbox_id, timeout=60).is_running()
    assert not described(sandbox)["endAt"].startswith("9999")


def test_a_client_that_leaves_during_a_pause_loses_no_sandbox(sandbox, server):
    sandbox.files.write("kept", "1")
    body = b'{"memory": false}'
    head = (
        f"POST /e2b/api/sandboxes/{sandbox.sandbox_id}/pause HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"X-API-Key: {TOKEN}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + body)
        # The box counts as paused while its processes end.
        eventually(lambda: described(sandbox)["state"] == "paused")
    assert described(sandbox)["endAt"].startswith("9999")
    assert Sandbox.connect(sandbox.sandbox_id).files.read("kept") == "1"


def stdin_option() -> dict:
    """Returns the option that opens stdin; old versions always open it."""
    from e2b.sandbox_sync.commands.command import Commands

    return {"stdin": True} if "stdin" in inspect.signature(Commands._start).parameters else {}


def test_lists_have_filters_and_pages(server):
    mark = f"m {os.getpid()} & {time.time()}"
    made = [Sandbox.create(timeout=120, metadata={"mark": mark, "n": str(n)}) for n in range(3)]
    try:
        from e2b import SandboxQuery

        pages, paginator = [], Sandbox.list(query=SandboxQuery(metadata={"mark": mark}), limit=2)
        while paginator.has_next:
            pages.append([item.sandbox_id for item in paginator.next_items()])
        assert [len(page) for page in pages] == [2, 1]
        assert sum(pages, []) == [sandbox.sandbox_id for sandbox in reversed(made)]
        one = Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "n": "1"})).next_items()
        assert [item.sandbox_id for item in one] == [made[1].sandbox_id]
    finally:
        for sandbox in made:
            sandbox.kill()


def test_an_unknown_template_is_named(server):
    with pytest.raises(SandboxException, match="no-such-template"):
        Sandbox.create("no-such-template")


def test_unsupported_features_are_refused_with_a_reason(server):
    headers = {"X-API-KEY": TOKEN}
    api = f"{server.url}/e2b/api"
    for body, status, word in [
        ({"templateID": "base", "network": {"egressProxy": {"address": "a:1"}}}, 501, "egressProxy"),
        ({"templateID": "base", "iam": {"tokens": {"a": {}}}}, 501, "iam"),
        ({"templateID": "base", "network": {"denyOut": ["example.com"]}}, 400, "denyOut"),
        ({"templateID": 7}, 400, "templateID"),
        ({"templateID": "base", "metadata": {"a": 1}}, 400, "metadata"),
    ]:
        answer = httpx.post(f"{api}/v2/sandboxes", headers=headers, json=body)
        assert answer.status_code == status, answer.text
        assert word in answer.json()["message"] and answer.json()["code"] == status
        if status == 501:
            assert answer.headers["Should-Retry"] == "false"
    assert httpx.get(f"{api}/secrets", headers=headers).status_code == 501
    assert httpx.get(f"{api}/teams", headers=headers).status_code == 501
    assert httpx.get(f"{api}/v2/sandboxes").status_code == 401


def test_a_repeated_create_makes_one_sandbox(server):
    headers = {"X-API-KEY": TOKEN, "Idempotency-Key": f"key-{os.getpid()}-{time.time()}"}
    body = {"templateID": "base", "timeout": 60}
    url = f"{server.url}/e2b/api/v2/sandboxes"
    first, second = (httpx.post(url, headers=headers, json=body).json() for _ in range(2))
    assert first["sandboxID"] == second["sandboxID"]
    assert first["envdAccessToken"] == second["envdAccessToken"]
    assert Sandbox.kill(first["sandboxID"])


def test_metrics_have_a_sample(sandbox):
    sandbox.commands.run("true")
    (sample, *_) = sandbox.get_metrics()
    assert sample.mem_total > 0 and 0 < sample.mem_used <= sample.mem_total
    assert sample.cpu_count >= 1
    headers = {"X-API-Key": TOKEN}
    address = f"{os.environ['E2B_API_URL']}/sandboxes/{sandbox.sandbox_id}/metrics?end={2**64 - 1}"
    assert len(httpx.get(address, headers=headers).json()) == 1


def test_the_rest_of_the_cloud_is_refused(server):
    api = httpx.Client(base_url=f"{server.url}/e2b/api", headers={"X-API-Key": TOKEN})
    for path in ["/billing/x", "/api-keys", "/nodes", "/templates/x/tags/exists", "/secrets", "/teams"]:
        refused = api.get(path)
        assert (refused.status_code, refused.json()["code"]) == (501, 501), path
    missing = api.get("/missing/path")
    assert (missing.status_code, missing.json()["code"]) == (404, 404)
    assert httpx.get(f"{server.url}/e2b/api/missing").status_code == 401
    assert api.get("/v2/templates").status_code == 200


@needs("Volume")
def test_a_volume_outlives_its_sandboxes(server):
    from e2b import Volume

    volume = Volume.create(f"data-{os.getpid()}")
    assert volume.volume_id in [item.volume_id for item in Volume.list()]
    for command, expected in [("echo kept > /data/f", ""), ("cat /data/f", "kept\n")]:
        sandbox = Sandbox.create(timeout=60, volume_mounts={"/data": volume})
        assert sandbox.commands.run(command).stdout == expected
        sandbox.kill()
    eventually(lambda: destroyed(volume))


def destroyed(volume) -> bool:
    try:
        return type(volume).destroy(volume.volume_id)
    except SandboxException:
        return False


@needs("Sandbox.create(lifecycle)")
def test_a_paused_sandbox_wakes_by_a_call(server):
    sandbox = Sandbox.create(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
    try:
        sandbox.set_timeout(1)
        state = lambda: sandbox.get_info().state.value
        eventually(lambda: state() == "paused")
        assert sandbox.commands.run("echo awake").stdout == "awake\n"
        assert state() == "running"
    finally:
        sandbox.kill()


@needs("Sandbox.create_snapshot")
def test_a_snapshot_is_a_template(sandbox):
    sandbox.files.write("note.txt", "from the snapshot")
    snapshot = sandbox.create_snapshot()
    listed, paginator = [], Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id)
    while paginator.has_next:
        listed += [item.snapshot_id for item in paginator.next_items()]
    assert listed == [snapshot.snapshot_id]
    copy = Sandbox.create(snapshot.snapshot_id, timeout=60)
    assert copy.files.read("note.txt") == "from the snapshot"
    copy.kill()
    eventually(lambda: deleted(snapshot.snapshot_id))
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False


def deleted(snapshot: str) -> bool:
    try:
        return Sandbox.delete_snapshot(snapshot)
    except SandboxException:
        return False


@needs("Sandbox.fork")
def test_forks_have_the_files_of_their_sandbox(sandbox):
    sandbox.files.write("f", "x")
    for forked in sandbox.fork(count=2):
        assert forked.files.read("f") == "x"
        assert forked.sandbox_id != sandbox.sandbox_id
        forked.files.write("f", "y")
        forked.kill()
    assert sandbox.files.read("f") == "x"
    # A fork of a fork has a host name, too.
    forks = [sandbox]
    for _ in range(3):
        forks += forks[-1].fork()
    labels = [fork.get_host(49983).split(".")[0] for fork in forks]
    assert max(map(len, labels)) <= 63, labels
    for fork in forks[1:]:
        fork.kill()


def described(sandbox) -> dict:
    """Returns what the API says of a sandbox; the classes of old SDKs leave out a part."""
    address = f"{os.environ['E2B_API_URL']}/sandboxes/{sandbox.sandbox_id}"
    return httpx.get(address, headers={"X-API-Key": TOKEN}).raise_for_status().json()


def test_network_rules_are_those_of_create(server):
    rules = {"allow_out": ["example.com"], "deny_out": ["0.0.0.0/0"]}
    for options, internet, network in [
        ({"allow_internet_access": False}, False, {}),
        ({"network": rules}, True, {"allowOut": ["example.com"], "denyOut": ["0.0.0.0/0"]}),
    ]:
        sandbox = Sandbox.create(timeout=60, **options)
        try:
            found = described(sandbox)
            assert found["allowInternetAccess"] is internet
            assert {name: found["network"][name] for name in network} == network
        finally:
            sandbox.kill()


@needs("Sandbox.update_network")
def test_network_rules_change_while_the_sandbox_runs(server):
    sandbox = Sandbox.create(timeout=60, allow_internet_access=False)
    try:
        assert sandbox.get_info().allow_internet_access is False
        sandbox.update_network({"allow_out": ["example.com"], "deny_out": ["0.0.0.0/0"]})
        assert sandbox.get_info().network["allow_out"] == ["example.com"]
    finally:
        sandbox.kill()


def test_a_sandbox_survives_the_server(own_server):
    server = own_server(env={"BOXD_SERVER_KEEP_BOXES": "true"})
    os.environ.update(server.variables())
    sandbox = Sandbox.create(timeout=600)
    sandbox.files.write("kept", "1")
    handle = sandbox.commands.run("sleep 1000", background=True)
    server.kill()
    server.start()
    same = Sandbox.connect(sandbox.sandbox_id)
    # The tokens of the sandbox stay valid, too.
    assert sandbox.files.read("kept") == "1" and same.files.read("kept") == "1"
    assert [process.pid for process in sandbox.commands.list()] == [handle.pid]
    assert sandbox.commands.kill(handle.pid)
    same.kill()


def test_a_key_that_boxd_makes(own_server):
    line = subprocess.run([BOXD, "token", "new", "carol", "--e2b"], capture_output=True, text=True, check=True).stdout
    name, token = line.split()
    assert name == "carol" and token.startswith("e2b_") and len(token) == 44
    server = own_server(env={"BOXD_TOKENS": line})
    os.environ.update(server.variables(token))
    sandbox = Sandbox.create(timeout=60)
    assert sandbox.commands.run("echo hi").stdout == "hi\n"
    sandbox.kill()
