"""The code interpreter, through its own SDK."""

import asyncio
import base64
import threading

import e2b_code_interpreter as interpreter
import pytest
from conftest import node
from e2b import NotFoundException


@pytest.fixture(scope="module")
def code(server):
    sandbox = interpreter.Sandbox.create(timeout=600)
    yield sandbox
    sandbox.kill()


def test_results_and_logs(code):
    execution = code.run_code("x = 20\nprint('one')\nimport sys; print('two', file=sys.stderr)\nx + 1")
    assert execution.text == "21"
    assert (execution.logs.stdout, execution.logs.stderr) == (["one\n"], ["two\n"])
    assert execution.error is None and execution.execution_count >= 1
    assert code.run_code("x").text == "20"
    assert code.run_code("").results == []
    text = code.run_code("print('a\\u2028b\\x85c')").logs.stdout
    assert "".join(text) == "a\u2028b\x85c\n"


def test_errors_have_a_traceback(code):
    execution = code.run_code("print('before')\n1/0")
    error = execution.error
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert isinstance(error.traceback, str) and "1/0" in error.traceback
    assert (execution.logs.stdout, execution.logs.stderr) == (["before\n"], [])
    printed = code.run_code("import traceback\ntry:\n  1/0\nexcept Exception: traceback.print_exc()")
    assert printed.error is None and "ZeroDivisionError" in "".join(printed.logs.stderr)


def test_a_printed_traceback_is_text(code):
    printed = "import traceback\ntry:\n  1/0\nexcept Exception: traceback.print_exc()\n"
    raised = code.run_code(printed + "raise ValueError('final')")
    stderr = "".join(raised.logs.stderr)
    assert raised.error.name == "ValueError"
    assert "ZeroDivisionError" in stderr and "final" not in stderr, stderr
    # It comes while the code runs.
    waits = (
        "import os, sys, time\n"
        "end = time.time() + 100\n"
        "while not os.path.exists('/tmp/seen') and time.time() < end:\n"
        "  print('tick', file=sys.stderr)\n"
        "  time.sleep(0.1)\n"
        "os.path.exists('/tmp/seen')"
    )
    seen = lambda message: "ZeroDivisionError" in message.line and code.files.write("/tmp/seen", "")
    assert code.run_code(printed + waits, on_stderr=seen).text == "True"


def test_rich_results(code):
    execution = code.run_code(
        "class Rich:\n"
        "  def _repr_html_(self): return '<b>x</b>'\n"
        "  def _repr_png_(self): return b'png-bytes'\n"
        "  def _repr_json_(self): return {'a': [1]}\n"
        "display(Rich())\n"
        "Rich()"
    )
    shown, main = execution.results
    assert (shown.is_main_result, main.is_main_result) == (False, True)
    for result in execution.results:
        assert result.html == "<b>x</b>" and result.json == {"a": [1]}
        assert base64.b64decode(result.png) == b"png-bytes"


def test_callbacks_come_while_the_code_runs(code):
    seen = []
    code.run_code(
        "import time\nfor n in range(3):\n  print(n, flush=True)\n  time.sleep(0.3)",
        on_stdout=lambda message: seen.append(message.line),
    )
    assert "".join(seen) == "0\n1\n2\n" and len(seen) == 3


def test_contexts_are_separate(code):
    context = code.create_code_context(cwd="/tmp")
    assert (context.language, context.cwd) == ("python", "/tmp")
    code.run_code("y = 1", context=context)
    assert code.run_code("import os; (y, os.getcwd())", context=context).text == "(1, '/tmp')"
    assert code.run_code("y").error.name == "NameError"
    listed = code.list_code_contexts()
    assert context.id in [item.id for item in listed]
    assert {"python", "javascript", "bash"} <= {item.language for item in listed}
    code.restart_code_context(context)
    assert code.run_code("y", context=context).error.name == "NameError"
    code.remove_code_context(context)
    with pytest.raises(NotFoundException):
        code.run_code("1", context=context)


def test_languages(code):
    assert code.run_code("echo $((6*7)); v=1", language="bash").logs.stdout == ["42\n"]
    assert code.run_code("echo $v", language="bash").logs.stdout == ["1\n"]
    failed = code.run_code("false", language="bash")
    assert failed.error.value == "exit status 1"
    assert code.run_code("const z = [1, 2]; z.length", language="js").text == "2"
    with pytest.raises(Exception, match="not available"):
        code.run_code("1", language="r")


def test_variables_of_a_run(code):
    assert code.run_code("import os; os.environ['A']", envs={"A": "b"}).text == "b"


def test_a_timeout_stops_the_run(code):
    from e2b.exceptions import TimeoutException

    with pytest.raises(TimeoutException):
        code.run_code("import time; time.sleep(1000)", timeout=1)
    assert code.run_code("1 + 1", timeout=120).text == "2"


def test_a_killed_sandbox_breaks_the_run(server):
    from e2b.exceptions import TimeoutException

    sandbox = interpreter.Sandbox.create(timeout=300)
    timer = threading.Timer(1, sandbox.kill)
    timer.start()
    with pytest.raises(TimeoutException, match="killed"):
        sandbox.run_code("import time; time.sleep(300)", timeout=300)
    timer.join()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_asynchronous_sdk(server):
    sandbox = await interpreter.AsyncSandbox.create(timeout=300)
    try:
        first, second = await asyncio.gather(sandbox.run_code("1 + 1"), sandbox.run_code("2 + 2"))
        assert (first.text, second.text) == ("2", "4")
        context = await sandbox.create_code_context(language="javascript")
        assert (await sandbox.run_code("5", context=context)).text == "5"
    finally:
        await sandbox.kill()


def test_the_sdk_of_npm(server):
    assert node(server, "code.js").splitlines()[-1] == "done"
