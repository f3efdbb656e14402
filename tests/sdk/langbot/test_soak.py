"""Ten thousand calls of LangBot's client, with connections cut at random."""

import asyncio
import random

import pytest
from conftest import connected, spec, websocket
from langbot_plugin.box.errors import BoxError
from langbot_plugin.entities.io.actions.enums import CommonAction
from langbot_plugin.entities.io.errors import ActionCallError, ConnectionClosedError

pytestmark = pytest.mark.asyncio

CALLS = 10_000
WORKERS = 16


async def test_ten_thousand_calls_with_random_cuts(server, context):
    chance = random.Random(1)
    left = iter(range(CALLS))
    done = cut = wrong = 0

    async def work(client, number):
        nonlocal done, wrong
        for call in left:
            what = chance.random()
            if what < 0.15:
                result = await client.execute(
                    spec(session_id=f"soak-{number % 4}", cmd=f"echo {call}"), action_context=context
                )
                wrong += result.stdout != str(call)
            elif what < 0.5:
                await client.handler.call_action(CommonAction.PING, {})
            elif what < 0.75:
                await client.get_backend_info()
            else:
                await client.get_sessions(action_context=context)
            done += 1

    while done + cut * WORKERS < CALLS:
        async with connected(websocket(server)) as client:
            work_of_all = asyncio.gather(*(work(client, number) for number in range(WORKERS)), return_exceptions=True)
            try:
                outcomes = await asyncio.wait_for(asyncio.shield(work_of_all), chance.uniform(0.2, 1.5))
                assert outcomes == [None] * WORKERS, outcomes
                break
            except asyncio.TimeoutError:
                cut += 1
                client.handler.conn.websocket.transport.abort()
                for outcome in await work_of_all:
                    # A call in progress fails with the lost connection, and with nothing else.
                    lost = (BoxError, ConnectionClosedError, ActionCallError)
                    assert outcome is None or isinstance(outcome, lost), outcome
                    assert outcome is None or "closed" in str(outcome).lower(), outcome
    assert wrong == 0
    assert cut >= 3 and done >= CALLS - cut * WORKERS
    async with connected(websocket(server)) as client:
        sessions = await client.get_sessions(action_context=context)
        assert {session["session_id"] for session in sessions} == {f"soak-{n}" for n in range(4)}
        for session in sessions:
            await client.delete_session(session["session_id"], action_context=context)
        assert (await client.get_status(action_context=context))["active_sessions"] == 0
