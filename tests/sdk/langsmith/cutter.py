"""A proxy that cuts connections at random byte positions."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading

# The SDK gives up after six losses in succession without output. A message of the server has at most this many bytes
# for plain output, so a connection with more of them makes progress.
PROGRESS = 48 * 1024


class Cutter:
    """Forwards connections to a port, and cuts websockets of commands after a random number of bytes.

    It never cuts before the end of the HTTP response: the older SDK does not try again then. `least` is the number of
    bytes that every connection passes on.
    """

    def __init__(self, port: int, cuts: int, seed: int, least: int = 0):
        self.target = port
        self.least = least
        self.left = cuts
        self.made = 0
        self.random = random.Random(seed)
        self.without_progress = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self.serve, "127.0.0.1", 0), self.loop)
        self.server = server.result(30)
        self.port = self.server.sockets[0].getsockname()[1]

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.end(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()

    async def end(self) -> None:
        self.server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def budget(self) -> int:
        """Returns the number of bytes after which the next websocket breaks."""
        if self.without_progress >= 3:
            self.without_progress = 0
            return PROGRESS + self.random.randrange(PROGRESS)
        budget = self.random.randrange(PROGRESS * 4 // 3)
        self.without_progress = self.without_progress + 1 if budget < PROGRESS else 0
        return budget

    async def serve(self, reader, writer) -> None:
        near, far = (reader, writer), None
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            far = await asyncio.open_connection("127.0.0.1", self.target)
            far[1].write(head)
            is_command = b"/execute/ws" in head.split(b"\r\n")[0]
            up = asyncio.ensure_future(self.copy(near[0], far[1], None))
            if is_command and self.left > 0:
                writer.write(await far[0].readuntil(b"\r\n\r\n"))
                budget = self.least + self.budget()
                await self.copy(far[0], near[1], budget)
            else:
                await self.copy(far[0], near[1], None)
            up.cancel()
        for _, end in filter(None, (near, far)):
            end.close()

    async def copy(self, reader, writer, budget: int | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536 if budget is None else max(1, min(65536, budget))):
                if budget is not None:
                    budget -= len(data)
                writer.write(data)
                await writer.drain()
                if budget is not None and budget <= 0 and self.left > 0:
                    self.left -= 1
                    self.made += 1
                    if self.random.random() < 0.5:
                        # A reset instead of an orderly end.
                        connection = writer.get_extra_info("socket")
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        writer.transport.abort()
                    return
