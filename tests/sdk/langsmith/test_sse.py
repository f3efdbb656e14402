"""Commands as server-sent events, a transport of the newest release."""

import asyncio
import base64
import json
import os

import httpx
import pytest
from conftest import TOKEN, AsyncSandboxClient, SandboxClient, call, check_offsets, chunks, create, result, text_of
from cutter import Cutter
from langsmith.sandbox import CommandTimeoutError, SandboxOperationError, _sse_execute
from lost import WAITS, check_bulk_kills, check_cuts, check_end_of_boxes, check_kills, check_restart, data
from waiting import eventually_async

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def transport(monkeypatch):
    monkeypatch.setenv("LANGSMITH_EXPERIMENTAL_FEATURES", "sandbox_sse_exec")


async def test_output_and_exit_code(box):
    done = await call(box.run, "echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3)


async def events(box, path: str, body: dict) -> list[tuple[str, dict]]:
    """Returns the events of one response, as the server sends them."""
    headers = {"X-Api-Key": TOKEN}
    async with httpx.AsyncClient(headers=headers, timeout=120) as web:
        answer = await web.post(f"{box.dataplane_url}/execute/stream/{path}", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    received = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if fields:
            received.append((fields["event"], json.loads(fields["data"])))
    return received


async def test_bytes_that_are_no_text_arrive_as_they_are(box):
    content = "a\u00e4\u20ac\U0001f600".encode() * 20000 + b"\xff\xc3" + os.urandom(1000)
    await call(box.write, "/tmp/bytes", content)
    handle = await call(box.run, "cat /tmp/bytes", wait=False)
    output = await chunks(handle)
    assert text_of("stdout", output).startswith("a\u00e4\u20ac\U0001f600" * 20000)
    assert (await result(handle)).exit_code == 0
    # The SDK changes such bytes, the server does not.
    for begin in (0, 7, len(content) - 500):
        body = {"command_id": handle.command_id, "stdout_offset": begin, "stderr_offset": 0}
        received, seen = await events(box, "resume", body), b""
        assert received[0][0] == "started" and received[-1] == ("exit", {"exit_code": 0})
        for event, data in received:
            if event == "stdout":
                assert data["offset"] == begin + len(seen)
                seen += base64.b64decode(data["data"], validate=True)
        assert seen == content[begin:]


async def test_a_command_reads_on_after_a_reconnect(box):
    handle = await call(box.run, "echo one; sleep 1; echo two", wait=False)
    again = await call(box.reconnect, handle.command_id)
    output = await chunks(again)
    check_offsets(output)
    assert text_of("stdout", output) == "one\ntwo\n"
    assert (await result(handle)).stdout == "one\ntwo\n"


async def test_errors(box):
    with pytest.raises(CommandTimeoutError):
        await call(box.run, "sleep 100", timeout=1)
    with pytest.raises(SandboxOperationError) as refused:
        await chunks(await call(box.reconnect, "no-such-command"))
    assert refused.value.error_type == "CommandNotFound"
    with pytest.raises(SandboxOperationError, match="/bin/no-shell") as refused:
        await call(box.run, "true", shell="/bin/no-shell")
    assert (refused.value.operation, refused.value.error_type) == ("command", "CommandError")
    for command, options in [("  ", {}), ("true", {"env": {"A=B": "x"}})]:
        with pytest.raises(SandboxOperationError) as refused:
            await call(box.run, command, **options)
        assert refused.value.operation == "command"


async def test_a_known_id_of_another_program_is_a_command_error(client, box):
    """The SDK makes up its ids."""
    handle = await call(box.run, "echo one", wait=False)
    await result(handle)
    url = f"{box.dataplane_url}/execute/stream/start"
    request = {"command": "echo two", "command_id": handle.command_id}
    # A stop forgets the environment of the command, but not its program.
    for stops in [False, True]:
        if stops:
            await call(client.stop_sandbox, box.name)
        async with httpx.AsyncClient(headers={"X-Api-Key": TOKEN}, timeout=120) as web:
            refused = await web.post(url, json=request)
        assert (refused.status_code, refused.json()["detail"]["error"]) == (409, "CommandError")


async def test_a_client_beyond_the_end_of_one_stream_reads_the_other(box):
    handle = await call(box.run, "echo out; echo err >&2", wait=False)
    await result(handle)
    done = await result(await call(box.reconnect, handle.command_id, stdout_offset=1000, stderr_offset=0))
    assert (done.stdout, done.stderr, done.exit_code) == ("", "err\n", 0)


async def test_a_start_whose_answer_is_lost_runs_once(server, client, box):
    cutter = Cutter(server.port, 3, seed=5, most=300)
    try:
        box.dataplane_url = box.dataplane_url.replace(f":{server.port}", f":{cutter.port}")
        done = await call(box.run, "echo begun >> /tmp/runs; cat /tmp/runs; sleep 1; cat /tmp/runs")
        assert (done.stdout, done.exit_code, cutter.made) == ("begun\nbegun\n", 0, 3)
    finally:
        cutter.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_random_cuts_lose_and_repeat_nothing(server, monkeypatch, kind):
    # The waiting times of the SDK would add up to minutes.
    monkeypatch.setattr(_sse_execute, "_BACKOFF_BASE", 0.001)
    # The SDK itself decodes its pieces one by one, and changes bytes that are no text.
    out, err = (data(seed, size << 20).decode(errors="replace").encode() for seed, size in [(1, 24), (2, 4)])
    await check_cuts(server, kind, out, err)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_kills_of_the_server_lose_and_repeat_nothing(own_server, kind):
    await check_kills(own_server(), kind)


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_kills_of_the_server_during_much_output_lose_and_repeat_nothing(own_server, kind):
    await check_bulk_kills(own_server(), kind, 8)


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_restart_with_boxes_is_followed(own_server, kind):
    await check_restart(own_server(env={"BOXD_SERVER_KEEP_BOXES": "true", "BOXD_SERVER_DRAIN_SEC": "1"}), kind)


@pytest.mark.parametrize("kind", [SandboxClient, AsyncSandboxClient])
async def test_a_server_that_ends_its_boxes_does_not_claim_an_exit(own_server, kind):
    await check_end_of_boxes(own_server(env={"BOXD_SERVER_DRAIN_SEC": "1"}), kind)


async def test_a_stopping_server_that_keeps_its_boxes_says_so(own_server):
    server = own_server(env={"BOXD_SERVER_KEEP_BOXES": "true", "BOXD_SERVER_DRAIN_SEC": "1"})
    box = await create(server.client())
    body = {"command": f"echo begun > /tmp/begun; {WAITS}", "command_id": "mine", "timeout_seconds": 0}
    reading = asyncio.create_task(events(box, "start", body))

    async def has_begun() -> bool:
        return (await call(box.run, "cat /tmp/begun 2>/dev/null || true")).stdout == "begun\n"

    await eventually_async(has_begun)
    await asyncio.to_thread(server.stop)
    received = await asyncio.wait_for(reading, 120)
    assert received[0][0] == "started" and "exit" not in [event for event, _ in received]
    assert (received[-1][0], received[-1][1]["error_type"]) == ("error", "ServerShuttingDown")
