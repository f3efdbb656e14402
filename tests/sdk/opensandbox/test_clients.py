"""Other clients of OpenSandbox: its package for Node, its MCP server, its pool, and many sandboxes at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys
from datetime import timedelta

import pytest
from blocking import Blocking
from conftest import ANN, HOST, created, managed
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from opensandbox import (
    InMemoryAsyncPoolStateStore,
    InMemoryPoolStateStore,
    PoolCreationSpec,
    Sandbox,
    SandboxPoolAsync,
    SandboxPoolSync,
)
from opensandbox.exceptions import SandboxRateLimitException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.execd_sync import ExecutionHandlersSync
from opensandbox.models.sandboxes import SandboxFilter
from opensandbox.sync.manager import SandboxManagerSync
from opensandbox.sync.sandbox import SandboxSync
from waiting import eventually

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("proxy", [False, True])
def test_the_package_for_node_works(server, proxy, tmp_path):
    packages = pathlib.Path(os.environ["NODE_PATH"])
    assert (packages / "@alibaba-group" / "opensandbox").is_dir(), "`cargo xtask test` installs it"
    # Node finds modules beside the file only.
    (tmp_path / "node_modules").symlink_to(packages)
    script = tmp_path / "client.mjs"
    script.write_text((HERE / "client.mjs").read_text())
    env = {**os.environ, "DOMAIN": server.domain, "API_KEY": ANN, "PROXY": "1" if proxy else ""}
    ran = subprocess.run(["node", script], env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.strip().endswith("all passed"), ran.stdout


@pytest.mark.asyncio
async def test_the_mcp_server_of_the_project_works(server):
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "opensandbox_mcp", "--domain", server.domain, "--api-key", ANN, "--protocol", "http"],
    )
    async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
        await session.initialize()

        async def call(name, **arguments):
            result = await session.call_tool(name, arguments)
            failed = getattr(result, "is_error", getattr(result, "isError", False))
            assert not failed, result
            return result.content[0].text if result.content else ""

        tools = {tool.name for tool in (await session.list_tools()).tools}
        assert {"sandbox_create", "command_run", "file_write", "sandbox_kill"} <= tools
        made = await call("sandbox_create", image=HOST)
        sandbox_id = json.loads(made)["sandbox_id"] if "sandbox_id" in made else json.loads(made)["id"]
        try:
            ran = await call("command_run", sandbox_id=sandbox_id, command="echo from mcp")
            assert "from mcp" in ran
            await call("file_write", sandbox_id=sandbox_id, path="/tmp/mcp", content="kept")
            assert "kept" in await call("file_read", sandbox_id=sandbox_id, path="/tmp/mcp")
            assert "/tmp/mcp" in await call("file_search", sandbox_id=sandbox_id, path="/tmp", pattern="mcp")
            assert sandbox_id in await call("sandbox_get_info", sandbox_id=sandbox_id)
            assert "mem" in (await call("sandbox_get_metrics", sandbox_id=sandbox_id)).lower()
            assert server.domain in await call("sandbox_get_endpoint", sandbox_id=sandbox_id, port=8000)
        finally:
            await call("sandbox_kill", sandbox_id=sandbox_id)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_pool_of_the_package_works(server, kind):
    name = f"pool-{kind}"
    spec = PoolCreationSpec(image=HOST, metadata={"pool": name}, resource={"cpu": "250m", "memory": "64Mi"})
    if kind == "sync":
        pools, store, config = SandboxPoolSync, InMemoryPoolStateStore(), server.config()
    else:
        pools, store, config = Blocking(SandboxPoolAsync), InMemoryAsyncPoolStateStore(), server.async_config()
    manager = managed(config)
    pool = pools(pool_name=name, max_idle=2, state_store=store, connection_config=config, creation_spec=spec)

    def made() -> set[str]:
        return {info.id for info in manager.list_sandbox_infos(SandboxFilter(metadata={"pool": name})).sandbox_infos}

    def idle() -> set[str]:
        return {entry.sandbox_id for entry in pool.snapshot_idle_entries()}

    pool.start()
    try:
        eventually(lambda: pool.snapshot().idle_count == 2)
        warm = idle()
        assert warm == made()
        sandbox = pool.acquire(sandbox_timeout=timedelta(minutes=5))
        assert sandbox.id in warm, "an idle sandbox is taken, not a new one"
        assert sandbox.commands.run("echo pooled").logs.stdout[0].text == "pooled"
        pool.resize(3)
        found = eventually(lambda: (now := pool.snapshot()).idle_count == 3 and now)
        assert (found.max_idle, found.failure_count, found.last_error) == (3, 0, None)
        assert found.lifecycle_state.name == "RUNNING"
        old = idle()
        assert pool.release_all_idle_parallel() == len(old) == 3
        eventually(lambda: not old & made())
        pool.resize(0)
        eventually(lambda: pool.release_all_idle() == 0 and made() == {sandbox.id})
        assert (pool.snapshot().max_idle, pool.snapshot().idle_count) == (0, 0)
        sandbox.kill()
    finally:
        pool.shutdown(graceful=False)
        for sandbox_id in made():
            manager.kill_sandbox(sandbox_id)
    assert pool.snapshot().lifecycle_state.name == "STOPPED"


@pytest.mark.asyncio
async def test_fifty_sandboxes_at_once(server):
    async def one(number):
        config = server.async_config()
        resource = {"cpu": "250m", "memory": "64Mi"}
        sandbox = await Sandbox.create(
            HOST, connection_config=config, metadata={"many": "1"}, resource=resource, ready_timeout=timedelta(minutes=4)
        )
        try:
            await sandbox.files.write_file("/tmp/number", str(number))
            run = await sandbox.commands.run("cat /tmp/number; exit 3")
            return run.logs.stdout[0].text == str(number) and run.exit_code == 3
        finally:
            await sandbox.kill()
            await sandbox.close()

    assert all(await asyncio.gather(*(one(number) for number in range(50))))
    manager = SandboxManagerSync.create(connection_config=server.config())
    assert manager.list_sandbox_infos(SandboxFilter(metadata={"many": "1"})).sandbox_infos == []


def test_sandboxes_outlive_a_crash_of_the_server(own_server):
    server = own_server()
    sandbox = SandboxSync.create(HOST, connection_config=server.config(), metadata={"a": "b"})
    sandbox.files.write_file("/tmp/kept", "1")
    execution = sandbox.commands.run("echo before", opts=RunCommandOpts(background=True))
    eventually(lambda: not sandbox.commands.get_command_status(execution.id).running)
    server.kill()
    server.start()
    again = SandboxSync.connect(sandbox.id, connection_config=server.config())
    assert again.files.read_file("/tmp/kept") == "1" and again.get_info().metadata == {"a": "b"}
    assert again.commands.get_background_command_logs(execution.id).content == "before\n"
    again.kill()


def test_a_stream_ends_when_the_sandbox_is_killed(server):
    sandbox = SandboxSync.create(HOST, connection_config=server.config())
    killer = SandboxManagerSync.create(connection_config=server.config())
    handlers = ExecutionHandlersSync(on_stdout=lambda _: killer.kill_sandbox(sandbox.id))
    execution = sandbox.commands.run("echo go; sleep 1000", handlers=handlers)
    assert execution.complete is None and execution.error is not None


def test_limits_are_rate_limits(own_server):
    limits = {"BOXD_SERVER_CALLS_PER_TOKEN": "2", "BOXD_RUNTIME_MAX_BOXES_PER_TOKEN": "1"}
    server = own_server(env=limits)
    with created(server.config()) as sandbox:
        with pytest.raises(SandboxRateLimitException) as error:
            SandboxSync.create(HOST, connection_config=server.config())
        assert error.value.status_code == 429 and error.value.retry_after
        path = f"/sandboxes/{sandbox.id}/proxy/44772/command"
        with server.api() as api, contextlib.ExitStack() as streams:
            for _ in range(2):
                stream = api.stream("POST", path, json={"command": "sleep 1000"})
                assert streams.enter_context(stream).status_code == 200
            refused = api.get("/sandboxes")
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert refused.json()["code"] == "TOO_MANY_REQUESTS"
        with server.api() as api:
            eventually(lambda: api.get("/sandboxes").status_code == 200)
            web = "import http.server as h, time\nclass H(h.BaseHTTPRequestHandler):\n    def do_GET(self):\n        self.send_response(200)\n        self.end_headers()\n        self.wfile.write(b'x')\n        time.sleep(1000)\nh.ThreadingHTTPServer(('127.0.0.1', 8123), H).serve_forever()"
            sandbox.files.write_file("/tmp/slow.py", web)
            sandbox.commands.run("exec python3 /tmp/slow.py", opts=RunCommandOpts(background=True))
            eventually(lambda: sandbox.commands.run("bash -c '</dev/tcp/127.0.0.1/8123'").exit_code == 0)
        with server.api() as api, contextlib.ExitStack() as streams:
            for _ in range(2):
                stream = api.stream("GET", f"/sandboxes/{sandbox.id}/proxy/8123/")
                assert streams.enter_context(stream).status_code == 200
            assert api.get("/sandboxes").status_code == 429, "a proxied stream counts as a call"
        with server.api() as api:
            eventually(lambda: api.get("/sandboxes").status_code == 200)
