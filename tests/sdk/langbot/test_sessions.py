"""Sessions, their conflicts and every error class that LangBot's client knows."""

import asyncio
import pathlib

import pytest
from conftest import INSTANCE, connected, exists, spec, websocket
from langbot_plugin.box import errors
from langbot_plugin.box.models import BoxManagedProcessSpec
from langbot_plugin.box.tenancy import namespace_session_id
from langbot_plugin.entities.io.context import ActionContext

pytestmark = pytest.mark.asyncio


async def test_a_session_is_created_found_listed_and_deleted(client, context):
    made = await client.create_session(spec(cmd="", persistent=True, memory_mb=256), action_context=context)
    assert (made["session_id"], made["status"], made["persistent"], made["memory_mb"]) == ("s1", "idle", True, 256)
    found = await client.get_session("s1", action_context=context)
    assert found["backend_session_id"] == made["backend_session_id"]
    assert "managed_processes" not in found
    again = await client.create_session(spec(cmd="", persistent=True, memory_mb=256), action_context=context)
    assert again["backend_session_id"] == made["backend_session_id"]
    assert [session["session_id"] for session in await client.get_sessions(action_context=context)] == ["s1"]
    await client.delete_session("s1", action_context=context)
    assert await client.get_sessions(action_context=context) == []


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("network", "on", "off"),
        ("image", "other", "rockchin/langbot-sandbox:latest"),
        ("mount_path", "/elsewhere", "/workspace"),
        ("host_path_mode", "ro", "rw"),
        ("persistent", True, "False"),
        ("cpus", 2.0, "1.0"),
        ("memory_mb", 1024, "512"),
        ("pids_limit", 64, "128"),
        ("read_only_rootfs", False, "True"),
        ("workspace_quota_mb", 10, "0"),
    ],
)
async def test_a_session_that_differs_is_a_conflict(server, context, field, value, shown):
    async with connected(websocket(server)) as client:
        await client.create_session(spec(), action_context=context)
        with pytest.raises(errors.BoxSessionConflictError) as refused:
            await client.execute(spec(**{field: value}), action_context=context)
        physical = namespace_session_id(context, "s1")
        text = f"BoxSessionConflictError: Box session {physical} already exists with {field}={shown}"
        assert str(refused.value) == text
        await client.delete_session("s1", action_context=context)


async def test_other_mounts_are_a_conflict_that_preserves_the_session(client, context, tmp_path):
    await client.create_session(spec(), action_context=context)
    mount = {"host_path": str(tmp_path), "mount_path": "/mnt/more", "mode": "ro"}
    with pytest.raises(errors.BoxSessionConflictError, match="immutable mount set"):
        await client.execute(spec(extra_mounts=[mount]), action_context=context)
    assert (await client.execute(spec(cmd="echo on"), action_context=context)).stdout == "on"


async def test_a_missing_session_is_reported_by_its_physical_name(client, context):
    physical = namespace_session_id(context, "none")
    for call in (
        client.get_session("none", action_context=context),
        client.delete_session("none", action_context=context),
        client.get_managed_process("none", action_context=context),
        client.stop_managed_process("none", action_context=context),
        client.start_managed_process("none", BoxManagedProcessSpec(command="true"), action_context=context),
    ):
        with pytest.raises(errors.BoxSessionNotFoundError) as refused:
            await call
        assert str(refused.value) == f"BoxSessionNotFoundError: session {physical} not found"
    await client.create_session(spec(), action_context=context)
    with pytest.raises(errors.BoxManagedProcessNotFoundError) as refused:
        await client.get_managed_process("s1", "p", action_context=context)
    physical = namespace_session_id(context, "s1")
    text = f"BoxManagedProcessNotFoundError: session {physical} has no managed process with process_id=p"
    assert str(refused.value) == text


@pytest.mark.parametrize("path", ["/", "/etc", "/proc/1", "/root", "/run", "/var/run", "/dev", "/sys", "/boot"])
async def test_blocked_directories_are_not_mounted(server, context, path):
    async with connected(websocket(server)) as client:
        with pytest.raises(errors.BoxValidationError, match="is blocked for security"):
            await client.execute(spec(host_path=path), action_context=context)
        mount = {"host_path": path, "mount_path": "/mnt/x", "mode": "ro"}
        with pytest.raises(errors.BoxValidationError, match=r"extra_mounts.host_path .* is blocked for security"):
            await client.execute(spec(extra_mounts=[mount]), action_context=context)


async def test_a_link_to_a_blocked_directory_is_not_mounted(server, context, tmp_path: pathlib.Path):
    (tmp_path / "link").symlink_to("/etc")
    async with connected(websocket(server)) as client:
        with pytest.raises(errors.BoxValidationError, match="is blocked for security"):
            await client.execute(spec(host_path=str(tmp_path / "link")), action_context=context)


async def test_langbot_sets_the_capacity(own_server, context):
    server = own_server()
    async with connected(websocket(server)) as client:
        await client.init({"limits": {"max_sessions": 2, "max_managed_processes": 1}})
        for name in ("a", "b"):
            await client.create_session(spec(session_id=name), action_context=context)
        status = await client.get_status(action_context=context)
        assert status["capacity"] == {"limit": 2, "used": 2, "remaining": 0}
        with pytest.raises(errors.BoxCapacityExceededError) as refused:
            await client.execute(spec(session_id="c"), action_context=context)
        assert str(refused.value) == "BoxCapacityExceededError: Box session capacity reached (2)"
        sleeps = BoxManagedProcessSpec(command="sleep", args=["60"])
        await client.start_managed_process("a", sleeps, action_context=context)
        assert (await client.get_status(action_context=context))["managed_processes"] == 1
        with pytest.raises(errors.BoxCapacityExceededError) as refused:
            await client.start_managed_process("b", sleeps, action_context=context)
        assert str(refused.value) == "BoxCapacityExceededError: Box managed process capacity reached (1)"
        await client.stop_managed_process("a", action_context=context)
        await client.start_managed_process("b", sleeps, action_context=context)


async def test_a_configuration_can_be_repeated_and_is_limited(own_server, tmp_path):
    async with connected(websocket(own_server())) as client:
        root = tmp_path / "data" / "box"
        config = {
            "enabled": True,
            "backend": "docker",
            "future": {"unknown": [1, 2]},
            "local": {"host_root": str(root), "allowed_mount_roots": []},
            "docker": {"cpu_limit_enabled": False},
            "e2b": {"api_key": "secret"},
        }
        for _ in range(3):
            await client.init(config)
        assert (root / "default").is_dir()
        for limits, text in [
            ({"max_sessions": "x"}, "ValueError: box.limits.max_sessions must be an integer"),
            ({"max_sessions": 5001}, "ValueError: box.limits.max_sessions must be between 0 and 5000"),
        ]:
            with pytest.raises(errors.BoxError) as refused:
                await client.init({"limits": limits})
            assert str(refused.value) == text
        outside = {"local": {"host_root": str(root), "default_workspace": str(tmp_path / "else")}}
        with pytest.raises(errors.BoxValidationError, match="default_workspace is outside allowed_mount_roots"):
            await client.init(outside)


async def test_the_host_backend_requires_a_guarded_connection(own_server):
    async with connected(websocket(own_server(token=""))) as client:
        with pytest.raises(errors.BoxValidationError, match="LANGBOT_BOX_CONTROL_TOKEN"):
            await client.init({"backend": "host"})
        assert (await client.get_backend_info())["name"] == "native"


async def test_other_callers_are_subject_to_the_policy(own_server, context, tmp_path):
    """Without LangBot's token any local caller may connect, and such a caller chooses no host directories."""

    (tmp_path / "secret").mkdir()
    (tmp_path / "shared").mkdir()
    request = {"cmd": "touch /workspace/was-here", "host_path_mode": "rw"}

    async def execute(server, name):
        async with connected(websocket(server)) as client:
            return await client.execute(spec(host_path=str(tmp_path / name), **request), action_context=context)

    stranger = own_server(token="")
    with pytest.raises(errors.BoxValidationError, match="allowed_host_mount_roots is empty"):
        await execute(stranger, "secret")
    async with connected(websocket(stranger)) as client:
        assert (await client.execute(spec(), action_context=context)).ok
        with pytest.raises(errors.BoxValidationError, match="LANGBOT_BOX_CONTROL_TOKEN"):
            await client.init({"local": {"host_root": str(tmp_path / "made")}})
    assert not (tmp_path / "made").exists()
    allowed = own_server(token="", env={"BOXD_POLICY_ALLOWED_HOST_MOUNT_ROOTS": f'["{tmp_path}/shared"]'})
    with pytest.raises(errors.BoxValidationError, match="outside allowed_host_mount_roots"):
        await execute(allowed, "secret")
    assert not list((tmp_path / "secret").iterdir())
    assert (await execute(allowed, "shared")).ok
    assert (await execute(own_server(), "secret")).ok
    assert [path.name for path in (tmp_path / "secret").iterdir()] == ["was-here"]


async def test_the_shared_workspace_is_verified(client, tmp_path):
    import hashlib

    await client.init({"local": {"host_root": str(tmp_path)}})
    name = ".langbot-box-volume-probe-" + "0123456789abcdef" * 2
    (tmp_path / "default" / name).write_bytes(b"challenge")
    result = await client.verify_shared_workspace(name)
    assert result == {"marker_name": name, "sha256": hashlib.sha256(b"challenge").hexdigest(), "size": 9}
    for bad in ("../x", name[:-1], ".langbot-box-volume-probe-" + "f" * 32):
        with pytest.raises(errors.BoxReadinessError):
            await client.verify_shared_workspace(bad)


async def test_a_workspace_is_measured(client, context, tmp_path):
    from langbot_plugin.box.tenancy import box_namespace

    await client.init({"local": {"host_root": str(tmp_path)}})
    workspace = tmp_path / "default" / "tenants" / box_namespace(context)
    (workspace / "inbox").mkdir(parents=True)
    (workspace / "inbox" / "a").write_bytes(b"x" * 1000)
    await client.execute(spec(cmd="head -c 100000 /dev/zero > /workspace/z"), action_context=context)
    result = await client.get_storage_analysis(action_context=context)
    found = {directory["key"]: directory for directory in result["directories"]}
    assert found["workspace"]["size_bytes"] == found["inbox"]["size_bytes"] == 1000
    assert found["session_workspaces"]["size_bytes"] >= 100_000
    assert result["active_sessions"] == 1
    roots = [directory for directory in result["directories"] if directory["kind"] == "root"]
    assert result["size_bytes"] == sum(directory["size_bytes"] for directory in roots)


async def test_shutdown_deletes_every_session_and_the_server_stays_up(own_server, context):
    async with connected(websocket(own_server())) as client:
        await asyncio.gather(
            *(client.execute(spec(session_id=f"s{n}"), action_context=context) for n in range(4)),
        )
        handler = client.handler
        await client.shutdown()
        client.set_handler(handler)
        assert await client.get_sessions(action_context=context) == []
        result = await client.execute(spec(cmd="echo again"), action_context=context)
        assert result.stdout == "again"


async def test_a_delete_waits_for_the_exec_that_runs(client, context, tmp_path):
    (tmp_path / "workspace").mkdir()
    workspace = {"host_path": str(tmp_path / "workspace")}
    await client.create_session(spec(**workspace), action_context=context)
    started = asyncio.get_running_loop().time()
    running = asyncio.create_task(
        client.execute(spec(cmd="touch started; sleep 1; echo done", **workspace), action_context=context)
    )
    await exists(tmp_path / "workspace" / "started")
    assert (await client.get_session("s1", action_context=context))["status"] == "running"
    await client.delete_session("s1", action_context=context)
    assert asyncio.get_running_loop().time() - started >= 1
    # The two answers may arrive in either order.
    assert (await running).stdout == "done"


async def test_workspaces_do_not_see_each_other(client, context):
    other = ActionContext(instance_uuid=INSTANCE, workspace_uuid=context.workspace_uuid + "-other")
    await client.execute(spec(cmd="echo mine > /workspace/f"), action_context=context)
    assert await client.get_sessions(action_context=other) == []
    result = await client.execute(spec(cmd="cat /workspace/f"), action_context=other)
    assert result.exit_code != 0
    assert (await client.get_status(action_context=context))["active_sessions"] == 1
