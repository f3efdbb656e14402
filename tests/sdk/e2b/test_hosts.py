"""Ports of sandboxes by their host names, as a browser or a proxy in front of the server asks for them."""

import httpx
from conftest import TOKEN, needs
from e2b import Sandbox
from waiting import eventually


def serving(sandbox) -> None:
    sandbox.files.write("site/index.html", "hello from a port")
    sandbox.commands.run("cd site && python3 -m http.server 8000", background=True)


def ask(server, host: str, path: str = "/", **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers={"Host": host, **headers})


def test_a_port_answers_below_the_domain(sandbox, server):
    host = sandbox.get_host(8000)
    assert host == f"8000-{sandbox.sandbox_id}.box.localhost:{server.port}"
    closed = ask(server, host)
    assert closed.status_code == 502 and "port is not open" in closed.json()["message"]
    serving(sandbox)
    page = eventually(lambda: (answer := ask(server, host)).status_code == 200 and answer)
    assert page.text == "hello from a port"
    # A box with its own origin may have scripts and cookies.
    assert "content-security-policy" not in page.headers
    assert ask(server, host, Origin=f"http://{host}").status_code == 200
    # The path of a port is no address of its own.
    assert ask(server, f"127.0.0.1:{server.port}", f"/e2b/hosts/8000/{sandbox.sandbox_id}/").status_code == 404
    assert ask(server, "evil.example").status_code == 421
    assert ask(server, "x.box.localhost").status_code == 421


def test_a_sandbox_that_is_gone_is_named(server):
    sandbox = Sandbox.create(timeout=120)
    host = sandbox.get_host(8000)
    message = "The sandbox was not found"

    def is_gone(host: str, box: str) -> bool:
        answer = ask(server, host)
        return answer.status_code == 502 and answer.json() == {"sandboxId": box, "message": message, "code": 502}

    assert not is_gone(host, sandbox.sandbox_id)
    api = httpx.Client(base_url=f"{server.url}/e2b/api", headers={"X-API-Key": TOKEN})
    assert api.post(f"/sandboxes/{sandbox.sandbox_id}/pause").status_code == 204
    assert is_gone(host, sandbox.sandbox_id)
    sandbox.kill()
    assert is_gone(host, sandbox.sandbox_id)
    assert is_gone(f"8000-{'0' * 32}.box.localhost", "0" * 32)


@needs("Sandbox.create(network)")
def test_a_private_port_needs_a_token(server):
    sandbox = Sandbox.create(timeout=120, network={"allow_public_traffic": False})
    try:
        serving(sandbox)
        host = sandbox.get_host(8000)
        token = {"e2b-traffic-access-token": sandbox.traffic_access_token}
        eventually(lambda: ask(server, host, **token).status_code == 200)
        assert ask(server, host).status_code == 403
        # The token for ports opens neither files nor commands.
        envd = f"49983-{sandbox.sandbox_id}.box.localhost"
        wrong = {"X-Access-Token": sandbox.traffic_access_token}
        assert ask(server, envd, "/files?path=/etc/hostname", **wrong).status_code == 502
    finally:
        sandbox.kill()


def test_the_api_and_sandboxes_have_host_names(own_server):
    server = own_server(env={"BOXD_SERVER_BOX_DOMAIN": "boxes.example"})
    headers = {"Host": "api.boxes.example", "X-API-KEY": TOKEN}
    made = httpx.post(f"{server.url}/v2/sandboxes", headers=headers, json={"templateID": "base"}).json()
    assert made["domain"] == "boxes.example"
    envd = f"49983-{made['sandboxID']}.boxes.example"
    health = ask(server, envd, "/health", **{"X-Access-Token": made["envdAccessToken"]})
    assert health.status_code == 204
    gone = httpx.delete(f"{server.url}/sandboxes/{made['sandboxID']}", headers=headers)
    assert gone.status_code == 204
    assert ask(server, envd, "/health", **{"X-Access-Token": made["envdAccessToken"]}).status_code == 502


def test_a_page_has_no_rights_of_its_own(own_server):
    """A server of one machine without tokens trusts its programs, but no page in a browser, also not one of a box."""
    server = own_server(has_tokens=False)
    made = httpx.post(f"{server.url}/e2b/api/v2/sandboxes", json={"templateID": "base"})
    assert made.status_code == 201, made.text
    box = made.json()["sandboxID"]
    page = {"Origin": f"http://3000-{box}.box.localhost:{server.port}"}
    for headers in [page, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "null"}]:
        for method, host, path in [
            ("POST", "api.box.localhost", "/v2/sandboxes"),
            ("DELETE", "api.box.localhost", f"/sandboxes/{box}"),
            ("POST", f"49983-{box}.box.localhost", "/process.Process/List"),
            ("POST", f"49983-{box}.box.localhost", "/files?path=/tmp/x"),
            ("GET", f"49983-{box}.box.localhost", "/files?path=/etc/hostname"),
            ("POST", f"49999-{box}.box.localhost", "/execute"),
        ]:
            answer = httpx.request(method, server.url + path, headers={"Host": host, **headers}, json={})
            assert answer.status_code == 403, (headers, host, path, answer.text)
            assert "access-control-allow-origin" not in answer.headers
        # The handlers of signed files and of ports check each request: a page has neither a signature nor a token.
        for host in [f"127.0.0.1:{server.port}", f"49983-{box}.box.localhost", "api.box.localhost"]:
            path = "/files?path=/etc/hostname&signature=v1_" + "A" * 43
            assert ask(server, host, path, **headers).status_code == 401, host
        assert ask(server, f"127.0.0.1:{server.port}", "/files?path=/etc/hostname", **headers).status_code == 401
    # A program on this machine is the owner.
    assert httpx.delete(f"{server.url}/e2b/api/sandboxes/{box}").status_code == 204
