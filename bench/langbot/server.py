"""LangBot's own Box server, over a backend that answers at once: `server.py websocket` or `server.py stdio`."""

import asyncio
import datetime
import logging
import os
import sys

from aiohttp import web
from langbot_plugin.box.backend import BaseSandboxBackend
from langbot_plugin.box.models import BoxExecutionResult, BoxExecutionStatus, BoxSessionInfo
from langbot_plugin.box.runtime import BoxRuntime
from langbot_plugin.box.server import BoxGenerationFence, BoxServerHandler, create_app

INSTANCE = "bench"
LARGE = "x" * 100_000


class Fake(BaseSandboxBackend):
    name = "fake"

    async def is_available(self):
        return True

    async def start_session(self, spec):
        now = datetime.datetime.now(datetime.timezone.utc)
        members = spec.model_dump()
        kept = {name: members[name] for name in BoxSessionInfo.model_fields if name in members}
        return BoxSessionInfo(
            **kept, backend_name="fake", backend_session_id="fake", created_at=now, last_used_at=now
        )

    async def exec(self, session, spec):
        return BoxExecutionResult(
            session_id=session.session_id,
            backend_name="fake",
            status=BoxExecutionStatus.COMPLETED,
            exit_code=0,
            stdout=LARGE if spec.cmd == "large" else spec.cmd,
            duration_ms=0,
        )

    async def stop_session(self, session):
        pass


async def main(transport: str) -> None:
    logging.disable(logging.CRITICAL)
    # It would choose another backend.
    os.environ.pop("LANGBOT_BOX_CONFIG", None)
    runtime = BoxRuntime(logging.getLogger("box"), backends=[Fake(logging.getLogger("fake"))])
    await runtime.initialize()
    if transport == "stdio":
        from langbot_plugin.runtime.io.controllers.stdio.server import StdioServerController

        async def connected(connection):
            handler = BoxServerHandler(
                connection,
                runtime,
                host_control_authenticated=True,
                trusted_instance_uuid=INSTANCE,
                generation_fence=BoxGenerationFence(),
            )
            await handler.run()

        await StdioServerController().run(connected)
        return
    runner = web.AppRunner(create_app(runtime, control_token=""))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    print(f"ws://127.0.0.1:{port}/rpc/ws", flush=True)
    await asyncio.to_thread(sys.stdin.read)


asyncio.run(main(sys.argv[1]))
