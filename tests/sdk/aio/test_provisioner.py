"""deer-flow's provisioner, the URLs of its boxes, tokens, and the default box."""

import concurrent.futures
import json
import pathlib
import subprocess
import uuid

import pytest
import requests
from agent_sandbox import Sandbox
from agent_sandbox.core.api_error import ApiError
from conftest import Provisioner, base, run
from program import BOXD, Program, environment
from waiting import eventually

TOKEN = "a-token-of-the-server-0123456789abcdef"
OTHER = "another-token-of-this-server-0123456789ab"

# The request that deer-flow's unmodified provider sent for a thread.
CREATE = pathlib.Path(__file__).parent / "deer_flow_create.json"


class MountingProgram(Program):
    """A server that lets its callers mount directories below its own one."""

    def options(self) -> list[str]:
        return [*super().options(), "--allow-mount", str(self.directory)]


def test_a_box_is_created_once_found_listed_and_deleted(provisioner):
    sandbox = uuid.uuid4().hex[:16]
    assert provisioner.get(sandbox).status_code == 404
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda _: provisioner.create(sandbox), range(8)))
    assert {answer.status_code for answer in created} == {200}
    assert len({answer.text for answer in created}) == 1
    info = created[0].json()
    assert (info["sandbox_id"], info["status"]) == (sandbox, "Running")
    assert requests.get(f"{info['sandbox_url']}/v1/sandbox", timeout=60).status_code == 200
    assert provisioner.get(sandbox).json() == info
    listed = provisioner.list().json()
    assert listed["count"] == len(listed["sandboxes"]) and info in listed["sandboxes"]
    assert provisioner.delete(sandbox).ok and provisioner.delete(sandbox).ok
    assert provisioner.get(sandbox).status_code == 404
    assert all(provisioner.delete(invalid).ok for invalid in ["a b", "x" * 300])
    assert requests.get(f"{info['sandbox_url']}/v1/sandbox", timeout=60).status_code in (401, 404)
    capabilities = requests.get(provisioner.url.replace("sandboxes", "capabilities"), timeout=60).json()
    assert capabilities == {"lark_cli_init_image": False, "lark_cli_broker_image": False}


def test_the_directories_of_deer_flow_exist_and_are_writable(sandbox):
    for name in ["workspace", "uploads", "outputs"]:
        assert run(sandbox, f"touch /mnt/user-data/{name}/x").exit_code == 0


def test_a_url_opens_one_box_only(own_server):
    server = own_server(env={"BOXD_TOKENS": f"deer {TOKEN}"})
    provisioner = Provisioner(base(server), TOKEN)
    assert Provisioner(base(server)).create("x").status_code == 401
    assert Provisioner(base(server), "wrong").create("x").status_code == 401
    one, other = (provisioner.create(name).json()["sandbox_url"] for name in ["one", "other"])
    # The clients have no token.
    assert run(Sandbox(base_url=one), "echo 1 > /tmp/x; echo ok").output == "ok\n"
    assert run(Sandbox(base_url=other), "cat /tmp/x").exit_code == 1
    host, path = one.split("/boxes/")
    box, signature = path.split("/")[0].split("~")
    stolen = other.split("~")[1].split("/")[0]
    for wrong in [f"{host}/boxes/{box}/aio", f"{host}/boxes/{box}~{stolen}/aio", host]:
        with pytest.raises(ApiError) as refused:
            run(Sandbox(base_url=wrong), "true")
        assert refused.value.status_code == 401, wrong
    # The signature is of this part of the box.
    assert requests.get(f"{host}/boxes/{box}~{signature}/port/80", timeout=60).status_code == 401
    assert run(Sandbox(base_url=host, headers={"X-AIO-API-Key": TOKEN}), "echo default").output == "default\n"


def test_a_plain_base_url_serves_one_default_box(own_server):
    server = own_server()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        clients = [Sandbox(base_url=base(server), timeout=300) for _ in range(8)]
        names = list(pool.map(lambda client: client.sandbox.get_context().home_dir, clients))
    assert set(names) == {"/home/gem"}
    clients[0].file.write_file(file="/home/gem/x", content="shared")
    assert clients[1].file.read_file(file="/home/gem/x").data.content == "shared"
    assert Provisioner(base(server)).list().json()["count"] == 0


def test_boxes_sessions_and_files_survive_a_killed_server(own_server):
    server = own_server()
    url = Provisioner(base(server)).create("kept").json()["sandbox_url"]
    client = Sandbox(base_url=url, timeout=300)
    client.shell.create_session(id="s")
    run(client, "export A=kept; cd /tmp; echo x > file", id="s")
    run(client, "sleep 2; echo late > /tmp/late", id="s", async_mode=True)
    server.kill()
    server.start()
    eventually(lambda: run(client, "cat /tmp/late 2>/dev/null", id="s").output == "late\n")
    assert run(client, "echo $A; pwd; cat file", id="s").output == "kept\n/tmp\nx\n"


def test_mounts_need_the_permission_of_the_operator(provisioner, tmp_path):
    mount = {"host_path": str(tmp_path), "container_path": "/mnt/skills/custom", "read_only": True}
    refused = provisioner.create(uuid.uuid4().hex[:16], extra_mounts=[mount])
    assert refused.status_code in (400, 403) and str(tmp_path) not in refused.json()["message"]


def test_the_recorded_request_of_deer_flow_makes_a_box_with_its_six_mounts(tmp_path):
    request = json.loads(CREATE.read_text().replace("DEER_FLOW_HOME", str(tmp_path / "home")))
    mounts = request["extra_mounts"]
    assert len(mounts) == 6
    for mount in mounts:
        host = pathlib.Path(mount["host_path"])
        host.mkdir(parents=True)
        (host / "from-deer-flow").write_text(mount["container_path"])
    with MountingProgram(tmp_path).running() as server:
        created = requests.post(f"{base(server)}/api/sandboxes", json=request, timeout=120)
        assert created.status_code == 200, created.text
        assert (created.json()["sandbox_id"], created.json()["status"]) == (request["sandbox_id"], "Running")
        client = Sandbox(base_url=created.json()["sandbox_url"], timeout=300)
        for mount in mounts:
            inside = mount["container_path"]
            assert client.file.read_file(file=f"{inside}/from-deer-flow").data.content == inside
            written = run(client, f"echo $(id -un) > {inside}/from-the-box")
            host = pathlib.Path(mount["host_path"]) / "from-the-box"
            if mount["read_only"]:
                assert written.exit_code != 0 and not host.exists(), inside
            else:
                assert written.exit_code == 0 and host.read_text() == "gem\n", inside
                assert host.stat().st_uid == host.parent.stat().st_uid
        for name in ["workspace", "uploads", "outputs"]:
            assert run(client, f"touch /mnt/user-data/{name}/x").exit_code == 0
        # A second request finds the box.
        again = requests.post(f"{base(server)}/api/sandboxes", json=request, timeout=120)
        assert again.json() == created.json()


def test_a_sandbox_named_default_is_not_the_default_box(own_server):
    server = own_server()
    provisioner, default = Provisioner(base(server)), Sandbox(base_url=base(server), timeout=300)
    default.file.write_file(file="/home/gem/x", content="kept")
    assert provisioner.get("default").status_code == 404
    created = provisioner.create("default").json()
    assert created["sandbox_id"] == "default"
    assert run(Sandbox(base_url=created["sandbox_url"]), "cat /home/gem/x").exit_code == 1
    assert provisioner.delete("default").ok
    assert default.file.read_file(file="/home/gem/x").data.content == "kept"


def boxd(server: Program, *arguments: str) -> str:
    """Runs the program as an operator of the server."""
    env = environment(BOXD_ENDPOINT=f"ws://127.0.0.1:{server.port}/rpc/ws")
    ran = subprocess.run([BOXD, *arguments], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (arguments, ran.stderr)
    return ran.stdout


@pytest.mark.parametrize("kind", ["provisioned", "default"])
def test_any_call_starts_a_box_that_was_paused_or_stopped(own_server, kind):
    server = own_server()
    if kind == "default":
        url, box = base(server), "aio"
    else:
        url, box = Provisioner(base(server)).create("w").json()["sandbox_url"], "aio-w"
    client = Sandbox(base_url=url, timeout=300)
    client.shell.create_session(id="s")
    run(client, "x=kept; echo file > /home/gem/file", id="s")
    for call in [
        lambda: run(client, "echo $x", id="s").output == "kept\n",
        lambda: client.shell.view(id="s").data.output == "kept\n",
        lambda: client.shell.get_session_stats().data.total_sessions == 1,
        lambda: "s" in client.shell.list_sessions().data.sessions,
        lambda: client.bash.sessions().data == [],
        lambda: client.code.get_info().data.languages,
        lambda: client.file.watch_list()["count"] == 0,
        lambda: client.sandbox.get_context().home_dir == "/home/gem",
    ]:
        boxd(server, "pause", box)
        assert call()
    boxd(server, "stop", box)
    # Sessions end with the processes of the box.
    with pytest.raises(ApiError) as refused:
        run(client, "true", id="s")
    assert refused.value.status_code == 404
    assert run(client, "cat /home/gem/file").output == "file\n"


def test_two_tokens_have_boxes_and_limits_of_their_own(own_server):
    tokens = f"one {TOKEN}\nother {OTHER}"
    server = own_server(env={"BOXD_TOKENS": tokens, "BOXD_RUNTIME_MAX_BOXES_PER_TOKEN": "2"})
    one, other = Provisioner(base(server), TOKEN), Provisioner(base(server), OTHER)
    urls = [provisioner.create("same").json()["sandbox_url"] for provisioner in (one, other)]
    run(Sandbox(base_url=urls[0]), "echo 1 > /tmp/x")
    assert run(Sandbox(base_url=urls[1]), "cat /tmp/x").exit_code == 1
    assert one.create("second").ok
    full = one.create("third")
    assert full.status_code == 507 and "2" in full.json()["message"], full.text
    # The limit of one caller is not that of the other.
    assert other.create("second").ok
    assert one.list().json()["count"] == 2 and other.get("third").status_code == 404


def test_a_member_may_be_null(provisioner):
    sandbox = uuid.uuid4().hex[:16]
    created = provisioner.create(sandbox, extra_mounts=None, thread_id=None, user_id=None)
    assert created.status_code == 200
    body = {"id": "s", "input": "x", "press_enter": None}
    answer = requests.post(f"{created.json()['sandbox_url']}/v1/shell/write", json=body, timeout=60)
    assert (answer.status_code, answer.json()["message"]) == (404, "Session not found")
    provisioner.delete(sandbox)


def test_malformed_requests_are_refused(provisioner):
    assert requests.post(provisioner.url, json={}, timeout=60).status_code == 422
    assert provisioner.create("a/b").status_code == 422
    assert requests.put(provisioner.url, json={}, timeout=60).status_code == 405
