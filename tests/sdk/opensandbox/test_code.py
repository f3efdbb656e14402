"""Code through the code interpreter package: contexts, results, errors, interrupts."""

from __future__ import annotations

import json
import threading

import pytest
from blocking import Blocking
from code_interpreter import CodeInterpreter
from code_interpreter.sync.code_interpreter import CodeInterpreterSync
from conftest import handlers, texts
from opensandbox.exceptions import InvalidArgumentException, SandboxApiException, SandboxException
from waiting import eventually


@pytest.fixture(scope="module")
def codes(sandbox):
    package = Blocking(CodeInterpreter) if isinstance(sandbox, Blocking) else CodeInterpreterSync
    interpreter = package.create(sandbox)
    assert interpreter.is_healthy() and interpreter.ping()
    return interpreter.codes


def test_state_stays_in_the_default_context(codes):
    first = codes.run("print('out')\nimport sys; print('err', file=sys.stderr)\nx = 41\nx + 1")
    assert "".join(texts(first.logs.stdout)) == "out\n" and "".join(texts(first.logs.stderr)) == "err\n"
    assert texts(first.result) == ["42"] and first.execution_count >= 1
    assert first.error is None and first.complete is not None and first.id
    second = codes.run("x")
    assert texts(second.result) == ["41"] and second.execution_count == first.execution_count + 1


def test_errors_have_a_class_a_value_and_a_traceback(codes):
    failed = codes.run("def f():\n    raise ValueError('no')\nf()")
    assert (failed.error.name, failed.error.value) == ("ValueError", "no")
    assert any("line 2, in f" in line for line in failed.error.traceback)
    assert failed.complete is None and failed.logs.stderr == []
    long = codes.run("import sys; print('mine', file=sys.stderr); raise ValueError('x' * 5000)")
    assert "".join(texts(long.logs.stderr)) == "mine\n" and long.error.name == "ValueError"
    wrong = codes.run("1 +")
    assert wrong.error.name == "SyntaxError" and wrong.logs.stderr == []
    with pytest.raises(InvalidArgumentException):
        codes.run("  ")


def test_an_exit_keeps_the_state(codes):
    context = codes.create_context("python")
    codes.run("kept = 7", context=context)
    for code in ["import sys; sys.exit(3)", "exit()"]:
        run = codes.run(code, context=context)
        assert run.error.name == "SystemExit" and run.complete is None
    assert texts(codes.run("kept", context=context).result) == ["7"]


def test_a_new_interpreter_has_the_variables_from_its_start(codes):
    context = codes.create_context("python")
    codes.run("import os; os.environ['PYTHONPATH'] = '/tmp/own'", context=context)
    assert codes.run("os._exit(3)", context=context).error is not None
    assert texts(codes.run("import sys; '/tmp/own' in sys.path", context=context).result) == ["True"]


def test_a_context_is_no_session(sandbox, codes):
    context = codes.create_context("python")
    for call in [lambda: sandbox.commands.run_in_session(context.id, "1"), lambda: sandbox.commands.delete_session(context.id)]:
        with pytest.raises((SandboxApiException, SandboxException)) as error:
            call()
        assert error.value.status_code == 404
    assert codes.get_context(context.id).id == context.id


def test_rich_results_have_media_types(execd):
    # The SDK keeps only the text of a result.
    code = "class Page:\n    def _repr_html_(self):\n        return '<b>hi</b>'\nPage()"
    answer = execd.post("/code", json={"code": code, "context": {"language": "python"}})
    events = [json.loads(event) for event in answer.text.split("\n\n") if event]
    results = [event["results"] for event in events if event["type"] == "result"]
    assert len(results) == 1 and results[0]["text/html"] == "<b>hi</b>" and "Page object" in results[0]["text"]
    assert [event["type"] for event in events] == ["init", "execution_count", "result", "execution_complete"]


def test_top_level_await_works(codes):
    run = codes.run("import asyncio\nawait asyncio.sleep(0, 'awaited')")
    assert texts(run.result) == ["'awaited'"]


def test_other_languages(codes):
    script = codes.run("const y = 2; console.log(y); y * 3", language="javascript")
    assert "".join(texts(script.logs.stdout)) == "2\n" and texts(script.result) == ["6"]
    assert texts(codes.run("y", language="javascript").result) == ["2"]
    thrown = codes.run("throw new TypeError('bad')", language="javascript")
    assert (thrown.error.name, thrown.error.value) == ("TypeError", "bad")
    shell = codes.run("export Z=1; cd /tmp; echo $Z", language="bash")
    assert "".join(texts(shell.logs.stdout)) == "1\n" and shell.error is None
    assert "".join(texts(codes.run("pwd; echo $Z", language="bash").logs.stdout)) == "/tmp\n1\n"
    assert codes.run("false", language="bash").error.value == "1"
    for language in ["java", "go", "typescript", "cobol"]:
        with pytest.raises(SandboxApiException) as error:
            codes.run("x", language=language)
        assert error.value.status_code == 501


def test_contexts_are_separate(codes):
    one, two = codes.create_context("python"), codes.create_context("python")
    assert one.language == "python" and one.id != two.id
    codes.run("v = 1", context=one)
    assert codes.run("v", context=two).error.name == "NameError"
    assert texts(codes.run("v", context=one).result) == ["1"]
    assert codes.get_context(one.id).id == one.id
    script = codes.create_context("javascript")
    listed = [context.id for context in codes.list_contexts("python")]
    assert {one.id, two.id} <= set(listed) and script.id not in listed
    codes.delete_context(one.id)
    for call in [
        lambda: codes.get_context(one.id),
        lambda: codes.delete_context(one.id),
        lambda: codes.run("1", context=one),
    ]:
        with pytest.raises(SandboxApiException) as error:
            call()
        assert error.value.status_code == 404
    codes.delete_contexts("python")
    assert codes.list_contexts("python") == [] and len(codes.list_contexts("javascript")) >= 1
    with pytest.raises(SandboxApiException) as error:
        codes.create_context("java")
    assert error.value.status_code == 501


def test_runs_that_wait_have_numbers_of_their_own(codes):
    context, counts = codes.create_context("python"), []
    barrier = threading.Barrier(3)

    def run():
        barrier.wait(120)
        counts.append(codes.run("import time; time.sleep(1); 7", context=context).execution_count)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(counts) == [1, 2, 3]


def test_an_interrupt_ends_a_run_and_keeps_the_state(codes):
    context = codes.create_context("python")
    codes.run("kept = 7", context=context)
    started, ended = threading.Event(), []

    def run():
        seeing = handlers(codes, on_stdout=lambda _: started.set())
        code = "import time\nprint('go', flush=True)\ntime.sleep(1000)"
        ended.append(codes.run(code, context=context, handlers=seeing))

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(120)
    codes.interrupt(context.id)
    thread.join(120)
    assert ended[0].error is not None and ended[0].complete is None
    assert texts(codes.run("kept", context=context).result) == ["7"]
    with pytest.raises(SandboxApiException):
        codes.interrupt("none")


def test_an_interrupt_takes_the_id_of_an_execution(codes):
    context, seen, ended = codes.create_context("python"), [], []
    # The interpreter has started.
    codes.run("kept = 7", context=context)

    def run():
        seeing = handlers(codes, on_init=lambda event: seen.append(event.id))
        ended.append(codes.run("while True: pass", context=context, handlers=seeing))

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: seen)
    codes.interrupt(seen[0])
    thread.join(120)
    assert ended[0].error.name == "KeyboardInterrupt"
    assert texts(codes.run("kept", context=context).result) == ["7"]


def test_an_interrupt_reaches_an_interpreter_that_starts(codes):
    for _ in range(8):
        context = codes.create_context("python")
        # A thread: the asynchronous SDK reads the events in this one.
        call = lambda event: threading.Thread(target=codes.interrupt, args=[event.id]).start()
        ran = codes.run("while True: pass", context=context, handlers=handlers(codes, on_init=call))
        assert ran.error.name == "KeyboardInterrupt", ran
        codes.delete_context(context.id)
