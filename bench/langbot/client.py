"""LangBot's own client, timed: `client.py URL ping|exec` prints milliseconds of a call, alone and with 64 at once."""

import asyncio
import logging
import statistics
import sys
import time

from langbot_plugin.box.client import ActionRPCBoxClient
from langbot_plugin.box.models import BoxSpec
from langbot_plugin.entities.io.actions.enums import CommonAction
from langbot_plugin.entities.io.context import ActionContext
from langbot_plugin.runtime.io.controllers.ws.client import WebSocketClientController
from langbot_plugin.runtime.io.handler import Handler

ALONE, TOGETHER, AT_ONCE = 400, 1600, 64


async def main(url: str, what: str) -> None:
    ready = asyncio.get_running_loop().create_future()

    async def connected(connection):
        handler = Handler(connection)
        ready.set_result(handler)
        await handler.run()

    async def failed(_controller, error):
        raise error

    controller = WebSocketClientController(url, failed, {"X-LangBot-Instance-Id": "bench"})
    task = asyncio.create_task(controller.run(connected))
    client = ActionRPCBoxClient(logging.getLogger("box"))
    client.set_handler(await ready)
    context = ActionContext(instance_uuid="bench", workspace_uuid="w")
    spec = BoxSpec(cmd="true", session_id="s")

    async def call():
        if what == "ping":
            await client.handler.call_action(CommonAction.PING, {})
        else:
            await client.execute(spec, action_context=context)

    for _ in range(50):
        await call()
    alone = []
    for _ in range(ALONE):
        begun = time.perf_counter()
        await call()
        alone.append(time.perf_counter() - begun)
    left = iter(range(TOGETHER))

    async def work():
        for _ in left:
            await call()

    begun = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    together = (time.perf_counter() - begun) / TOGETHER
    print(statistics.median(alone) * 1000, together * 1000)
    task.cancel()


asyncio.run(main(sys.argv[1], sys.argv[2]))
