"""A proxy that cuts connections at random byte positions."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading

# The SDK gives up after six losses in succession without output. A message of the server has at most this many bytes
# for plain output, as text of a websocket and as base64 of an event, so a connection with more of them makes progress.
PROGRESS = 48 * 1024


class Cutter:
    """Forwards connections to a port, and cuts those of commands after a random number of bytes.

    It cuts a websocket never before the end of the HTTP response: the older SDK does not try again then. It cuts
    server-sent events anywhere, if they are the first request of their connection. `least` is the number of bytes that
    every connection passes on, and `most` limits the random number.
    """

    # Like a proxy that knows no websockets.
    refuses_sockets = False

    def __init__(self, port: int, cuts: int, seed: int, least: int = 0, most: int = PROGRESS * 4 // 3):
        self.target = port
        self.least = least
        self.most = most
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

    def budget(self) -> tuple[int, bool]:
        """Returns the number of bytes after which the next connection breaks, and whether a reset breaks it.

        A reset can lose what the client has not read yet, so only an orderly end surely makes progress.
        """
        if self.without_progress >= 3:
            self.without_progress = 0
            return PROGRESS + self.random.randrange(PROGRESS), False
        budget, resets = self.random.randrange(self.most), self.random.random() < 0.5
        self.without_progress = 0 if budget >= PROGRESS and not resets else self.without_progress + 1
        return budget, resets

    async def serve(self, reader, writer) -> None:
        near, far = (reader, writer), None
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            line = head.split(b"\r\n")[0]
            is_socket, is_events = b"/execute/ws" in line, b"/execute/stream/" in line
            if is_socket and self.refuses_sockets:
                self.made += 1
                writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                await writer.drain()
                writer.close()
                return
            far = await asyncio.open_connection("127.0.0.1", self.target)
            far[1].write(head)
            up = asyncio.ensure_future(self.copy(near[0], far[1]))
            if self.left > 0 and (is_socket or is_events):
                if is_socket:
                    writer.write(await far[0].readuntil(b"\r\n\r\n"))
                budget, resets = self.budget()
                await self.copy(far[0], near[1], self.least + budget, resets)
            else:
                await self.copy(far[0], near[1])
            up.cancel()
        for _, end in filter(None, (near, far)):
            end.close()

    async def copy(self, reader, writer, budget: int | None = None, resets: bool = False) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536 if budget is None else max(1, min(65536, budget))):
                if budget is not None:
                    budget -= len(data)
                writer.write(data)
                await writer.drain()
                if budget is not None and budget <= 0 and self.left > 0:
                    self.left -= 1
                    self.made += 1
                    if resets:
                        connection = writer.get_extra_info("socket")
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        writer.transport.abort()
                    return
