"""LangBot's own service and connector, unmodified: by its endpoint setting, and as the child process it starts itself."""

import asyncio
import logging
import os
import pathlib
import textwrap
import types

import pytest
from conftest import BOXD, INSTANCE, TOKEN, free_port
from langbot.pkg.api.http.context import ExecutionContext
from langbot.pkg.box.service import BoxService
from langbot_plugin.box.errors import BoxValidationError
from waiting import eventually_async

pytestmark = pytest.mark.asyncio


class Workspaces:
    """The part of the application that the service uses: the placement of a workspace."""

    instance_uuid = INSTANCE

    async def get_execution_binding(self, workspace_uuid, expected_generation=None):
        return types.SimpleNamespace(
            instance_uuid=INSTANCE, workspace_uuid=workspace_uuid, placement_generation=expected_generation
        )


def application(root: pathlib.Path, endpoint: str = "", **box):
    config = {"enabled": True, "local": {"host_root": str(root), "profile": "default"}, "runtime": {"endpoint": endpoint}}
    return types.SimpleNamespace(
        logger=logging.getLogger("langbot"),
        instance_config=types.SimpleNamespace(data={"box": {**config, **box}}),
        workspace_service=Workspaces(),
        deployment=types.SimpleNamespace(mode="oss", multi_workspace_enabled=False),
    )


@pytest.fixture
def langbot_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LANGBOT_BOX_CONTROL_TOKEN", TOKEN)
    return monkeypatch


@pytest.fixture(params=["endpoint", "child"])
def service(request, langbot_environment, tmp_path):
    """The service, connected by its endpoint setting, or over pipes to the child that it starts.

    A `sitecustomize` module replaces that child with `boxd`.
    """
    root = tmp_path / "data"
    if request.param == "endpoint":
        endpoint = f"ws://127.0.0.1:{request.getfixturevalue('server').port}"
        return BoxService(application(root, endpoint))
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        textwrap.dedent(
            f"""
            import os, sys
            words = sys.orig_argv
            if "langbot_plugin.cli.__init__" in words and "box" in words:
                port = words[words.index("--ws-control-port") + 1]
                os.execv({BOXD!r}, [{BOXD!r}, "stdio", "--langbot", "--ws-control-port", port])
            """
        )
    )
    langbot_environment.setenv("PYTHONPATH", str(hook))
    # In a container, LangBot would look for a server with another name.
    langbot_environment.setattr("langbot.pkg.utils.platform.get_platform", lambda: "linux")
    made = BoxService(application(root))
    made._runtime_connector._relay_port = free_port()
    return made


def workspace(name: str) -> ExecutionContext:
    return ExecutionContext(instance_uuid=INSTANCE, workspace_uuid=name, placement_generation=1)


async def closed(service):
    service._closing = True
    await service._runtime_connector.aclose()


async def test_the_service_executes_truncates_and_reports(service, tmp_path):
    await service.initialize()
    try:
        assert service.available, service._connector_error
        here = workspace(f"service-{os.getpid()}-{tmp_path.name}")
        result = await service.execute_in_context(here, {"cmd": "echo hello > f; cat f", "session_id": "runner-1"})
        assert (result.stdout, result.exit_code) == ("hello", 0)
        files = list((tmp_path / "data" / "default" / "tenants").glob("ws-*/f"))
        assert [file.read_text() for file in files] == ["hello\n"]
        long = await service.execute_in_context(here, {"cmd": "seq 1 5000", "session_id": "runner-1"})
        result = service._serialize_result(long)
        assert result["stdout_truncated"] and len(result["stdout"]) <= 4000
        assert "characters truncated" in result["stdout"]
        status = await service.get_status(here)
        assert (status["available"], status["active_sessions"]) == (True, 1)
        assert len(await service.get_sessions(here)) == 1
        with pytest.raises(BoxValidationError):
            await service.execute_in_context(here, {"cmd": "true", "session_id": "x", "host_path": "/etc"})
        await service.client.delete_session("runner-1", action_context=service._action_context(here))
    finally:
        await closed(service)


async def test_the_service_reconnects_after_the_server_was_killed(own_server, langbot_environment, tmp_path):
    server = own_server()
    service = BoxService(application(tmp_path / "data", f"ws://127.0.0.1:{server.port}"))
    await service.initialize()
    try:
        here = workspace("reconnects")
        await service.execute_in_context(here, {"cmd": "echo kept > /workspace/f", "session_id": "s"})
        before = service._runtime_connector._handler
        server.kill()
        server.start()

        async def connected_again() -> bool:
            return service.available and service._runtime_connector._handler not in (None, before)

        await eventually_async(connected_again)
        result = await service.execute_in_context(here, {"cmd": "cat /workspace/f", "session_id": "s"})
        assert result.stdout == "kept"
    finally:
        await closed(service)


async def test_the_heartbeat_of_the_connector_is_answered(server, langbot_environment, tmp_path, monkeypatch):
    from langbot.pkg.box import connector

    monkeypatch.setattr(connector, "_HEARTBEAT_INTERVAL_SEC", 0.05)
    lost = []

    async def disconnected(_connector):
        lost.append(1)

    made = connector.BoxRuntimeConnector(
        application(tmp_path / "data", f"ws://127.0.0.1:{server.port}"), runtime_disconnect_callback=disconnected
    )
    await made.initialize()
    # Time for several heartbeats; the exact number does not matter.
    await asyncio.sleep(1)
    await made.ping()
    assert lost == []
    await made.aclose()
