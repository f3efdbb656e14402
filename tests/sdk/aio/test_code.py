"""Interpreters: `/v1/code`, `/v1/jupyter`, `/v1/nodejs`; the context of a box, its packages and its terminal."""

import inspect
import json
from collections.abc import Iterator

import pytest
import requests
from agent_sandbox import Sandbox
from agent_sandbox.core.api_error import ApiError
from conftest import run
from waiting import eventually
from websockets.sync.client import connect


def test_python_runs_once_or_in_a_session(client):
    once = client.code.execute_code(language="python", code="print(1 + 1)").data
    assert (once.status, once.stdout, once.exit_code, once.session_id) == ("ok", "2\n", 0, None)
    first = client.code.execute_code(language="python", code="x = 20", stateful=True).data
    again = client.code.execute_code(language="python", code="x + 1", session_id=first.session_id).data
    assert again.outputs[-1]["data"]["text/plain"] == "21"
    failed = client.code.execute_code(language="python", code="1 / 0").data
    assert failed.status == "error" and failed.exit_code != 0 and "ZeroDivisionError" in "".join(failed.traceback)
    late = client.code.execute_code(language="python", code="import time; time.sleep(600)", timeout=1).data
    assert late.status == "timeout"
    assert {info.language for info in client.code.get_info().data.languages} == {"python", "javascript"}


def test_javascript_runs_once_or_in_a_session(client):
    once = client.code.execute_code(language="javascript", code="console.log(1 + 1)").data
    assert (once.status, once.stdout) == ("ok", "2\n")
    client.nodejs.create_session(session_id="n", cwd="/tmp")
    client.nodejs.execute_code(code="var x = 20", session_id="n")
    ran = client.nodejs.execute_code(code="console.log(x + 1, process.cwd())", session_id="n").data
    assert (ran.stdout, ran.exit_code, ran.session_id) == ("21 /tmp\n", 0, "n")
    failed = client.nodejs.execute_code(code="throw new TypeError('no')").data
    assert failed.status == "error" and failed.outputs[-1].ename == "TypeError"
    code = "console.log(require('fs').readFileSync('data/x.txt', 'utf8'))"
    assert client.nodejs.execute_code(code=code, files={"data/x.txt": "file"}).data.stdout == "file\n"
    assert set(client.nodejs.list_sessions().data.sessions) == {"n"}
    assert client.nodejs.update_session("n", cwd="/").data.updated
    assert client.nodejs.execute_code(code="console.log(process.cwd())", session_id="n").data.stdout == "/\n"
    assert client.nodejs.get_session("n").data.session.state == "IDLE"
    assert client.nodejs.delete_session("n").data.deleted
    with pytest.raises(ApiError) as refused:
        client.nodejs.get_session("n")
    assert refused.value.status_code == 404
    assert client.nodejs.get_info().data.node_version.startswith("v")


def test_a_notebook_has_outputs_and_sessions(client):
    created = client.jupyter.create_session(session_id="nb").data
    assert (created.session_id, created.kernel_name) == ("nb", "python3")
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\n{'a': 1}"
    ran = client.jupyter.execute_code(code=code, session_id="nb").data
    kinds = [(output.output_type, output.name) for output in ran.outputs]
    assert kinds == [("stream", "stdout"), ("stream", "stderr"), ("execute_result", None)]
    assert ran.outputs[2].data["text/plain"] == "{'a': 1}" and ran.execution_count == 1
    client.jupyter.execute_code(code="y = 5", session_id="nb")
    assert client.jupyter.execute_code(code="print(y)", session_id="nb").data.outputs[0].text == "5\n"
    failed = client.jupyter.execute_code(code="raise KeyError('k')", session_id="nb").data
    error = failed.outputs[-1]
    assert (failed.status, error.output_type, error.ename) == ("error", "error", "KeyError")
    assert client.jupyter.execute_code(code="while True: pass", session_id="nb", timeout=1).data.status == "timeout"
    assert set(client.jupyter.list_sessions().data.sessions) == {"nb"}
    assert client.jupyter.get_info().data.active_sessions == 1
    client.jupyter.delete_session("nb")
    client.jupyter.delete_sessions()
    assert client.jupyter.list_sessions().data.sessions == {}


def test_the_context_describes_the_box(client):
    context = client.sandbox.get_context()
    assert (context.home_dir, context.detail.system.user) == ("/home/gem", "gem")
    assert context.version and context.detail.system.arch
    (python,), (node,) = context.detail.runtime.python, context.detail.runtime.nodejs
    assert run(client, f"{python.bin} --version; {node.bin} --version").output == f"Python {python.ver}\nv{node.ver}\n"
    assert run(client, "id -un; echo $HOME; pwd").output == "gem\n/home/gem\n/home/gem\n"


def test_packages_are_listed(client):
    def listed(found) -> dict:
        return {package["name"]: package["version"] for package in found.data}

    before = listed(client.sandbox.get_python_packages())
    assert "own-python" not in before and "own-node" not in listed(client.sandbox.get_nodejs_packages())
    run(client, "mkdir -p $(python3 -m site --user-site)/own_python-1.2.dist-info && cd $_ && "
        "printf 'Metadata-Version: 2.1\\nName: own-python\\nVersion: 1.2\\n' > METADATA")
    assert listed(client.sandbox.get_python_packages()) == {**before, "own-python": "1.2"}
    installed = run(client, "mkdir own && cd own && echo '{\"name\": \"own-node\", \"version\": \"3.4.5\"}' > package.json && "
                    "npm install --global --offline --no-audit --no-fund .")
    assert installed.exit_code == 0, installed.output
    assert listed(client.sandbox.get_nodejs_packages())["own-node"] == "3.4.5"


def test_the_tools_of_the_box_are_those_of_its_mcp_server(client):
    assert client.mcp.list_mcp_servers().data == ["box"]
    tools = {tool.name: tool for tool in client.mcp.list_mcp_tools("box").data.tools}
    assert {"run", "run_code", "read_file", "search_files"} <= set(tools)
    # A client of one box cannot delete it or open its ports.
    assert not {"create_box", "delete_box", "share_port"} & set(tools)
    assert "command" in tools["run"].input_schema["properties"] and tools["read_file"].annotations.read_only_hint
    ran = client.mcp.execute_mcp_tool("box", "run", request={"command": "echo $((40 + 2)); id -un; exit 3", "cwd": None}).data
    assert (ran.is_error, ran.structured_content["exit_code"]) == (False, 3)
    assert ran.structured_content["output"] == "42\ngem\n" and "42" in ran.content[0].text
    client.file.write_file(file="/home/gem/note.txt", content="written by the SDK\n")
    read = client.mcp.execute_mcp_tool("box", "read_file", request={"path": "/home/gem/note.txt"}).data
    assert "written by the SDK" in read.content[0].text
    failed = client.mcp.execute_mcp_tool("box", "read_file", request={"path": "/home/gem/absent"}).data
    assert failed.is_error and "not_found" in failed.content[0].text
    malformed = client.mcp.execute_mcp_tool("box", "run", request={"command": 7}).data
    assert malformed.is_error and "command" in malformed.content[0].text
    for call in [
        lambda: client.mcp.list_mcp_tools("none"),
        lambda: client.mcp.execute_mcp_tool("none", "run", request={"command": "true"}),
        lambda: client.mcp.execute_mcp_tool("box", "delete_box", request={"box": "x"}),
    ]:
        with pytest.raises(ApiError) as refused:
            call()
        assert refused.value.status_code == 404


def test_groups_without_a_counterpart_are_501(client):
    """All methods of these groups of the SDK, with text for each argument that they need."""
    tried = 0
    for group in ["auth", "browser", "browser_page", "display", "proxy", "skills", "util"]:
        holder = getattr(Sandbox(base_url="http://unused"), group, None)
        for name, method in inspect.getmembers(holder, inspect.ismethod):
            if name.startswith("_") or name == "with_raw_response":
                continue
            needed = inspect.signature(method).parameters.values()
            needed = [it for it in needed if it.default is inspect.Parameter.empty and it.kind is not it.VAR_KEYWORD]
            positional = ["x" for it in needed if it.kind is not it.KEYWORD_ONLY]
            named = {it.name: "x" for it in needed if it.kind is it.KEYWORD_ONLY}
            call = getattr(getattr(client, group), name)
            with pytest.raises(ApiError) as refused:
                result = call(*positional, **named)
                list(result if isinstance(result, Iterator) else [])
            assert refused.value.status_code == 501, (group, name, refused.value)
            assert refused.value.body["success"] is False
            tried += 1
    assert tried > 30


def test_other_paths_of_a_box_are_errors_of_aio(box_url):
    for path, status in [("/v1/sandbox/hooks", 501), ("/v1/nothing", 404), ("/v1/nodejs/sessions/%ff", 422)]:
        answer = requests.get(f"{box_url}{path}", timeout=60)
        assert (answer.status_code, answer.json()["success"]) == (status, False), path


def test_a_run_of_code_leaves_no_interpreter(sandbox, box_url):
    for files in [{"/x": "1"}, {"a/../../x": "1"}, {"": "1"}, {"/proc/x/../y": "1"}]:
        with pytest.raises(ApiError):
            sandbox.nodejs.execute_code(code="1", files=files)
    with pytest.raises(ApiError) as refused:
        sandbox.nodejs.execute_code(code="1", files={"x": "1"}, cwd="/proc")
    assert refused.value.status_code == 403
    for call in [
        lambda: sandbox.nodejs.execute_code(code="1\0"),
        lambda: sandbox.code.execute_code(language="python", code="1\0"),
        lambda: run(sandbox, "true \0"),
    ]:
        with pytest.raises(ApiError) as refused:
            call()
        assert refused.value.status_code == 400
    body = {"language": "python", "code": "import time; time.sleep(600)", "timeout": 600}
    with pytest.raises(requests.Timeout):
        requests.post(f"{box_url}/v1/code/execute", json=body, timeout=2)
    eventually(lambda: sandbox.nodejs.list_sessions().data.sessions == {})
    eventually(lambda: sandbox.jupyter.list_sessions().data.sessions == {})
    assert sandbox.shell.list_sessions().data.sessions == {}


def test_the_address_of_a_terminal_starts_no_shell(sandbox):
    addresses = {sandbox.shell.get_terminal_url().data for _ in range(3)}
    assert len(addresses) == 3
    assert "bash -i" not in run(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output


def test_a_terminal_is_a_websocket(sandbox):
    url = sandbox.shell.get_terminal_url().data

    def until(socket, text: str) -> str:
        seen = ""
        while text not in seen:
            message = json.loads(socket.recv(timeout=120))
            if message["type"] == "output":
                seen += message["data"]
        return seen

    with connect(url, open_timeout=60) as socket:
        assert json.loads(socket.recv(timeout=60))["type"] == "session_id"
        assert json.loads(socket.recv(timeout=60))["type"] == "ready"
        socket.send(json.dumps({"type": "resize", "data": {"cols": 123, "rows": 40}}))
        socket.send(json.dumps({"type": "input", "data": "stty size; x=kept\n"}))
        until(socket, "40 123")
        socket.send(json.dumps({"type": "other"}))
    # The terminal outlives its client.
    with connect(url, open_timeout=60) as socket:
        socket.send(json.dumps({"type": "input", "data": "echo =$x=; exit\n"}))
        until(socket, "=kept=")
        with pytest.raises(Exception, match="1000"):
            until(socket, "never")
