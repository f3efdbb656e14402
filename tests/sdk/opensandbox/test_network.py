"""Network policies, and the ports of sandboxes."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import threading
import time
import uuid

import httpx
import pytest
import websockets.sync.client
from conftest import ANN, BOB, created
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule
from waiting import eventually


def rules(policy: NetworkPolicy) -> set[tuple[str, str]]:
    return {(rule.action, rule.target) for rule in policy.egress}


def allow(target: str) -> NetworkRule:
    return NetworkRule(action="allow", target=target)


def deny(target: str) -> NetworkRule:
    return NetworkRule(action="deny", target=target)


def test_a_policy_changes_while_the_sandbox_runs(config):
    policy = NetworkPolicy(default_action="deny", egress=[deny("bad.example.com"), allow("*.example.com")])
    with created(config, network_policy=policy) as sandbox:
        found = sandbox.get_egress_policy()
        assert found.default_action == "deny"
        assert rules(found) == {("deny", "bad.example.com"), ("allow", "*.example.com")}
        sandbox.patch_egress_rules([allow("pypi.org"), deny("bad.example.com")])
        assert ("allow", "pypi.org") in rules(sandbox.get_egress_policy())
        sandbox.patch_egress_rules([deny("pypi.org")])
        found = rules(sandbox.get_egress_policy())
        assert ("deny", "pypi.org") in found and ("allow", "pypi.org") not in found, "a target has one rule"
        sandbox.delete_egress_rules(["pypi.org", "never.there"])
        assert rules(sandbox.get_egress_policy()) == {("deny", "bad.example.com"), ("allow", "*.example.com")}
        assert sandbox.get_egress_policy().default_action == "deny"


def test_an_order_that_matters_is_refused(config):
    policy = NetworkPolicy(default_action="deny", egress=[allow("*.example.com"), deny("bad.example.com")])
    with pytest.raises(SandboxApiException) as error:
        with created(config, network_policy=policy):
            pass
    assert error.value.status_code == 400 and "deny" in str(error.value)
    with created(config) as sandbox:
        assert sandbox.get_egress_policy().default_action == "allow"
        sandbox.patch_egress_rules([deny("*.example.com")])
        with pytest.raises(SandboxApiException) as error:
            sandbox.patch_egress_rules([allow("good.example.com")])
        assert error.value.status_code == 400
        with pytest.raises(SandboxApiException) as error:
            sandbox.patch_egress_rules([allow("not a host")])
        assert error.value.status_code == 400


def test_the_lifecycle_api_has_the_policy_too(server, sandbox):
    with server.api() as api:
        path = f"/sandboxes/{sandbox.id}/networkpolicy"
        body = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "a.example"}]}
        put = api.put(path, json=body)
        assert put.status_code == 200 and put.json()["policy"] == body
        assert set(put.json()) >= {"status", "mode", "enforcementMode", "policy"}
        patched = api.patch(path, json=[{"action": "deny", "target": "b.example"}]).json()["policy"]
        assert len(patched["egress"]) == 2
        left = api.request("DELETE", path, json=["a.example"]).json()["policy"]
        assert left["egress"] == [{"action": "deny", "target": "b.example"}] == api.get(path).json()["policy"]["egress"]
        maybe = api.patch(path, json=[{"action": "maybe", "target": "x"}])
        assert (maybe.status_code, maybe.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER")
        same = [{"action": "deny", "target": target} for target in ("C.example.", "c.example", "::ffff:1.2.3.4", "1.2.3.4")]
        patched = api.patch(path, json=same).json()["policy"]["egress"]
        assert {rule["target"] for rule in patched} == {"b.example", "c.example", "1.2.3.4"} and len(patched) == 3
        left = api.request("DELETE", path, json=["B.example.", "c.example.", "::ffff:1.2.3.4"]).json()["policy"]
        assert left["egress"] == []


def test_changes_of_a_policy_at_once_lose_no_rule(server):
    with created(server.config()) as sandbox, server.api() as api, concurrent.futures.ThreadPoolExecutor(32) as pool:
        path = f"/sandboxes/{sandbox.id}/networkpolicy"
        found = api.get(f"/sandboxes/{sandbox.id}/endpoints/18080").json()
        # Holders of a header have another name for the sandbox.
        inside = [httpx.Client(base_url=f"http://{found['endpoint']}", headers=found["headers"], timeout=60) for _ in range(16)]
        clients = [(client, "/policy") for client in inside] + [(server.api(), path) for _ in range(16)]
        barrier = threading.Barrier(32)

        def change(method, number, body):
            client, at = clients[number]
            barrier.wait(120)
            return client.request(method, at, json=body).status_code

        for _ in range(3):
            assert api.put(path, json={"defaultAction": "deny", "egress": []}).status_code == 200
            added = [pool.submit(change, "PATCH", n, [{"action": "allow", "target": f"host{n}.example"}]) for n in range(32)]
            assert [done.result() for done in added] == [200] * 32
            targets = {rule["target"] for rule in api.get(path).json()["policy"]["egress"]}
            assert targets == {f"host{n}.example" for n in range(32)}
            removed = [pool.submit(change, "DELETE", n, [f"host{n}.example"]) for n in range(32)]
            assert [done.result() for done in removed] == [200] * 32
            assert api.get(path).json()["policy"]["egress"] == []
        for client, _ in clients:
            client.close()


def test_the_vault_is_not_served(sandbox):
    with pytest.raises(SandboxApiException) as error:
        sandbox.credential_vault.get()
    assert error.value.status_code == 501
    vault = sandbox.credential_vault
    for call in [vault.delete, vault.list_credentials, vault.list_bindings, lambda: vault.get_credential("a"), lambda: vault.get_binding("a")]:
        with pytest.raises(SandboxApiException) as error:
            call()
        assert error.value.status_code == 501


@pytest.fixture
def web(sandbox):
    """A port of the sandbox with a server."""
    port = 20000 + uuid.uuid4().int % 20000
    sandbox.files.write_file("/tmp/web/page", "hello from the sandbox")
    sandbox.commands.run(f"cd /tmp/web && exec python3 -m http.server {port}", opts=RunCommandOpts(background=True))
    eventually(lambda: sandbox.commands.run(f"bash -c '</dev/tcp/127.0.0.1/{port}'").exit_code == 0)
    return port


def test_a_port_is_reached_at_its_endpoint(server, sandbox, web):
    endpoint = sandbox.get_endpoint(web)
    headers = dict(endpoint.headers)
    if "/proxy/" in endpoint.endpoint:
        headers["OPEN-SANDBOX-API-KEY"] = ANN
    address = f"http://{endpoint.endpoint}"
    assert httpx.get(f"{address}/page", headers=headers).text == "hello from the sandbox"
    assert httpx.get(f"{address}/none", headers=headers).status_code == 404
    with server.execd(sandbox.id) as execd:
        assert execd.get(f"/proxy/{web}/page").text == "hello from the sandbox"
        assert execd.get(f"/proxy/{web}/").status_code == 200
        assert execd.get("/proxy/0/page").status_code == 400
    with server.api() as api:
        through = f"/sandboxes/{sandbox.id}/proxy/44772/proxy/{web}"
        assert api.get(f"{through}/page").text == "hello from the sandbox"
        assert api.get(f"{through}/").status_code == 200
    unused = sandbox.get_endpoint(4000)
    answer = httpx.get(f"http://{unused.endpoint}/", headers=headers)
    code = "BACKEND_CONNECTION_FAILED" if "/proxy/" in unused.endpoint else "BAD_GATEWAY"
    assert (answer.status_code, answer.json()["code"]) == (502, code)


def test_a_port_that_speaks_no_http_is_a_failed_response(server, sandbox):
    port = 20000 + uuid.uuid4().int % 20000
    script = f"import socket\nlistener = socket.create_server(('127.0.0.1', {port}))\nwhile True:\n    peer = listener.accept()[0]\n    peer.sendall(b'no http')\n    peer.close()\n"
    sandbox.files.write_file("/tmp/odd.py", script)
    sandbox.commands.run("exec python3 /tmp/odd.py", opts=RunCommandOpts(background=True))
    eventually(lambda: sandbox.commands.run(f"bash -c '</dev/tcp/127.0.0.1/{port}'").exit_code == 0)
    with server.api() as api:
        answer = api.get(f"/sandboxes/{sandbox.id}/proxy/{port}/")
    assert (answer.status_code, answer.json()["code"]) == (502, "BACKEND_RESPONSE_FAILED")


def test_errors_inside_the_proxy_have_a_body(server, sandbox):
    with server.api() as api, server.execd(sandbox.id) as execd:
        proxied = f"/sandboxes/{sandbox.id}/proxy/44772"
        for method, path, expected in [
            ("GET", "/none", (404, "NOT_FOUND")),
            ("PUT", "/ping", (405, "METHOD_NOT_ALLOWED")),
            ("POST", "/command", (400, "INVALID_REQUEST_BODY")),
        ]:
            for client, path in [(api, proxied + path), (execd, path)]:
                answer = client.request(method, path, content=b"[]")
                assert (answer.status_code, answer.json()["code"]) == expected, path
                assert "struct" not in answer.text
        for path in ["/sandboxes/%ff", f"/sandboxes/{sandbox.id}/endpoints/%ff", "/snapshots/%ff"]:
            answer = api.get(path)
            assert (answer.status_code, answer.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER")


def test_a_signed_endpoint_expires(server, web):
    with created(server.config()) as sandbox:
        with pytest.raises(SandboxApiException):
            sandbox.get_signed_endpoint(web, int(time.time()) - 5)
        until = int(time.time()) + 3
        address = f"http://{sandbox.get_signed_endpoint(44772, until).endpoint}/ping"
        headers = sandbox.get_signed_endpoint(44772, until).headers
        assert httpx.get(address, headers=headers).status_code == 200
        eventually(lambda: httpx.get(address, headers=headers).status_code == 401)


def test_tokens_do_not_reach_the_sandbox(server, sandbox):
    port = 20000 + uuid.uuid4().int % 20000
    script = (
        "import http.server\n"
        "class Echo(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        body = str(self.headers).encode()\n"
        "        self.send_response(200)\n"
        "        self.send_header('Content-Length', str(len(body)))\n"
        "        self.end_headers()\n"
        "        self.wfile.write(body)\n"
        f"http.server.HTTPServer(('127.0.0.1', {port}), Echo).serve_forever()\n"
    )
    sandbox.files.write_file("/tmp/echo.py", script)
    sandbox.commands.run("exec python3 /tmp/echo.py", opts=RunCommandOpts(background=True))
    eventually(lambda: sandbox.commands.run(f"bash -c '</dev/tcp/127.0.0.1/{port}'").exit_code == 0)
    with server.api() as api:
        headers = {"OpenSandbox-Access-Renew": "skip", "X-EXECD-ACCESS-TOKEN": "x", "X-Mine": "passed"}
        echoed = api.get(f"/sandboxes/{sandbox.id}/proxy/{port}/", headers=headers).text.lower()
    assert "x-mine: passed" in echoed
    for secret in [ANN, "open-sandbox-api-key", "x-execd-access-token", "access-renew"]:
        assert secret.lower() not in echoed


# Accepts websockets and sends each message back, with the path and the protocol of the request first.
ECHO = """
import base64, hashlib, socketserver

class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        path = self.rfile.readline().split()[1]
        headers = {}
        while line := self.rfile.readline().strip():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        key = headers[b"sec-websocket-key"] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key).digest())
        chosen = headers.get(b"sec-websocket-protocol", b"")
        head = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Accept: " + accept]
        head += [b"Sec-WebSocket-Protocol: " + chosen] if chosen else []
        self.wfile.write(b"\\r\\n".join(head) + b"\\r\\n\\r\\n")
        self.send(0x81, path)
        while frame := self.rfile.read(2):
            size = frame[1] & 127
            if size > 125:
                size = int.from_bytes(self.rfile.read(2 if size == 126 else 8), "big")
            mask = self.rfile.read(4)
            self.send(frame[0], bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.rfile.read(size))))
            if frame[0] & 15 == 8:
                return

    def send(self, first, data):
        size = bytes([len(data)]) if len(data) < 126 else bytes([127]) + len(data).to_bytes(8, "big")
        self.wfile.write(bytes([first]) + size + data)

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True

Server(("127.0.0.1", PORT), Echo).serve_forever()
"""


def test_a_websocket_passes_through_the_proxy(server, sandbox):
    port = 20000 + uuid.uuid4().int % 20000
    sandbox.files.write_file("/tmp/echo_socket.py", ECHO.replace("PORT", str(port)))
    sandbox.commands.run("exec python3 /tmp/echo_socket.py", opts=RunCommandOpts(background=True))
    eventually(lambda: sandbox.commands.run(f"bash -c '</dev/tcp/127.0.0.1/{port}'").exit_code == 0)
    endpoint = sandbox.get_endpoint(port)
    through = f"{server.domain}/v1/sandboxes/{sandbox.id}/proxy/{port}"
    for address, headers in [
        (through, {"OPEN-SANDBOX-API-KEY": ANN}),
        (endpoint.endpoint, {**endpoint.headers, "OPEN-SANDBOX-API-KEY": ANN}),
    ]:
        url = f"ws://{address}/a/b?c=d"
        with websockets.sync.client.connect(url, additional_headers=headers, subprotocols=["own"]) as socket:
            assert socket.subprotocol == "own" and socket.recv(timeout=60) == "/a/b?c=d"
            for message in ["text é", b"\0\xff", "x" * 200_000]:
                socket.send(message)
                assert socket.recv(timeout=60) == message
            socket.close(4321, "mine")
            assert socket.close_code == 4321
    for headers in [{}, {"OPEN-SANDBOX-API-KEY": "wrong"}, {"OPEN-SANDBOX-API-KEY": BOB}]:
        with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
            websockets.sync.client.connect(f"ws://{through}/", additional_headers=headers)
        assert refused.value.response.status_code == (404 if BOB in headers.values() else 401)


def terminal(server, sandbox, session, query="", proxy=False):
    path = f"pty/{session}/ws{query}"
    if proxy:
        url = f"ws://{server.domain}/v1/sandboxes/{sandbox.id}/proxy/44772/{path}"
        return websockets.sync.client.connect(url, additional_headers={"OPEN-SANDBOX-API-KEY": ANN})
    with server.execd(sandbox.id) as execd:
        url = str(execd.base_url).replace("http://", "ws://") + path
        token = execd.headers["X-EXECD-ACCESS-TOKEN"]
    return websockets.sync.client.connect(url, additional_headers={"X-EXECD-ACCESS-TOKEN": token})


def read_until(socket, condition, limit=120):
    """Reads messages until one meets the condition; returns all of them."""
    messages, end = [], time.monotonic() + limit
    while True:
        messages.append(socket.recv(timeout=max(0.1, end - time.monotonic())))
        if condition(messages):
            return messages


def output(messages, channel=1) -> bytes:
    return b"".join(message[1:] for message in messages if isinstance(message, bytes) and message[0] == channel)


def test_a_terminal_is_a_websocket(server, sandbox, execd):
    made = execd.post("/pty", json={"cwd": "/tmp"})
    assert made.status_code == 201
    session = made.json()["session_id"]
    assert execd.get(f"/pty/{session}").json() == {"session_id": session, "running": False, "output_offset": 0}
    with terminal(server, sandbox, session) as socket:
        first = json.loads(socket.recv(timeout=60))
        assert first == {"type": "connected", "session_id": session, "mode": "pty"}
        socket.send(json.dumps({"type": "resize", "cols": 91, "rows": 17}))
        socket.send(b"\0stty size; pwd; echo $((40+2))\n")
        messages = read_until(socket, lambda seen: b"42\r\n" in output(seen))
        assert b"17 91" in output(messages) and b"/tmp" in output(messages)
        socket.send(json.dumps({"type": "ping"}))
        read_until(socket, lambda seen: seen[-1] == '{"type":"pong"}')
        socket.send(json.dumps({"type": "dance"}))
        read_until(socket, lambda seen: "INVALID_FRAME" in str(seen[-1]))
        # A second client needs to take over.
        with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
            terminal(server, sandbox, session)
        assert refused.value.response.status_code == 409
        status = execd.get(f"/pty/{session}").json()
        assert status["running"] and status["output_offset"] > 0
        with terminal(server, sandbox, session, "?takeover=1&since=0") as taken:
            replayed = read_until(taken, lambda seen: isinstance(seen[-1], str))
            assert replayed[0][0] == 3 and replayed[0][1:9] == bytes(8)
            assert b"42\r\n" in b"".join(message[9:] for message in replayed[:-1])
            with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
                while True:
                    socket.recv(timeout=60)
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, "TAKEN_OVER")
            taken.send(b"\0exit 5\n")
            messages = read_until(taken, lambda seen: '"exit"' in str(seen[-1]))
            assert json.loads(messages[-1]) == {"type": "exit", "exit_code": 5}
            with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
                taken.recv(timeout=60)
            assert closed.value.rcvd.code == 1000
    assert execd.delete(f"/pty/{session}").status_code == 200
    assert execd.get(f"/pty/{session}").json()["code"] == "CONTEXT_NOT_FOUND"
    assert execd.delete(f"/pty/{session}").status_code == 404


def test_a_terminal_needs_a_directory(execd):
    for missing in ["/no/such/directory", "~/none", "/etc/passwd"]:
        answer = execd.post("/pty", json={"cwd": missing})
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST_BODY"), missing


def test_a_terminal_starts_once_for_two_first_clients(server, sandbox, execd):
    barrier = threading.Barrier(2)

    def connect(session, query):
        barrier.wait(120)
        try:
            return terminal(server, sandbox, session, query, proxy=True)
        except websockets.exceptions.InvalidStatus as refused:
            return refused.response

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for query in ["", "?pty=0"] * 4:
            mark = f"/tmp/started-{uuid.uuid4().hex}"
            # Without output, only the record of the terminal shows its client.
            body = {"command": f"echo $$ >> {mark}; read -r line; echo got $line"}
            session = execd.post("/pty", json=body).json()["session_id"]
            results = [done.result() for done in [pool.submit(connect, session, query) for _ in range(2)]]
            refused = [result for result in results if not hasattr(result, "recv")]
            assert [(response.status_code, json.loads(response.body)["code"]) for response in refused] == [(409, "ALREADY_CONNECTED")]
            socket = next(result for result in results if hasattr(result, "recv"))
            with socket:
                assert json.loads(socket.recv(timeout=60))["type"] == "connected"
                socket.send(b"\0one\n")
                read_until(socket, lambda seen: b"got one" in output(seen))
            assert len(sandbox.commands.run(f"cat {mark}").logs.stdout) == 1
            execd.delete(f"/pty/{session}")


def test_a_terminal_is_reached_through_the_proxy(server, sandbox):
    with server.api() as api:
        base = f"/sandboxes/{sandbox.id}/proxy/44772/pty"
        session = api.post(base, json={"cwd": "/tmp"}).raise_for_status().json()["session_id"]
        with terminal(server, sandbox, session, proxy=True) as socket:
            assert json.loads(socket.recv(timeout=60))["session_id"] == session
            socket.send(json.dumps({"type": "resize", "cols": 91, "rows": 17}))
            socket.send(b"\0stty size; pwd; exit 6\n")
            messages = read_until(socket, lambda seen: '"exit"' in str(seen[-1]))
            assert b"17 91" in output(messages) and b"/tmp" in output(messages)
            assert json.loads(messages[-1]) == {"type": "exit", "exit_code": 6}
        assert api.delete(f"{base}/{session}").status_code == 200


def test_a_terminal_may_have_pipes(server, sandbox, execd):
    session = execd.post("/pty", json={"command": "cat; echo done >&2"}).json()["session_id"]
    with terminal(server, sandbox, session, "?pty=0") as socket:
        assert '"pipe"' in socket.recv(timeout=60)
        socket.send(b"\0through a pipe\n")
        messages = read_until(socket, lambda seen: b"through a pipe\n" in output(seen))
        assert b"\r\n" not in output(messages)
        socket.send('{"type":"signal","signal":"SIGTERM"}')
        read_until(socket, lambda seen: '"exit"' in str(seen[-1]))


@pytest.mark.parametrize("mode", ["pipe", "pty"])
def test_unread_input_does_not_stop_a_terminal(server, sandbox, execd, mode):
    session = execd.post("/pty", json={"command": "sleep 600"}).json()["session_id"]
    with terminal(server, sandbox, session, "?pty=0" if mode == "pipe" else "") as socket:
        assert json.loads(socket.recv(timeout=60))["mode"] == mode
        for _ in range(1200):
            socket.send(b"\0" + b"x" * 999 + b"\n")
        socket.send(json.dumps({"type": "ping"}))
        read_until(socket, lambda seen: seen[-1] == '{"type":"pong"}')
        socket.send('{"type":"signal","signal":"SIGTERM"}')
        read_until(socket, lambda seen: '"exit"' in str(seen[-1]))


def test_unread_input_has_a_limit(server, sandbox, execd):
    session = execd.post("/pty", json={"command": "sleep 600"}).json()["session_id"]
    with terminal(server, sandbox, session, "?pty=0") as socket:
        socket.recv(timeout=60)
        for _ in range(5):
            socket.send(b"\0" + b"x" * 1024 * 1024)
        seen = read_until(socket, lambda seen: "STDIN_WRITE_FAILED" in str(seen[-1]))
        assert "4194304 waiting bytes" in seen[-1]
        socket.send('{"type":"signal","signal":"SIGTERM"}')
        read_until(socket, lambda seen: '"exit"' in str(seen[-1]))


def test_a_terminal_that_reads_gets_long_input_whole(server, sandbox, execd):
    session = execd.post("/pty", json={"command": "head -c 20971520 | sha256sum"}).json()["session_id"]
    piece = bytes(range(256)) * 4096
    with terminal(server, sandbox, session, "?pty=0") as socket:
        socket.recv(timeout=60)
        for _ in range(20):
            socket.send(b"\0" + piece)
        messages = read_until(socket, lambda seen: '"exit"' in str(seen[-1]))
    assert output(messages).split()[0].decode() == hashlib.sha256(piece * 20).hexdigest()
