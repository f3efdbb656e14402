"""Every tool over both transports and in both lifecycles."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import subprocess
import urllib.request

import pytest

from conftest import MODES, TOKENS, over_stdio
from program import BOXD, environment
from waiting import eventually_async

# One red pixel.
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
)

ALL = {
    "run", "read_output", "send_input", "stop", "run_code", "read_file", "write_file", "edit_file", "find_files",
    "search_files", "list_files", "create_box", "list_boxes", "delete_box", "fork", "checkpoint", "rollback", "share_port",
}


@pytest.mark.asyncio
async def test_tools_are_described_for_models_and_for_users(tools):
    listed = {tool["name"]: tool for tool in await tools.list()}
    assert set(listed) == (ALL if tools.transport == "http" else ALL - {"share_port"})
    for name, tool in listed.items():
        assert tool["title"] and tool["description"], name
        # A schema makes data mandatory, and Codex shows no image beside data.
        if name in ("run_code", "read_file"):
            assert "outputSchema" not in tool
        else:
            assert tool["outputSchema"]["type"] == "object", name
        assert isinstance(tool["annotations"]["readOnlyHint"], bool), name
    assert listed["read_file"]["annotations"]["readOnlyHint"]
    assert listed["delete_box"]["annotations"]["destructiveHint"]
    assert listed["run"]["annotations"]["openWorldHint"]
    assert listed["run"]["inputSchema"]["required"] == ["command"]


@pytest.mark.asyncio
async def test_commands_run_and_keep_their_files(tools):
    ran = await tools.call("run", command="echo out; echo err >&2; echo $WHO > kept; exit 3", env={"WHO": "me"})
    assert sorted(ran["output"].split()) == ["err", "out"] and ran["exit_code"] == 3 and not ran["running"]
    assert "exit 3 in " in ran["said"] and f"box {ran['box']}" in ran["said"]
    assert (await tools.call("run", command="cat kept"))["output"] == "me\n"
    await tools.call("run", command="cd /tmp; V=1", shell="s")
    assert (await tools.call("run", command="echo $PWD $V", shell="s"))["output"] == "/tmp 1\n"
    killed = await tools.call("run", command="sleep 1000", timeout_s=1)
    assert killed["ended_by"] == "the time limit was reached" and "exit_code" not in killed
    assert "command" in await tools.refused("run", cmd="ls")
    assert "not_found" in await tools.refused("run", command="ls", box="no-such-box")


@pytest.mark.asyncio
async def test_errors_name_arguments_and_tools(tools):
    await tools.call("run", command="printf one > f; cat", shell="sh", wait_s=0)
    ran = await tools.call("run", command="sleep 1000", wait_s=0)
    for expected, tool, arguments in [
        ("command: must not be blank", "run", {"command": " "}),
        ("command: must not be blank", "run", {"command": " ", "shell": "sh"}),
        ("box: ", "run", {"command": "ls", "box": "../x"}),
        ("shell: ", "run", {"command": "ls", "shell": "../x"}),
        ("context: ", "run_code", {"code": "1", "context": "sh"}),
        ("command: its stdin is not open; start it with `input`", "send_input", {"command": ran["command"], "text": "x"}),
        ("pattern: ", "find_files", {"pattern": "["}),
        ("glob: ", "search_files", {"pattern": "x", "glob": "["}),
        ("old: the file has 0 occurrences", "edit_file", {"path": "f", "old": "two", "new": "2"}),
        ("name: the box has no such checkpoint; save one with checkpoint", "rollback", {}),
        ("command: ", "read_output", {"command": "x" * 300}),
        ("prefix: ", "fork", {"prefix": "../x"}),
    ]:
        text = await tools.refused(tool, **arguments)
        assert text.split(": ", 1)[1].startswith(expected), (tool, text)
    await tools.call("stop", command=ran["command"])


@pytest.mark.asyncio
async def test_a_long_command_continues_and_takes_input(tools):
    ran = await tools.call("run", command="read line; echo got $line; cat", input=True, wait_s=0)
    assert ran["running"] and "still running" in ran["said"]
    command = ran["command"]
    sent = await tools.call("send_input", command=command, text="first\n")

    async def got():
        read = await tools.call("read_output", command=command, wait_s=1)
        return read["output"] == "got first\n" and read["running"]

    assert sent["command"] == command
    await eventually_async(got, "the first line arrives")
    await tools.call("send_input", command=command, text="second", close=True)
    read = await tools.call("read_output", command=command, **{"from": len("got first\n")}, wait_s=60)
    assert read["output"] == "second" and read["exit_code"] == 0
    ran = await tools.call("run", command="printf 'password: '; read x; echo ok $x", input=True, wait_s=0)

    async def asked():
        return (await tools.call("read_output", command=ran["command"]))["output"] == "password: "

    await eventually_async(asked, "the prompt arrives")
    sent = await tools.call("send_input", command=ran["command"], text="s\n", **{"from": 0})
    assert sent["from"] == 0 and sent["output"].startswith("password: ")
    ran = await tools.call("run", command="sleep 1000 & sleep 1000", wait_s=0)
    stopped = await tools.call("stop", command=ran["command"])
    assert not stopped["running"] and stopped["ended_by"]
    assert "not_found" in await tools.refused("read_output", command="no-such-command")


@pytest.mark.asyncio
async def test_input_that_a_command_does_not_read_is_counted(tools):
    ran = await tools.call("run", command="until [ -e go ]; do sleep 0.1; done; wc -c", input=True, wait_s=0)
    command, text = ran["command"], "x" * 300_000
    said = await tools.refused("send_input", command=command, text=text)
    found = re.match(r"timeout: text: the command does not read its input: (\d+) of 300000 bytes", said)
    assert found, said
    await tools.call("write_file", path="go", content="")
    await tools.call("send_input", command=command, text=text[int(found[1]):], close=True)
    read = await tools.call("read_output", command=command, wait_s=120)
    assert read["output"].strip() == "300000" and read["exit_code"] == 0



@pytest.mark.asyncio
async def test_a_long_output_is_cut_and_read_on_to_its_last_byte(tools):
    whole = "".join(f"{number} ä€😀\n" for number in range(20_000)).encode()
    script = "i=0; while [ $i -lt 20000 ]; do echo $i 'ä€😀'; i=$((i+1)); done"
    ran = await tools.call("run", command=script, wait_s=120)
    assert ran["exit_code"] == 0 and len((ran["output"] + ran["tail"]).encode()) <= 30_000
    assert f"from {ran['omitted']['from']}" in ran["said"]
    assert ran["next"] == len(whole)
    # The parts that the answer has, and what lies between them.
    head, tail = ran["output"], ran["tail"]
    assert ran["from"] == 0 and ran["omitted"]["from"] == len(head.encode())
    parts, at, end = [head.encode()], ran["omitted"]["from"], ran["omitted"]["from"] + ran["omitted"]["bytes"]
    while at < end:
        read = await tools.call("read_output", command=ran["command"], **{"from": at})
        assert read["next"] > at and "\ufffd" not in read["output"]
        parts.append(read["output"].encode()[: end - at])
        at = read["next"]
    assert b"".join(parts) + tail.encode() == whole
    last = await tools.call("read_output", command=ran["command"], tail=9)
    assert whole.endswith(last["output"].encode()) and last["next"] == len(whole)


@pytest.mark.asyncio
async def test_progress_is_reported_while_a_command_runs(tools):
    seen = []

    async def progress(elapsed, total, message):
        seen.append((elapsed, message))

    await tools.call("run", progress=progress, command="echo building; sleep 3; echo done")
    assert seen and "building" in [message for _, message in seen]
    times = [elapsed for elapsed, _ in seen]
    assert times == sorted(times)
    seen.clear()
    ran = await tools.call("run", command="echo waiting; sleep 3", wait_s=0)
    await tools.call("read_output", progress=progress, command=ran["command"], wait_s=60)
    assert "waiting" in [message for _, message in seen]


@pytest.mark.asyncio
async def test_a_cancelled_call_kills_the_process_tree(tools):
    await check_cancellation(tools)


async def check_cancellation(tools):
    beat = "beat() { while :; do date +%s%N > $1; sleep 0.1; done; }; rm -f one other; beat one & beat other"

    async def beats():
        return (await tools.call("run", command="cat one other 2>&1"))["output"]

    async def started():
        async def both():
            return "No such file" not in await beats()

        await eventually_async(both, "both processes run")

    await tools.call("run", command="rm -f one other")
    await tools.cancelled("run", started, command=beat, wait_s=600)

    async def still():
        before = await beats()
        await asyncio.sleep(2)
        return before == await beats()

    await eventually_async(still, "both processes are gone")


@pytest.mark.asyncio
async def test_code_keeps_its_state_and_shows_values_and_images(tools):
    await tools.call("run_code", code="x = 20")
    ran = await tools.call("run_code", code="print('hi')\nx * 2 + 2")
    assert ran["output"] == "hi\n" and ran["values"] == "42\n" and ran["said"].startswith("hi\n42\n[exit 0")
    code = f"class P:\n  def _repr_png_(self):\n    import base64\n    return base64.b64decode('{PIXEL}')\nP()"
    shown = await tools.call("run_code", code=code)
    images = [part for part in shown["content"] if part["type"] == "image"]
    assert [(image["mimeType"], image["data"]) for image in images] == [("image/png", PIXEL)]
    # A client that shows data shows no image beside it.
    assert "output" not in shown
    large = await tools.call("run_code", code=f"class L:\n  def _repr_png_(self): return b'x' * 700_000\ndisplay(L())\n1")
    assert "an image is left out" in large["said"] and len(large["content"]) == 1
    failed = await tools.call("run_code", code="1/0")
    assert failed["output"].endswith("ZeroDivisionError: division by zero\n") and "values" not in failed
    assert failed["said"].count("Traceback") == 1 and "\n\n" not in failed["said"]
    apart = await tools.call("run_code", code="x", context="other")
    assert "NameError" in apart["output"]


@pytest.mark.asyncio
async def test_files_are_written_read_edited_and_found(tools):
    written = await tools.call("write_file", path="src/main.py", content="one\ntwo\none\n")
    assert written["size"] == 12
    read = await tools.call("read_file", path="src/main.py")
    assert read["said"].startswith("1\tone\n2\ttwo\n3\tone\n[") and "reads on" not in read["said"]
    part = await tools.call("read_file", path="src/main.py", offset=2, limit=1)
    assert part["said"].startswith("2\ttwo\n[") and "offset 3 reads on" in part["said"]
    assert "reads on" not in (await tools.call("read_file", path="src/main.py", limit=3))["said"]
    assert "2 occurrences" in await tools.refused("edit_file", path="src/main.py", old="one", new="1")
    assert "0 occurrences" in await tools.refused("edit_file", path="src/main.py", old="three", new="3")
    edited = await tools.call("edit_file", path="src/main.py", old="two", new="2")
    assert edited["replaced"] == 1 and edited["path"] == written["path"]
    assert (await tools.call("edit_file", path="src/main.py", old="one", new="1", all=True))["replaced"] == 2
    assert (await tools.call("read_file", path="src/main.py"))["said"].startswith("1\t1\n2\t2\n3\t1\n[")
    found = await tools.call("find_files", pattern="*.py")
    assert [file["path"].rsplit("/", 2)[-2:] for file in found["files"]] == [["src", "main.py"]]
    lines = await tools.call("search_files", pattern="^2$", glob="*.py", context=1)
    assert lines["matches"] == 1 and [line["text"] for line in lines["lines"]] == ["1", "2", "1"]
    listed = await tools.call("list_files")
    assert any(file["path"].endswith("src/main.py") for file in listed["files"])
    assert not any("/./" in file["path"] for file in [*listed["files"], *found["files"], *lines["lines"]])
    await tools.call("run", command=f"echo {PIXEL} | base64 -d > dot.png; head -c 100 /dev/zero > zeros")
    image = (await tools.call("read_file", path="dot.png"))["content"][1]
    assert base64.b64decode(image["data"]) == base64.b64decode(PIXEL) and image["mimeType"] == "image/png"
    assert "binary" in await tools.refused("read_file", path="zeros")
    # The official client accepts 1 MiB at once over HTTP.
    grow = "cp dot.png large.png; cp dot.png huge.png; truncate -s 600K large.png; truncate -s 800000 huge.png"
    await tools.call("run", command=grow + "; echo hello > no.png; : > empty.png")
    large = await tools.call("read_file", path="large.png")
    assert len(base64.b64decode(large["content"][1]["data"])) == 600 * 1024
    assert "800000 bytes" in await tools.refused("read_file", path="huge.png")
    for name, said in (("no.png", "1\thello\n["), ("empty.png", "[/")):
        read = await tools.call("read_file", path=name)
        assert read["said"].startswith(said) and len(read["content"]) == 1
    await tools.call("run", command="python3 -c \"print('a' * 1500 + 'needle' + 'b' * 900)\" > long")
    assert "[406 more bytes of this line" in (await tools.call("read_file", path="long"))["said"]
    [line] = (await tools.call("search_files", pattern="needle", path="long"))["lines"]
    assert "needle" in line["text"] and len(line["text"]) < 600
    assert "not_found" in await tools.refused("read_file", path="absent")


@pytest.mark.asyncio
async def test_boxes_are_created_forked_rolled_back_and_deleted(tools):
    default = (await tools.call("run", command="echo before > state"))["box"]
    point = await tools.call("checkpoint", name="before")
    assert point == {**point, "box": default, "checkpoint": "before"}
    await tools.call("run", command="echo after > state")
    [copy] = (await tools.call("fork"))["boxes"]
    assert (await tools.call("rollback"))["box"] == default
    assert (await tools.call("run", command="cat state"))["output"] == "before\n"
    assert (await tools.call("run", command="cat state", box=copy["box"]))["output"] == "after\n"
    made = await tools.call("create_box", memory_mb=256)
    listed = await tools.call("list_boxes")
    names = {found["box"] for found in listed["boxes"]}
    assert {default, copy["box"], made["box"]} <= names and listed["default"] == default
    for name in (made["box"], copy["box"]):
        assert (await tools.call("delete_box", box=name))["deleted"] == name
    assert "not_found" in await tools.refused("delete_box", box=made["box"])
    assert "conflict" in await tools.refused("create_box", box=default)


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", MODES)
async def test_a_shared_port_opens_without_a_token(server, mode):
    async with server.client(mode) as tools:
        assert (await tools.call("run", command="echo page > index.html"))["box"] == "mcp-ann"
        await tools.call("run", command="python3 -m http.server 8000", wait_s=0)
        url = (await tools.call("share_port", port=8000))["url"]

        async def answers():
            with contextlib.suppress(OSError):
                with await asyncio.to_thread(urllib.request.urlopen, url, timeout=10) as page:
                    return page.read() == b"page\n"

        await eventually_async(answers, "the port answers")
        await tools.call("delete_box", box="mcp-ann")


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", MODES)
async def test_two_clients_work_in_one_box_and_other_tokens_see_nothing(server, mode):
    path = f"/mcp?box=both-{mode}"
    async with server.client(mode, path) as one, server.client(mode, path) as other:
        await one.call("write_file", path="note", content="from one")
        assert "1\tfrom one\n" in (await other.call("read_file", path="note"))["said"]
        ran = await one.call("run", command="sleep 1000", wait_s=0)
        assert not (await other.call("stop", command=ran["command"]))["running"]
        async with server.client(mode, path, token="bob") as stranger:
            assert "not_found" in await stranger.refused("read_file", path="note")
            await stranger.call("delete_box", box=f"both-{mode}")
        async with server.client(mode, f"/boxes/both-{mode}/mcp") as inside:
            assert (await inside.call("run", command="cat note"))["output"] == "from one"
        await one.call("delete_box", box=f"both-{mode}")


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", MODES)
async def test_a_client_continues_after_kill_9_of_the_server(own_server, mode):
    server = own_server()
    async with server.client(mode) as tools:
        ran = await tools.call("run", command="echo begun; sleep 1000", wait_s=0)
        server.kill()
        server.start()

        async def begun():
            read = await tools.call("read_output", command=ran["command"])
            return read["running"] and read["output"] == "begun\n"

        await eventually_async(begun, "the output is not lost")
        await tools.call("stop", command=ran["command"])


@pytest.mark.asyncio
async def test_an_expired_default_box_is_replaced_with_a_notice(own_server):
    server = own_server(env={"BOXD_RUNTIME_IDLE_TTL_SEC": "2"})
    async with server.client(MODES[-1]) as tools:
        await tools.call("write_file", path="note", content="one")

        async def gone():
            return not (await tools.call("list_boxes"))["boxes"]

        await eventually_async(gone, "the idle box ends")
        text = await tools.refused("read_file", path="note")
        assert text.startswith("not_found") and "the default box is new and empty" in text
        assert "notes" not in await tools.call("run", command="ls")
        await eventually_async(gone, "the idle box ends")
        ran = await tools.call("run", command="ls")
        assert "idle for too long" in ran["notes"][0] and ran["notes"][0] in ran["said"]


@pytest.mark.asyncio
async def test_boxes_of_stdio_outlast_the_idle_time_of_the_server(own_server, tmp_path):
    short = {"BOXD_RUNTIME_IDLE_TTL_SEC": "2"}
    server = own_server(env=short)
    token = tmp_path / "token"
    token.write_text(TOKENS["ann"])
    there = ["--endpoint", f"ws://127.0.0.1:{server.port}/rpc/ws", "--token", str(token)]
    async with (
        over_stdio(MODES[-1], **short) as own,
        over_stdio(MODES[-1], *there) as temporary,
        over_stdio(MODES[-1], *there, "--box", "kept") as kept,
        server.client(MODES[-1]) as other,
    ):
        for tools in (own, temporary, kept):
            await tools.call("write_file", path="note", content="one")
        # This box has the idle time of the server, and is the last that is used.
        await other.call("run", command="true")

        async def gone():
            names = {found["box"] for found in (await other.call("list_boxes"))["boxes"]}
            assert "kept" in names
            return "mcp-ann" not in names

        await eventually_async(gone, "the idle box ends")
        for tools in (own, temporary, kept):
            assert "1\tone\n" in (await tools.call("read_file", path="note"))["said"]


@pytest.mark.asyncio
@pytest.mark.parametrize("target", ["http", "stdio", "endpoint"])
async def test_changes_of_the_policy_are_in_the_answer(own_server, tmp_path, target):
    gateway = {"BOXD_POLICY_GATEWAYS": '{ mcp = "offline_readonly" }'}
    server = own_server(env={"BOXD_POLICY_PROFILE": "offline_readonly"} if target == "endpoint" else gateway)
    token = tmp_path / "token"
    token.write_text(TOKENS["ann"])
    there = ["--endpoint", f"ws://127.0.0.1:{server.port}/rpc/ws", "--token", str(token)]
    mode = MODES[-1]
    opened = {
        "http": lambda: server.client(mode),
        "stdio": lambda: over_stdio(mode, **gateway),
        "endpoint": lambda: over_stdio(mode, *there),
    }[target]
    async with opened() as tools:
        made = await tools.call("create_box", network=True)
        assert not made["network"] and made["notes"] == ["network: the policy changed on to off"], made
        assert made["notes"][0] in made["said"]
        ran = await tools.call("run", command="true", box=made["box"], timeout_s=6000)
        # The profile limits commands as well.
        assert ran["notes"] == ["timeout_s: the policy changed 6000 to 60"], ran
        assert ran["notes"][0] in ran["said"]


@pytest.mark.asyncio
async def test_a_box_of_stdio_has_its_options_and_ends_with_its_client(tmp_path):
    (tmp_path / "seen").write_text("from outside")
    async with over_stdio("legacy", "--workspace", str(tmp_path)) as tools:
        assert (await tools.call("run", command="cat /workspace/seen"))["output"] == "from outside"
        await tools.call("write_file", path="/workspace/made", content="from inside")
    assert (tmp_path / "made").read_text() == "from inside"


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", MODES)
async def test_stdio_uses_the_boxes_of_a_server(server, mode, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKENS["ann"])
    there = ["--endpoint", f"ws://127.0.0.1:{server.port}/rpc/ws", "--token", str(token)]
    kept = f"kept-{mode}"
    async with over_stdio(mode, *there, "--box", kept) as tools:
        assert await tools.names() == ALL
        ran = await tools.call("run", command="seq 1 20000; echo end")
        assert ran["box"] == kept and ran["tail"].endswith("end\n")
        rest = await tools.call("read_output", command=ran["command"], **{"from": ran["omitted"]["from"]})
        assert rest["output"]
        await tools.call("write_file", path="note", content="from stdio")
        assert "1\tfrom stdio\n" in (await tools.call("read_file", path="note"))["said"]
        assert "42" in (await tools.call("run_code", code="6 * 7"))["values"]
        assert (await tools.call("share_port", port=80))["url"].startswith("http")
        assert "not_found" in await tools.refused("run", command="ls", box="no-such-box")
    # The box is one of the server, and stays.
    async with server.client(mode, f"/mcp?box={kept}") as tools:
        assert "1\tfrom stdio\n" in (await tools.call("read_file", path="note"))["said"]
    async with over_stdio(mode, *there, "--memory-mb", "256") as tools:
        temporary = (await tools.call("run", command="echo hi"))["box"]
        listed = {found["box"] for found in (await tools.call("list_boxes"))["boxes"]}
        assert temporary.startswith("mcp-") and {temporary, kept} <= listed
    async with server.client(mode) as tools:
        listed = {found["box"] for found in (await tools.call("list_boxes"))["boxes"]}
        assert kept in listed and temporary not in listed
        await tools.call("delete_box", box=kept)


@pytest.mark.asyncio
async def test_a_cancelled_call_over_an_endpoint_kills_the_process_tree(server, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKENS["ann"])
    endpoint = f"ws://127.0.0.1:{server.port}/rpc/ws"
    async with over_stdio(MODES[-1], "--endpoint", endpoint, "--token", str(token)) as tools:
        await check_cancellation(tools)


def test_a_client_that_closes_only_the_output_ends_the_server():
    with subprocess.Popen([BOXD, "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as program:

        def send(**message) -> None:
            program.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            program.stdin.flush()

        try:
            params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
            send(id=1, method="initialize", params=params)
            assert b"result" in program.stdout.readline()
            send(method="notifications/initialized")
            program.stdout.close()
            send(id=2, method="ping")
            assert program.wait(120) == 0
        finally:
            program.kill()


def test_an_endpoint_without_a_server_is_an_error(tmp_path):
    for options in (["--endpoint", f"unix:{tmp_path}/none"], ["--box", "work"]):
        env = environment(BOXD_SERVER_STATE_DIR=str(tmp_path))
        ran = subprocess.run([BOXD, "mcp", *options], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=60)
        assert ran.returncode != 0 and "no server at" in ran.stderr and not ran.stdout, ran


def post(server, body: bytes) -> tuple[int, dict]:
    """Posts a body as a client of 2025-11-25, and returns the status and the message."""
    headers = {
        "Authorization": f"Bearer {TOKENS['ann']}",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": "2025-11-25",
    }
    request = urllib.request.Request(server.url(), data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    data = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return status, json.loads(next((line for line in data if line), text))


def test_a_body_that_is_no_message_gets_a_json_rpc_error(server):
    for body, status, code in [
        (b"{", 400, -32700),
        (b"17", 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call"}', 200, -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": 5}}', 200, -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "no/such"}', 200, -32601),
    ]:
        answered, message = post(server, body)
        assert (answered, message["error"]["code"]) == (status, code), (body, answered, message)


def test_a_caller_without_a_token_is_refused(server):
    request = urllib.request.Request(server.url(), data=b"{}", headers={"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 401 and TOKENS["ann"] not in str(refused.value.read())
