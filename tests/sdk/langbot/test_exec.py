"""`box_exec`, through LangBot's own client, in real boxes."""

import asyncio
import time

import pytest
from conftest import connected, exists, spec, websocket
from langbot_plugin.box.errors import BoxValidationError
from langbot_plugin.box.models import BoxExecutionStatus

pytestmark = pytest.mark.asyncio


async def test_a_command_runs_in_a_box(client, context):
    result = await client.execute(spec(cmd="echo out; echo err >&2; id -u; exit 3"), action_context=context)
    assert (result.session_id, result.status) == ("s1", BoxExecutionStatus.COMPLETED)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n1000", "err")
    assert result.backend_name.startswith("native")


async def test_a_session_keeps_its_files_and_each_call_has_its_own_environment(client, context):
    first = spec(cmd="echo $K > /workspace/f; mkdir -p sub", env={"K": "v"})
    assert (await client.execute(first, action_context=context)).exit_code == 0
    second = spec(cmd='cat /workspace/f; pwd; echo "${K:-none}"', workdir="/workspace/sub")
    result = await client.execute(second, action_context=context)
    assert result.stdout == "v\n/workspace/sub\nnone"


async def test_a_missing_host_directory_is_created_as_the_workspace(client, context, tmp_path):
    workspace = tmp_path / "root" / "tenants" / "one"
    result = await client.execute(
        spec(cmd="echo there > f; ls", host_path=str(workspace), workdir="/workspace"), action_context=context
    )
    assert result.stdout == "f"
    assert (workspace / "f").read_text() == "there\n"


async def test_output_is_trimmed_and_limited_to_a_mebibyte(client, context):
    result = await client.execute(spec(cmd="printf '\\n\\t a b \\n\\n'"), action_context=context)
    assert result.stdout == "a b"
    command = "head -c 1048576 /dev/zero | tr '\\0' x"
    result = await client.execute(spec(cmd=command), action_context=context)
    assert result.stdout == "x" * 1048576
    result = await client.execute(spec(cmd=command + "; printf 12345"), action_context=context)
    notice = "\n... [raw output clipped at 1048576 bytes, 5 bytes discarded]"
    assert result.stdout == "x" * 1048576 + notice


async def test_invalid_utf8_is_replaced(client, context):
    result = await client.execute(spec(cmd="printf 'a\\377b ä'"), action_context=context)
    assert result.stdout == "a\ufffdb ä"


async def test_a_timeout_deletes_the_session_before_the_answer(client, context):
    started = time.monotonic()
    late = spec(cmd="echo so far; sleep 60", timeout_sec=1, persistent=True)
    result = await client.execute(late, action_context=context)
    assert time.monotonic() - started < 20
    assert (result.status, result.exit_code) == (BoxExecutionStatus.TIMED_OUT, None)
    assert (result.stdout, result.stderr) == ("so far", "Command timed out after 1 seconds.")
    assert await client.get_sessions(action_context=context) == []


async def test_a_large_command_arrives(client, context):
    text = "ä" * 100_000
    result = await client.execute(spec(cmd=f"printf %s '{text}' | wc -c"), action_context=context)
    assert result.stdout == "200000"


async def test_an_empty_command_is_refused(client, context):
    with pytest.raises(BoxValidationError) as refused:
        await client.execute(spec(cmd=" "), action_context=context)
    assert str(refused.value) == "BoxValidationError: cmd must not be empty"


async def test_sixty_four_calls_at_once(client, context):
    calls = [
        client.execute(spec(session_id=f"s{number % 8}", cmd=f"echo {number}"), action_context=context)
        for number in range(64)
    ]
    results = await asyncio.gather(*calls)
    assert [result.stdout for result in results] == [str(number) for number in range(64)]
    assert len(await client.get_sessions(action_context=context)) == 8
    await asyncio.gather(*(client.delete_session(f"s{n}", action_context=context) for n in range(8)))
    assert await client.get_sessions(action_context=context) == []


async def test_commands_are_audited_without_their_text(own_server, context, tmp_path):
    async with connected(websocket(own_server())) as client:
        await client.execute(spec(cmd="echo a-secret; exit 3", env={"KEY": "a-secret"}), action_context=context)
    lines = (tmp_path / "log").read_text().splitlines()
    audit_lines = [line for line in lines if "box_gateways::audit" in line]
    assert len(audit_lines) == 2 and "allowed" in audit_lines[0], audit_lines
    assert "finished" in audit_lines[1] and "exit_code=3" in audit_lines[1] and "stdout_bytes=9" in audit_lines[1], audit_lines
    assert not any("a-secret" in line for line in lines)


async def test_network_is_never_wider_than_requested(client, context):
    offline = await client.execute(spec(session_id="off", cmd="cat /proc/net/dev | wc -l"), action_context=context)
    assert offline.stdout == "3"
    result = await client.execute(spec(session_id="on", cmd="true", network="on"), action_context=context)
    assert result.exit_code == 0


async def test_an_exec_continues_after_its_connection_is_lost(server, context, tmp_path):
    (tmp_path / "workspace").mkdir()
    workspace = {"host_path": str(tmp_path / "workspace")}
    async with connected(websocket(server)) as client:
        wait = "touch started; until [ -e go ]; do sleep 0.05; done; echo done > f"
        running = asyncio.create_task(client.execute(spec(cmd=wait, **workspace), action_context=context))
        await exists(tmp_path / "workspace" / "started")
        running.cancel()
    (tmp_path / "workspace" / "go").touch()
    async with connected(websocket(server)) as client:
        result = await client.execute(spec(cmd="cat f", **workspace), action_context=context)
        assert result.stdout == "done"
        await client.delete_session("s1", action_context=context)
