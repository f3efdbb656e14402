"""E2B's SDK of npm."""

from conftest import node


def test_the_sdk_of_npm(server):
    assert node(server, "sandbox.js").splitlines()[-1] == "done"


def test_the_provider_of_computesdk(server):
    assert node(server, "computesdk.js").splitlines()[-1] == "done"
