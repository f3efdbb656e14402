"""The official clients of Node call every tool over both transports."""

import pytest

from conftest import IS_NEW, TOKENS
from program import BOXD

# Each environment installs one of them.
WHICH = "new" if IS_NEW else "old"


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_every_tool_from_node(server, node, transport):
    target = [BOXD] if transport == "stdio" else [server.url("/mcp?box=node"), TOKENS["ann"]]
    assert "all tools called" in node("client.cjs", WHICH, *target)
