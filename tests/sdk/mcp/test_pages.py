"""Web pages: jsdom sends `Origin`, sub-protocols and preflight requests as browsers do, and hides what a server does not open."""

import json

import pytest

from conftest import TOKENS

APP = "https://app.example"


@pytest.fixture
def page(node, own_server, tmp_path):
    """Runs a page of an origin against a server that allows one origin, and returns what the page got."""
    server = own_server(env={"BOXD_SERVER_ALLOWED_ORIGINS": APP, "BOXD_LOG_LEVEL": "trace"})

    def run(origin: str, *token: str) -> dict:
        return json.loads(node("page.cjs", f"127.0.0.1:{server.port}", origin, *token))

    yield run
    server.stop()
    log = (tmp_path / "log").read_text()
    assert "request" in log and not [token for token in TOKENS.values() if token in log]


def test_a_page_of_an_allowed_origin_works_with_a_token_only(page):
    got = page(APP, TOKENS["ann"])
    assert got["socket"] == {"protocol": "box", "answer": {"jsonrpc": "2.0", "id": 1, "result": {"items": [], "total": 0}}}
    assert got["http"] == {"status": 200, "answer": {"jsonrpc": "2.0", "id": 2, "result": {"items": [], "total": 0}}}
    for token in ([], [TOKENS["ann"][1:]]):
        refused = page(APP, *token)
        assert refused["socket"] == {"error": "closed"}
        assert refused["http"]["status"] == 401


def test_a_page_of_another_origin_gets_nothing(page):
    for origin in ("https://evil.example", "https://app.example:8443", "http://app.example"):
        got = page(origin, TOKENS["ann"])
        assert got == {"socket": {"error": "closed"}, "http": {"error": "not readable"}}, origin
