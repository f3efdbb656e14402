"""Sandboxes from create to kill: every method of the SDK's `Sandbox` and `SandboxManager`."""

from __future__ import annotations

import json
import subprocess
import uuid
from datetime import datetime, timedelta, timezone

import httpx
import pytest
from conftest import ANN, BOB, HOST, created, managed, sandboxes, seconds
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.sandboxes import (
    Host,
    PVC,
    PlatformSpec,
    SandboxFilter,
    SandboxImageSpec,
    SandboxLifecycle,
    SnapshotFilter,
    Volume,
)
from opensandbox.models.templates import CreateTemplateRequest, TemplateFilter
from opensandbox.sync.sandbox import SandboxSync
from program import BOXD, environment
from waiting import eventually


def status_of(error) -> int:
    return error.value.status_code


def test_a_sandbox_is_ready_when_create_returns(config):
    with created(config, metadata={"team": "a b&c=d"}, resource={"cpu": "500m", "memory": "256Mi"}) as sandbox:
        assert sandbox.is_healthy()
        info = sandbox.get_info()
        assert info.id == sandbox.id
        assert info.status.state == "Running" and info.status.last_transition_at is not None
        assert info.entrypoint == ["tail", "-f", "/dev/null"]
        assert info.metadata == {"team": "a b&c=d"}
        assert info.image == SandboxImageSpec(HOST)
        assert timedelta(minutes=9) < info.expires_at - info.created_at <= timedelta(minutes=10)
        metrics = sandbox.get_metrics()
        assert metrics.cpu_count == 0.5 and metrics.memory_total_in_mib == 256
        sandbox.check_ready(seconds(10), seconds(0.1))


def test_a_sandbox_without_timeout_does_not_expire(config):
    with created(config, timeout=None) as sandbox:
        assert sandbox.get_info().expires_at is None


def test_a_sandbox_does_not_end_by_idleness(own_server):
    server = own_server(env={"BOXD_RUNTIME_IDLE_TTL_SEC": "1"})
    there = environment(BOXD_ENDPOINT=f"ws://{server.domain}/rpc/ws", BOXD_TOKEN=ANN)

    def boxd(*arguments: str) -> str:
        return subprocess.run([BOXD, *arguments], env=there, check=True, capture_output=True, text=True).stdout

    with created(server.config(), timeout=None) as one, created(server.config(), timeout=timedelta(minutes=10)) as two:
        boxd("run", "--name", "other", "true")
        # A box that was made later does end.
        eventually(lambda: "other" not in boxd("ps"))
        for sandbox in (one, two):
            assert sandbox.get_info().status.state == "Running"
            assert sandbox.commands.run("echo here").logs.stdout[0].text == "here"


def test_a_sandbox_has_the_files_of_its_image(own_server, image):
    server = own_server(env={"BOXD_IMAGES_ALLOW_PULL": "*"})
    with created(server.config(), image=image, entrypoint=["sleep", "1000"]) as sandbox:
        assert sandbox.get_info().image == SandboxImageSpec(image)
        assert sandbox.files.read_file("/etc/of-the-image") == "of the image\n"
        run = sandbox.commands.run("echo more >> /etc/of-the-image; cat /etc/of-the-image; echo $PATH; command -v python3 || echo none")
        assert [line.text for line in run.logs.stdout] == ["of the image", "more", "/usr/bin:/bin", "none"]
    # What one sandbox wrote is not in the image.
    with created(server.config(), image=image, entrypoint=["sleep", "1000"]) as sandbox:
        assert sandbox.files.read_file("/etc/of-the-image") == "of the image\n"
    missing = image.replace("small", "missing")
    with pytest.raises(SandboxApiException) as error:
        SandboxSync.create(missing, connection_config=server.config())
    assert "missing" in str(error.value)


def test_metrics_are_sent_each_second(server):
    with created(server.config()) as sandbox, server.execd(sandbox.id) as execd:
        with execd.stream("GET", "/metrics/watch") as stream:
            assert stream.status_code == 200 and stream.headers["Content-Type"].startswith("text/event-stream")
            lines = stream.iter_lines()
            seen = [json.loads(next(lines)) for _ in range(3)]
        now = sandbox.get_metrics()
    assert set(seen[0]) == {"cpu_count", "cpu_used_pct", "mem_total_mib", "mem_used_mib", "timestamp"}
    assert all(0 < sample["mem_used_mib"] <= sample["mem_total_mib"] for sample in seen)
    times = [sample["timestamp"] for sample in seen]
    assert times == sorted(set(times)) and times[2] - times[0] >= 1000
    assert now.timestamp >= times[2]


def test_an_expired_sandbox_is_gone(config):
    with created(config, timeout=seconds(2)) as sandbox:

        def gone():
            try:
                return not sandbox.get_info()
            except SandboxApiException as error:
                return error.status_code == 404

        eventually(gone)
        with pytest.raises(SandboxApiException):
            sandbox.commands.run("true")


def test_renew_sets_the_expiry(config):
    with created(config, timeout=seconds(5)) as sandbox:
        renewed = sandbox.renew(timedelta(hours=2))
        left = renewed.expires_at - datetime.now(timezone.utc)
        assert timedelta(minutes=110) < left <= timedelta(hours=2)
        assert sandbox.get_info().expires_at == renewed.expires_at
        shortened = sandbox.renew(timedelta(minutes=1))
        assert shortened.expires_at < renewed.expires_at


def test_renew_accepts_offsets_and_refuses_the_past(server, sandbox):
    with server.api() as api:
        path = f"/sandboxes/{sandbox.id}/renew-expiration"
        later = datetime.now(timezone(timedelta(hours=8))) + timedelta(minutes=30)
        answer = api.post(path, json={"expiresAt": later.isoformat()})
        assert answer.status_code == 200
        expires = datetime.fromisoformat(answer.json()["expiresAt"])
        assert abs(expires - later) < timedelta(seconds=1)
        for wrong in ["2020-01-01T00:00:00Z", "tomorrow", "2099-01-01T00:00:00"]:
            assert api.post(path, json={"expiresAt": wrong}).status_code == 400


def test_kill_ends_a_sandbox(config):
    with created(config) as sandbox:
        sandbox.kill()
        with pytest.raises(SandboxApiException) as error:
            sandbox.get_info()
        assert status_of(error) == 404 and error.value.error.code == "DOCKER::SANDBOX_NOT_FOUND"
        with pytest.raises(SandboxApiException) as error:
            sandbox.kill()
        assert status_of(error) == 404
        assert not sandbox.is_healthy()


def test_destroy_kills_and_closes(config):
    sandbox = sandboxes(config).create(HOST, connection_config=config)
    sandbox.destroy()
    manager = managed(config)
    with pytest.raises(SandboxApiException):
        manager.get_sandbox_info(sandbox.id)


def test_connect_finds_a_running_sandbox(config):
    with created(config) as sandbox:
        sandbox.files.write_file("/tmp/kept", "1")
        other = sandboxes(config).connect(sandbox.id, connection_config=config)
        assert other.files.read_file("/tmp/kept") == "1"


def test_pause_freezes_and_resume_continues(config):
    with created(config) as sandbox:
        execution = sandbox.commands.run("sleep 1; echo late", opts=RunCommandOpts(background=True))
        sandbox.pause()
        assert sandbox.get_info().status.state == "Paused"
        assert not sandbox.is_healthy()
        with pytest.raises(SandboxApiException) as error:
            sandbox.pause()
        assert status_of(error) == 409 and error.value.error.code == "DOCKER::SANDBOX_NOT_RUNNING"
        resumed = sandboxes(config).resume(sandbox.id, connection_config=config)
        assert resumed.get_info().status.state == "Running"
        eventually(lambda: "late" in resumed.commands.get_background_command_logs(execution.id).content)
        manager = managed(config)
        with pytest.raises(SandboxApiException) as error:
            manager.resume_sandbox(sandbox.id)
        assert status_of(error) == 409
        manager.pause_sandbox(sandbox.id)
        manager.resume_sandbox(sandbox.id)


def test_metadata_is_merged(config):
    with created(config, metadata={"a": "1", "b": "2"}) as sandbox:
        info = sandbox.patch_metadata({"a": None, "b": "3", "c": "4"})
        assert info.metadata == {"b": "3", "c": "4"}
        manager = managed(config)
        assert manager.patch_sandbox_metadata(sandbox.id, {"c": None}).metadata == {"b": "3"}


def test_lists_are_filtered_and_paged_newest_first(config):
    manager = managed(config)
    mark = uuid.uuid4().hex
    with created(config, metadata={"m": mark}) as one, created(config, metadata={"m": mark, "x": "é&=%"}) as two:
        both = manager.list_sandbox_infos(SandboxFilter(metadata={"m": mark}))
        assert [info.id for info in both.sandbox_infos] == [two.id, one.id]
        page = both.pagination
        assert (page.page, page.page_size, page.total_items, page.total_pages) == (1, 20, 2, 1)
        assert not page.has_next_page
        first = manager.list_sandbox_infos(SandboxFilter(metadata={"m": mark}, page=1, page_size=1))
        assert [info.id for info in first.sandbox_infos] == [two.id] and first.pagination.has_next_page
        second = manager.list_sandbox_infos(SandboxFilter(metadata={"m": mark}, page=2, page_size=1))
        assert [info.id for info in second.sandbox_infos] == [one.id]
        odd = manager.list_sandbox_infos(SandboxFilter(metadata={"m": mark, "x": "é&=%"}))
        assert [info.id for info in odd.sandbox_infos] == [two.id]
        one.pause()
        paused = manager.list_sandbox_infos(SandboxFilter(metadata={"m": mark}, states=["Paused"]))
        assert [info.id for info in paused.sandbox_infos] == [one.id]
        either = manager.list_sandbox_infos(SandboxFilter(metadata={"m": mark}, states=["Paused", "Running"]))
        assert len(either.sandbox_infos) == 2
        manager.kill_sandbox(one.id)
        manager.renew_sandbox(two.id, timedelta(minutes=20))
        assert manager.get_sandbox_info(two.id).id == two.id


def test_a_page_has_at_most_200_items(server):
    with server.api() as api:
        for query in ["page=0", "pageSize=0", "pageSize=201", "page=x", "pageSize=-1"]:
            answer = api.get(f"/sandboxes?{query}")
            assert answer.status_code == 400, query
            assert answer.json()["code"] == "SANDBOX::INVALID_PARAMETER"
        assert api.get("/sandboxes?pageSize=200").status_code == 200


def test_the_entrypoint_runs_and_its_log_is_a_diagnosis(config):
    command = ["bash", "-c", "echo from the entrypoint; sleep 1000"]
    with created(config, entrypoint=command) as sandbox:
        assert sandbox.get_info().entrypoint == command
        eventually(lambda: "from the entrypoint" in sandbox.get_diagnostic_logs("container").content)
        events = sandbox.get_diagnostic_events("lifecycle")
        assert events.kind == "events" and "started" in events.content
        manager = managed(config)
        assert manager.get_diagnostic_logs(sandbox.id, scope="container").truncated is False
        assert manager.get_diagnostic_events(sandbox.id, scope="container").content


def test_a_prepare_command_runs_first(config):
    hook = SandboxLifecycle.model_validate({"preStart": {"command": ["sh", "-c", "echo ready > /tmp/prepared"]}})
    with created(config, lifecycle=hook) as sandbox:
        assert sandbox.files.read_file("/tmp/prepared") == "ready\n"
    failing = SandboxLifecycle.model_validate({"preStart": {"command": ["sh", "-c", "echo why; exit 3"]}})
    with pytest.raises(SandboxApiException):
        sandboxes(config).create(HOST, connection_config=config, lifecycle=failing)


def test_host_directories_are_mounted_below_allowed_roots(config, mounts):
    (mounts / "shared" / "sub").mkdir(parents=True, exist_ok=True)
    (mounts / "shared" / "sub" / "marker").write_text("from the host")
    shared = str(mounts / "shared")
    volumes = [
        Volume(name="all", mount_path="/mnt/all", host=Host(path=shared)),
        Volume(name="sub", mount_path="/mnt/sub", host=Host(path=shared), sub_path="sub", read_only=True),
    ]
    with created(config, volumes=volumes) as sandbox:
        assert sandbox.files.read_file("/mnt/sub/marker") == "from the host"
        assert sandbox.commands.run("echo x > /mnt/sub/no").exit_code != 0
        assert sandbox.commands.run("echo y > /mnt/all/yes").exit_code == 0
    assert (mounts / "shared" / "yes").read_text() == "y\n"
    outside = [Volume(name="etc", mount_path="/mnt/etc", host=Host(path="/etc"))]
    with pytest.raises(SandboxApiException) as error:
        sandboxes(config).create(HOST, connection_config=config, volumes=outside)
    assert status_of(error) == 400


def test_named_volumes_outlive_sandboxes(config):
    name = f"claim-{uuid.uuid4().hex}"
    volume = Volume(name="data", mount_path="/mnt/data", pvc=PVC(claim_name=name))
    with created(config, volumes=[volume]) as sandbox:
        sandbox.files.write_file("/mnt/data/kept/file", "1")
    below = Volume(name="data", mount_path="/mnt/data", pvc=PVC(claim_name=name), sub_path="kept", read_only=True)
    with created(config, volumes=[below]) as sandbox:
        assert sandbox.files.read_file("/mnt/data/file") == "1"
        assert sandbox.commands.run("touch /mnt/data/no").exit_code != 0
    missing = PVC(claim_name=f"{name}-none", create_if_not_exists=False)
    with pytest.raises(SandboxApiException) as error:
        sandboxes(config).create(HOST, connection_config=config, volumes=[Volume(name="d", mount_path="/d", pvc=missing)])
    assert status_of(error) == 404 and "VOLUME::PVC_NOT_FOUND" in str(error.value)


def test_a_refused_sandbox_leaves_no_new_volume(server):
    def volume(name, **options):
        return {"name": name, "mountPath": f"/mnt/{name}", "pvc": {"claimName": name, **options}}

    first, second, kept = (f"{name}-{uuid.uuid4().hex}" for name in ("first", "second", "kept"))
    with server.api() as api:

        def exists(name):
            body = {"image": {"uri": HOST}, "volumes": [volume(name, createIfNotExists=False)]}
            answer = api.post("/sandboxes", json=body)
            if answer.status_code == 202:
                api.delete(f"/sandboxes/{answer.json()['id']}")
            return answer.status_code == 202

        made = api.post("/sandboxes", json={"image": {"uri": HOST}, "volumes": [volume(kept)]})
        assert made.status_code == 202
        api.delete(f"/sandboxes/{made.json()['id']}")
        for refused in [
            {"volumes": [volume(kept), volume(first), {**volume(second), "subPath": "../x"}]},
            {"volumes": [volume(kept), volume(first), volume(second, createIfNotExists=False)]},
            {"volumes": [volume(kept), volume(first)], "metadata": {"a": "b" * 100_000}},
            {"volumes": [volume(kept), volume(first)], "lifecycle": {"preStart": {"command": ["false"]}}},
        ]:
            assert api.post("/sandboxes", json={"image": {"uri": HOST}, **refused}).status_code >= 400, refused
            assert not exists(first) and not exists(second), refused
        assert exists(kept)


def test_snapshots_are_sources_of_sandboxes(config):
    manager = managed(config)
    with created(config) as sandbox:
        sandbox.files.write_file("/tmp/work/file", "before")
        snapshot = sandbox.create_snapshot("first")
        assert snapshot.sandbox_id == sandbox.id and snapshot.name == "first"
        sandbox.files.write_file("/tmp/work/file", "after")
        assert eventually(lambda: manager.get_snapshot(snapshot.id).status.state == "Ready")
        second = manager.create_snapshot(sandbox.id)
        listed = manager.list_snapshots(SnapshotFilter(sandbox_id=sandbox.id))
        assert [info.id for info in listed.snapshot_infos] == [second.id, snapshot.id]
        ready = manager.list_snapshots(SnapshotFilter(sandbox_id=sandbox.id, states=["Failed"]))
        assert ready.snapshot_infos == []
    with created(config, image=None, snapshot_id=snapshot.id) as copy:
        assert copy.files.read_file("/tmp/work/file") == "before"
        assert copy.get_info().snapshot_id == snapshot.id
        with pytest.raises(SandboxApiException) as error:
            manager.delete_snapshot(snapshot.id)
        assert status_of(error) == 409
    for snapshot_id in [snapshot.id, second.id]:
        manager.delete_snapshot(snapshot_id)
        with pytest.raises(SandboxApiException) as error:
            manager.get_snapshot(snapshot_id)
        assert status_of(error) == 404
    with pytest.raises(SandboxApiException) as error:
        sandboxes(config).create(snapshot_id=snapshot.id, connection_config=config)
    assert status_of(error) == 404 and "SNAPSHOT::NOT_FOUND" in str(error.value)


def test_a_slow_start_is_pending_and_a_cut_one_leaves_nothing(server):
    body = {"image": {"uri": HOST}, "resourceLimits": None, "volumes": None}
    with server.api() as api:
        slow = {**body, "lifecycle": {"preStart": {"command": ["sleep", "8"]}}}
        made = api.post("/sandboxes", json=slow).json()
        assert made["status"]["state"] == "Pending"
        path = f"/sandboxes/{made['id']}"
        assert api.get(f"{path}/proxy/44772/ping").status_code == 503
        eventually(lambda: api.get(path).json()["status"]["state"] == "Running")
        api.delete(path)
        metadata = {"cut": uuid.uuid4().hex}
        cut = {**body, "metadata": metadata, "lifecycle": {"preStart": {"command": ["sleep", "600"], "timeoutSeconds": 700}}}
        with pytest.raises(httpx.TimeoutException):
            api.post("/sandboxes", json=cut, timeout=2)
        query = {"metadata": f"cut={metadata['cut']}"}
        eventually(lambda: api.get("/sandboxes", params=query).json()["items"] == [])


def test_the_log_of_a_pending_sandbox_does_not_wait(server):
    hook = {"preStart": {"command": ["sleep", "600"], "timeoutSeconds": 700}}
    with server.api() as api:
        made = api.post("/sandboxes", json={"image": {"uri": HOST}, "lifecycle": hook}).json()
        path = f"/sandboxes/{made['id']}"
        log = api.get(f"{path}/diagnostics/logs", params={"scope": "container"})
        assert (log.status_code, log.json()["content"]) == (200, "")
        assert api.get(path).json()["status"]["state"] == "Pending"
        assert api.delete(path).status_code == 204


def test_a_slow_start_is_waited_for(config):
    # The server answers `create` after five seconds at the latest.
    hook = SandboxLifecycle.model_validate({"preStart": {"command": ["sh", "-c", "sleep 6; echo ready > /tmp/prepared"]}})
    with created(config, lifecycle=hook) as sandbox:
        assert sandbox.is_healthy() and sandbox.files.read_file("/tmp/prepared") == "ready\n"


def test_a_sandbox_whose_start_fails_later_is_failed_with_the_reason(server, config):
    hook = {"preStart": {"command": ["sh", "-c", "sleep 7; echo no such package; exit 3"]}}
    with server.api() as api:
        made = api.post("/sandboxes", json={"image": {"uri": HOST}, "lifecycle": hook}).json()
        assert made["status"]["state"] == "Pending"
        manager = managed(config)
        status = eventually(lambda: (found := manager.get_sandbox_info(made["id"]).status).state != "Pending" and found)
        assert (status.state, status.reason) == ("Failed", "FAILED") and "no such package" in status.message
        execd = f"/sandboxes/{made['id']}/proxy/44772"
        assert api.get(f"{execd}/ping").status_code == 409
        log = api.get(f"/sandboxes/{made['id']}/diagnostics/logs")
        assert log.status_code == 200 and "no such package" in log.text
        # Not 503, which clients repeat.
        for call, body in [("command", {"command": "true"}), ("code", {"code": "1"}), ("session", {}), ("pty", {})]:
            answer = api.post(f"{execd}/{call}", json=body)
            assert (answer.status_code, answer.json()["code"]) == (409, "CONFLICT"), call
        manager.kill_sandbox(made["id"])
        assert api.get(f"/sandboxes/{made['id']}").status_code == 404


def test_the_file_of_variables_may_be_another(config):
    with created(config, env={"EXECD_ENVS": "/tmp/other"}) as sandbox:
        sandbox.commands.set_env("STAYS", "1")
        assert sandbox.commands.run("echo $STAYS").logs.stdout[0].text == "1"


def test_unsupported_requests_are_refused(server, config):
    manager = managed(config)
    with pytest.raises(SandboxApiException) as error:
        sandboxes(config).create(HOST, connection_config=config, resource={"cpu": "1", "gpu": "1"})
    assert status_of(error) == 501 and "SANDBOX::API_NOT_SUPPORTED" in str(error.value)
    with server.api() as api:
        for resources in [{"resourceLimits": {"nvidia.com/gpu": "1"}}, {"resourceRequests": {"gpu": "1"}}]:
            assert api.post("/sandboxes", json={"image": {"uri": HOST}, **resources}).status_code == 501
        for uri in ["", "   "]:
            blank = api.post("/sandboxes", json={"image": {"uri": uri}})
            assert (blank.status_code, blank.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER")
        late = api.post("/sandboxes", json={"image": {"uri": HOST}, "timeout": 0})
        assert (late.status_code, late.json()["code"]) == (400, "DOCKER::INVALID_EXPIRATION")
        pool = api.post("/sandboxes", json={"image": {"uri": HOST}, "extensions": {"poolRef": "none"}})
        assert (pool.status_code, pool.json()["code"]) == (404, "KUBERNETES::POOL_NOT_FOUND")
        volume = {"name": "v", "mountPath": "/data", "pvc": {"claimName": f"v{uuid.uuid4().hex}"}}
        refused = api.post("/sandboxes", json={"image": {"uri": HOST}, "resourceLimits": {"gpu": "1"}, "volumes": [volume]})
        assert refused.status_code == 501
        volume["pvc"]["createIfNotExists"] = False
        missing = api.post("/sandboxes", json={"image": {"uri": HOST}, "volumes": [volume]})
        assert (missing.status_code, missing.json()["code"]) == (404, "VOLUME::PVC_NOT_FOUND"), "a refused request makes no volume"
        no_gpus = api.post("/sandboxes", json={"image": {"uri": HOST}, "resourceLimits": {"gpu": "0", "nvidia.com/gpu": "0"}})
        assert no_gpus.status_code == 202
        api.delete(f"/sandboxes/{no_gpus.json()['id']}")
    with pytest.raises(SandboxApiException) as error:
        sandboxes(config).create(HOST, connection_config=config, platform=PlatformSpec(os="windows", arch="amd64"))
    assert status_of(error) == 501
    with pytest.raises(SandboxApiException) as error:
        sandboxes(config).create_from_template("t", timeout=timedelta(minutes=5), connection_config=config)
    assert status_of(error) == 501
    template = CreateTemplateRequest(image=HOST, publish="s3://bucket/key")
    for call in [
        lambda: manager.create_template(template),
        lambda: manager.list_templates(TemplateFilter()),
        lambda: manager.get_template("t"),
        lambda: manager.delete_template("t"),
    ]:
        with pytest.raises(SandboxApiException) as error:
            call()
        assert status_of(error) == 501 and error.value.error.code == "SANDBOX::API_NOT_SUPPORTED"
    with created(config) as sandbox:
        isolation = sandbox.isolation
        assert isolation.capabilities().available is False
        for call in [
            isolation.list,
            lambda: isolation.attach("s"),
            lambda: isolation.run_once("touch /tmp/ran", workspace="/tmp"),
        ]:
            with pytest.raises(SandboxApiException) as error:
                call()
            assert status_of(error) == 503 and error.value.error.code == "NOT_SUPPORTED"
        assert sandbox.commands.run("test -e /tmp/ran").exit_code == 1
    with server.api() as api:
        for body, status in [
            ({"image": {"uri": HOST}, "credentialProxy": {"enabled": True}}, 501),
            ({"image": {"uri": HOST, "auth": {"username": "u", "password": "p"}}}, 501),
            ({"image": {"uri": HOST}, "volumes": [{"name": "o", "mountPath": "/o", "ossfs": {}}]}, 501),
            ({"image": {"uri": HOST}, "lifecycle": {"periodic": [{"name": "p"}]}}, 501),
            ({}, 400),
            ({"image": {"uri": HOST}, "snapshotId": "s"}, 400),
            ({"image": {"uri": HOST}, "timeout": 0}, 400),
            ({"image": {"uri": HOST}, "resourceLimits": {"memory": "lots"}}, 400),
            ({"image": {"uri": HOST}, "env": {"A=B": "1"}}, 400),
            ({"image": {"uri": HOST}, "volumes": [{"name": "v", "mountPath": "/v"}]}, 400),
            ({"image": 7}, 400),
        ]:
            answer = api.post("/sandboxes", json=body)
            assert answer.status_code == status, (body, answer.text)
            assert set(answer.json()) == {"code", "message"}
        assert api.post("/sandboxes", content=b"{").status_code == 400
        assert api.get("/pools").status_code == 501
        assert api.put(f"/sandboxes/{uuid.uuid4()}").status_code == 405


def test_the_statuses_are_those_of_the_protocol(server):
    with server.api() as api:
        made = api.post("/sandboxes", json={"image": {"uri": HOST}, "new-member": {"of": "a later client"}})
        assert made.status_code == 202
        sandbox_id = made.json()["id"]
        assert {"id", "status", "createdAt", "entrypoint"} <= set(made.json())
        assert "expiresAt" not in made.json()
        path = f"/sandboxes/{sandbox_id}"
        assert api.post(f"{path}/pause").status_code == 202
        assert api.post(f"{path}/resume").status_code == 202
        assert api.post(f"{path}/snapshots").status_code == 202
        for snapshot in api.get(f"/snapshots?sandboxId={sandbox_id}").json()["items"]:
            assert api.delete(f"/snapshots/{snapshot['id']}").status_code == 204
        for port in [44772, 18080, 8000]:
            found = api.get(f"{path}/endpoints/{port}")
            assert found.status_code == 200 and "://" not in found.json()["endpoint"]
        for port in ["0", "65536", "x"]:
            assert api.get(f"{path}/endpoints/{port}").status_code == 400
        assert api.get(f"{path}/endpoints/80?use_server_proxy=true&expires=9999999999").status_code == 400
        assert api.post("/metrics/events", json={"eventType": "sandbox.create"}).status_code == 204
        assert api.delete(path).status_code == 204
        assert api.delete(path).status_code == 404
        request_id = api.get(path, headers={"X-Request-ID": "mine"}).headers["X-Request-ID"]
        assert request_id == "mine" and api.get(path).headers["X-Request-ID"]
    for public in ["/health", "/version"]:
        assert httpx.get(f"http://{server.domain}{public}").status_code == 200


def test_another_owner_has_no_access(server):
    with created(server.config()) as sandbox:
        with server.api(BOB) as bob:
            for method, path in [
                ("GET", ""),
                ("DELETE", ""),
                ("POST", "/pause"),
                ("PATCH", "/metadata"),
                ("GET", "/endpoints/44772"),
                ("GET", "/proxy/44772/ping"),
                ("GET", "/networkpolicy"),
                ("POST", "/snapshots"),
            ]:
                answer = bob.request(method, f"/sandboxes/{sandbox.id}{path}", json={})
                assert answer.status_code == 404, (method, path, answer.text)
            assert sandbox.id not in bob.get("/sandboxes?pageSize=200").text
        with pytest.raises(SandboxApiException) as error:
            SandboxSync.connect(sandbox.id, connection_config=server.config(key=BOB))
        assert status_of(error) == 404
        assert sandbox.is_healthy()


def test_wrong_tokens_are_refused(server):
    with created(server.config()) as sandbox:
        for key, code in [("", "MISSING_API_KEY"), ("wrong", "INVALID_API_KEY")]:
            headers = {"OPEN-SANDBOX-API-KEY": key} if key else {}
            answer = httpx.get(f"http://{server.domain}/v1/sandboxes", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, code)
        bearer = {"Authorization": f"Bearer {BOB}"}
        assert httpx.get(f"http://{server.domain}/v1/sandboxes", headers=bearer).status_code == 200
        with pytest.raises(SandboxApiException) as error:
            SandboxSync.create(HOST, connection_config=server.config(key="wrong"))
        assert status_of(error) == 401
        with server.execd(sandbox.id) as execd, created(server.config()) as other:
            assert execd.get("/ping").status_code == 200
            token = execd.headers["X-EXECD-ACCESS-TOKEN"]
            for headers in [{}, {"X-EXECD-ACCESS-TOKEN": "wrong"}, {"X-EXECD-ACCESS-TOKEN": token[:-2] + "AA"}]:
                assert httpx.get(f"{execd.base_url}ping", headers=headers).status_code == 401, headers
            # The capability opens neither another sandbox nor another part of this one.
            with server.execd(other.id) as elsewhere:
                answer = httpx.get(f"{elsewhere.base_url}ping", headers={"X-EXECD-ACCESS-TOKEN": token})
                assert answer.status_code == 401
            egress = str(execd.base_url).replace("/execd/", "/egress/policy")
            assert httpx.get(egress, headers={"OPENSANDBOX-EGRESS-AUTH": token}).status_code == 401
            assert httpx.get(f"http://{server.domain}/v1/sandboxes", headers=execd.headers).status_code == 401
