"""The `curl` lines of the documentation, as they stand there."""

import json
import os
import pathlib
import re
import subprocess
import time

from conftest import TOKENS
from waiting import eventually

WIRE = pathlib.Path(__file__).parents[3] / "docs" / "wire.md"


def test_the_curl_lines_of_the_documentation_work(server):
    section = WIRE.read_text().split("### `/rpc`\n")[1].split("\n### ")[0]
    [script] = re.findall(r"```sh\n(.*?)```", section, re.S)
    env = {**os.environ, "BOX_URL": server.url(""), "BOX_TOKEN": TOKENS["ann"]}
    ran = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=120, env=env)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line]
    assert not [line for line in lines if "error" in line], lines
    assert lines[0]["result"]["available"] and lines[1]["result"]["info"]["box_id"] == "curl"
    assert "hello" in json.dumps(lines[2]["result"])
    chunks = [line["chunk"] for line in lines if "chunk" in line]
    assert "".join(chunk["text"]["data"] for chunk in chunks if "text" in chunk) == "1\n2\n3\n"
    assert lines[-1]["result"] == {"deleted": "curl"}


def curl(server, *options: str) -> str:
    command = ["curl", "-sS", server.url("/rpc"), "-H", f"Authorization: Bearer {TOKENS['ann']}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_events_have_names_and_a_long_stream_is_whole(server):
    curl(server, "-d", '{"method": "box.create", "params": {"spec": {"box_id": "events"}}}')
    start = {"box_id": "events", "attach": {}, "program": {"text": "seq 200000"}}
    said = curl(server, "-H", "Accept: text/event-stream", "-d", json.dumps({"method": "command.start", "params": start}))
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in said.split("\n\n") if event]
    assert events[-1]["event"] == "result" and {event["event"] for event in events[:-1]} == {"chunk"}
    chunks = [json.loads(event["data"])["chunk"] for event in events[:-1]]
    text = "".join(chunk["text"]["data"] for chunk in chunks if "text" in chunk)
    assert text == "".join(f"{number}\n" for number in range(1, 200_001))
    failed = curl(server, "-H", "Accept: text/event-stream", "-d", '{"method": "box.get", "params": {"box_id": "none"}}')
    assert failed.startswith("event: error\n") and '"not_found"' in failed
    curl(server, "-d", '{"method": "box.delete", "params": {"box_id": "events"}}')


def test_errors_are_responses_and_a_bad_request_is_refused(server):
    missing = json.loads(curl(server, "-d", '{"id": 7, "method": "box.get", "params": {"box_id": "none"}}'))
    assert missing["id"] == 7 and missing["error"]["data"]["code"] == "not_found"
    unknown = json.loads(curl(server, "-d", '{"method": "no.such"}'))
    assert unknown["error"]["code"] == -32601
    # No call would answer a message that only a connection can have.
    chunk = '{"method": "$/chunk", "params": {"id": 1}}'
    for body in ("{", "[]", '{"params": {}}', '{"method": "box.list", "params": 1}', chunk):
        refused = json.loads(curl(server, "-d", body))
        assert refused["code"] == "INVALID_REQUEST", (body, refused)
    assert json.loads(curl(server))["code"] == "METHOD_NOT_ALLOWED"
    # Without a stream, the call would wait for credit that no client grants.
    refused = json.loads(curl(server, "-d", '{"method": "box.list", "params": {"_meta": {"credit": 1}}}'))
    assert refused["code"] == "INVALID_REQUEST" and "params._meta.credit" in refused["message"]


def test_the_end_of_a_request_kills_the_process_tree(server):
    spec = {"box_id": "gone"}
    curl(server, "-d", json.dumps({"method": "box.create", "params": {"spec": spec}}))

    def run(script: str) -> str:
        params = {"spec": {**spec, "cmd": script}}
        return json.loads(curl(server, "-d", json.dumps({"method": "box.exec", "params": params})))["result"]["stdout"]

    beat = "beat() { while :; do date +%s%N > /tmp/$1; sleep 0.1; done; }; beat one & beat other"
    for kind in ("application/json", "application/x-ndjson", "text/event-stream"):
        run("rm -f /tmp/one /tmp/other")
        params = {"box_id": "gone", "attach": {}, "program": {"text": beat}}
        # Without a stream, only a call that waits for the end can be cancelled.
        call = {"method": "box.exec", "params": {"spec": {**spec, "cmd": beat}}}
        if kind != "application/json":
            call = {"method": "command.start", "params": params}
        command = ["curl", "-sS", server.url("/rpc"), "-H", f"Authorization: Bearer {TOKENS['ann']}"]
        command += ["-H", f"Accept: {kind}", "-d", json.dumps(call)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
            read = {"box_id": "gone", "path": "/tmp/other"}
            stat = json.dumps({"method": "file.read", "params": read})
            eventually(lambda: "result" in json.loads(curl(server, "-d", stat)), "both processes run")
            client.kill()

        def still() -> bool:
            before = run("cat /tmp/one /tmp/other")
            time.sleep(2)
            return before == run("cat /tmp/one /tmp/other")

        eventually(still, f"both processes are gone: {kind}")
    curl(server, "-d", json.dumps({"method": "box.delete", "params": {"box_id": "gone", "force": True}}))
