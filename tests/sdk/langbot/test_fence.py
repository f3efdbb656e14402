"""A newer placement of a workspace ends everything of the older one."""

import asyncio

import pytest
import websockets
from conftest import INSTANCE, connected, exists, spec, websocket
from langbot_plugin.box.errors import BoxError
from langbot_plugin.box.models import BoxManagedProcessSpec
from langbot_plugin.entities.io.context import ActionContext
from waiting import eventually_async

pytestmark = pytest.mark.asyncio


def newer(context, generation=2):
    return context.model_copy(update={"placement_generation": generation})


async def test_older_sessions_are_deleted_before_the_newer_call_runs(client, context):
    await client.execute(spec(cmd="echo old > /workspace/f", persistent=True), action_context=context)
    assert await client.get_sessions(action_context=newer(context)) == []
    with pytest.raises(BoxError) as refused:
        await client.execute(spec(), action_context=context)
    assert str(refused.value) == "PermissionError: Stale Box placement generation"
    result = await client.execute(spec(cmd="cat /workspace/f"), action_context=newer(context))
    assert result.exit_code != 0


async def test_running_calls_and_relays_of_the_older_placement_end(server, context, tmp_path):
    (tmp_path / "workspace").mkdir()
    workspace = {"host_path": str(tmp_path / "workspace")}
    async with connected(websocket(server)) as client, connected(websocket(server)) as other:
        await client.create_session(spec(**workspace), action_context=context)
        cat = BoxManagedProcessSpec(command="cat")
        await client.start_managed_process("s1", cat, action_context=context)
        url = client.get_managed_process_websocket_url("s1", server.relay_url, action_context=context)
        headers = server.relay_headers(context)
        async with websockets.connect(url, additional_headers=headers, proxy=None) as relay:
            sleeps = spec(cmd="touch started; sleep 600", timeout_sec=600, **workspace)
            running = asyncio.create_task(client.execute(sleeps, action_context=context))
            await exists(tmp_path / "workspace" / "started")
            assert await other.get_sessions(action_context=newer(context)) == []
            with pytest.raises(BoxError, match="Stale Box placement generation"):
                await asyncio.wait_for(running, 120)
            with pytest.raises(websockets.exceptions.ConnectionClosed):
                await asyncio.wait_for(relay.recv(), 120)
        with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
            async with websockets.connect(url, additional_headers=headers, proxy=None):
                pass
        assert refused.value.response.status_code == 401


async def test_a_session_created_by_a_stale_placement_is_deleted(server, context):
    async with connected(websocket(server)) as client:
        for generation in range(1, 12, 2):
            old = [
                client.execute(spec(session_id=f"s{n}"), action_context=newer(context, generation)) for n in range(4)
            ]
            old = asyncio.gather(*old, return_exceptions=True)
            # Each round interrupts the creation at another point.
            await asyncio.sleep(0.002 * generation)
            await client.get_status(action_context=newer(context, generation + 1))
            await old

        async def none_left() -> bool:
            status = await client.get_status(action_context=newer(context, 12))
            return (status["active_sessions"], status["capacity"]["used"]) == (0, 0)

        await eventually_async(none_left)
        assert await client.get_sessions(action_context=newer(context, 12)) == []


async def test_other_workspaces_are_not_touched(client, context):
    other = ActionContext(instance_uuid=INSTANCE, workspace_uuid=context.workspace_uuid + "x")
    await client.create_session(spec(), action_context=other)
    await client.create_session(spec(), action_context=context)
    assert await client.get_sessions(action_context=newer(context)) == []
    assert len(await client.get_sessions(action_context=other)) == 1


@pytest.mark.parametrize("bad", [None, "other"])
async def test_a_context_must_name_this_instance(client, context, bad):
    with pytest.raises(BoxError) as refused:
        if bad is None:
            await client.get_sessions()
        else:
            await client.get_sessions(action_context=context.model_copy(update={"instance_uuid": bad}))
    texts = {
        None: "PermissionError: Box tenant action requires a trusted Workspace context",
        "other": "PermissionError: Box action context does not match the trusted instance",
    }
    assert str(refused.value) == texts[bad]


async def test_the_number_of_workspaces_is_limited(own_server):
    async with connected(websocket(own_server())) as client:
        await client.init({"limits": {"max_admission_records": 2}})
        for number in range(2):
            context = ActionContext(instance_uuid=INSTANCE, workspace_uuid=f"w{number}")
            await client.get_sessions(action_context=context)
        with pytest.raises(BoxError, match="PermissionError: Box generation fence capacity reached"):
            await client.get_sessions(action_context=ActionContext(instance_uuid=INSTANCE, workspace_uuid="w3"))
