"""The tunnel to ports of a box."""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import AsyncSandboxClient, SandboxClient, call, create
from langsmith.sandbox import TunnelError
from langsmith.sandbox._tunnel import Tunnel
from program import free_port
from waiting import eventually_async

pytestmark = pytest.mark.asyncio

# The tunnels of one box: one more after each kill.
KILLS = 5

ECHO = """
import socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
Server(("127.0.0.1", 7007), Echo).serve_forever()
"""


async def echo_server(box) -> None:
    await call(box.write, "/tmp/echo.py", ECHO)
    await call(box.run, "nohup python3 /tmp/echo.py > /tmp/echo.log 2>&1", wait=False, timeout=0, idle_timeout=-1)

    async def listens() -> bool:
        probe = await call(box.run, "(exec 3<>/dev/tcp/127.0.0.1/7007) 2>/dev/null && echo up || true")
        return probe.stdout == "up\n"

    await eventually_async(listens)


def exchange(port: int, content: bytes) -> bytes:
    """Sends content and reads the same number of bytes."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        received = bytearray()
        connection.settimeout(60)
        view = memoryview(content)
        while len(received) < len(content):
            if view:
                sent = connection.send(view[:65536])
                view = view[sent:]
            part = connection.recv(65536)
            assert part, f"the connection has ended after {len(received)} bytes"
            received += part
        return bytes(received)


def exchange_until_the_end(connection: socket.socket, begun: threading.Event) -> int:
    """Sends pieces and reads each again until the connection ends, and returns the number of complete ones."""
    pieces = 0
    with connection, contextlib.suppress(ConnectionError):
        while True:
            piece = os.urandom(65536)
            connection.sendall(piece)
            received = 0
            while received < len(piece):
                part = connection.recv(65536)
                if not part:
                    return pieces
                assert piece[received : received + len(part)] == part
                received += len(part)
            pieces += 1
            begun.set()
    return pieces


async def test_connections_pass_through(box):
    await echo_server(box)
    tunnel = await call(box.tunnel, 7007, local_port=free_port())
    try:
        assert await asyncio.to_thread(exchange, tunnel.local_port, b"hello") == b"hello"
        # More than the window of a stream, so both sides must update it.
        content = os.urandom(3 << 20)
        echoed = await asyncio.to_thread(exchange, tunnel.local_port, content)
        assert hashlib.sha256(echoed).digest() == hashlib.sha256(content).digest()
        many = [bytes([number]) * 100_000 for number in range(12)]
        answers = await asyncio.gather(*(asyncio.to_thread(exchange, tunnel.local_port, one) for one in many))
        assert answers == many
    finally:
        await call(tunnel.close)


async def test_excess_connections_do_not_disturb_others(box):
    await echo_server(box)
    tunnel = await call(box.tunnel, 7007, local_port=free_port())
    connections = []

    def echoes(connection) -> bool:
        try:
            connection.sendall(b"x")
            return connection.recv(1) == b"x"
        except OSError:
            return False

    def use() -> None:
        for _ in range(70):
            connections.append(socket.create_connection(("127.0.0.1", tunnel.local_port), 60))
            connections[-1].settimeout(60)
        alive = [connection for connection in connections if echoes(connection)]
        assert len(alive) == 64
        assert all(echoes(connection) for connection in alive)
        alive[0].close()

    def connects() -> bool:
        connections.append(socket.create_connection(("127.0.0.1", tunnel.local_port), 60))
        connections[-1].settimeout(60)
        return echoes(connections[-1])

    async def has_room() -> bool:
        return await asyncio.to_thread(connects)

    try:
        await asyncio.to_thread(use)
        await eventually_async(has_room)
    finally:
        for connection in connections:
            connection.close()
        await call(tunnel.close)


async def test_a_port_without_a_server_closes_the_connection(box, caplog):
    """The SDK has no exception for it. It writes what the server said to its log."""
    caplog.set_level(logging.WARNING, "langsmith.sandbox._tunnel")
    tunnel = await call(box.tunnel, 7008, local_port=free_port())
    try:

        def probe() -> bytes:
            with socket.create_connection(("127.0.0.1", tunnel.local_port), 60) as connection:
                connection.settimeout(60)
                return connection.recv(10)

        assert await asyncio.to_thread(probe) == b""

        async def has_said_why() -> bool:
            return [record.getMessage() for record in caplog.records] == ["tunnel: nothing listening on port 7008 inside sandbox"]

        await eventually_async(has_said_why)
    finally:
        await call(tunnel.close)


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_tunnel_without_a_server_is_a_tunnel_error(own_server, monkeypatch, kind):
    # The waiting times of the SDK would add up to seconds.
    monkeypatch.setattr(Tunnel, "_BACKOFF_BASE", 0.001)
    server = own_server()
    box = await create(server.client(kind))
    tunnel = await call(box.tunnel, 7007, local_port=free_port())
    inner = getattr(tunnel, "_tunnel", tunnel)
    try:
        await asyncio.to_thread(server.kill)

        async def has_noticed() -> bool:
            return inner._yamux.is_closed

        await eventually_async(has_noticed)
        # Each new connection to the tunnel's port makes this call in a thread of the SDK.
        with pytest.raises(TunnelError, match="reconnect failed after 3 attempts"):
            await asyncio.to_thread(inner._ensure_session)
    finally:
        await call(tunnel.close)


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_tunnel_connects_again_after_a_kill_of_the_server(own_server, kind):
    server = own_server()
    box = await create(server.client(kind))
    await echo_server(box)
    tunnels = [await call(box.tunnel, 7007, local_port=free_port())]
    # More than the window of a stream.
    content = os.urandom(512 << 10)

    def connect() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", tunnels[0].local_port), 60)
        connection.settimeout(60)
        return connection

    def use_through_a_kill() -> None:
        """Has an idle and a busy connection when the server is killed. Both end before it starts again."""
        begun = threading.Event()
        with connect() as idle, ThreadPoolExecutor() as others:
            idle.sendall(b"x")
            assert idle.recv(1) == b"x"
            busy = others.submit(exchange_until_the_end, connect(), begun)
            assert begun.wait(60)
            server.kill()
            with contextlib.suppress(ConnectionError):
                assert idle.recv(1) == b""
            assert busy.result(60) > 0

    try:
        for _ in range(KILLS):
            await asyncio.to_thread(use_through_a_kill)
            await asyncio.to_thread(server.start)
            # The same tunnels connect again by themselves.
            tunnels.append(await call(box.tunnel, 7007, local_port=free_port()))
            for tunnel in tunnels:
                assert await asyncio.to_thread(exchange, tunnel.local_port, content) == content
    finally:
        for tunnel in tunnels:
            await call(tunnel.close)
