"""The official clients of Python call every tool over both transports."""

import pytest
from waiting import eventually_async


@pytest.mark.asyncio
async def test_every_tool_of_the_list_can_be_called(tools):
    called = set()

    async def call(tool: str, **arguments) -> dict:
        called.add(tool)
        return await tools.call(tool, **arguments)

    command = (await call("run", command="cat", input=True, wait_s=0))["command"]
    await call("send_input", command=command, text="typed\n")

    async def echoed():
        return "typed" in (await call("read_output", command=command, **{"from": 0}))["output"]

    await eventually_async(echoed, "the input comes back")
    assert not (await call("stop", command=command))["running"]
    assert "42" in (await call("run_code", code="6 * 7"))["values"]
    await call("write_file", path="a.txt", content="one two")
    await call("edit_file", path="a.txt", old="two", new="2")
    assert (await call("read_file", path="a.txt"))["said"].startswith("1\tone 2\n")
    assert len((await call("find_files", pattern="a.*"))["files"]) == 1
    assert (await call("search_files", pattern="one", glob="a.*"))["matches"] == 1
    assert (await call("list_files"))["files"]
    await call("checkpoint")
    await call("rollback")
    made = [(await call("create_box"))["box"], (await call("fork"))["boxes"][0]["box"]]
    assert {found["box"] for found in (await call("list_boxes"))["boxes"]} >= set(made)
    for name in made:
        await call("delete_box", box=name)
    if tools.transport == "http":
        assert (await call("share_port", port=80))["url"].startswith("http")
    assert called == await tools.names()
