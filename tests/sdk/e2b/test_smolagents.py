"""The executor of smolagents, in a template with the packages that its tools import."""

import os
import pathlib

import PIL
import pytest
from e2b import Template
from smolagents import FinalAnswerTool, tool
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import E2BExecutor


@tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one
        b: two
    """
    return a + b


def test_an_executor(server):
    packages = pathlib.Path(PIL.__file__).parent.parent
    template = Template(file_context_path=str(packages)).from_base_image()
    for name in ["PIL", "pillow.libs", "numpy", "numpy.libs"]:
        if (packages / name).is_dir():
            template = template.copy(name, f"/home/user/packages/{name}")
    name = f"pictures-{os.getpid()}"
    Template.build(template.set_envs({"PYTHONPATH": "/home/user/packages"}), name)
    executor = E2BExecutor([], AgentLogger(level=LogLevel.ERROR), template=name)
    try:
        ran = executor("print('hi')\n6 * 7")
        assert (str(ran.output), ran.logs, ran.is_final_answer) == ("42", "hi\n", False)
        executor.send_variables({"given": {"k": [1, 2]}})
        assert str(executor("given['k'][1]").output) == "2"
        executor.send_tools({"add": add, "final_answer": FinalAnswerTool()})
        assert str(executor("add(1, 2)").output) == "3"
        ended = executor("final_answer({'a': 1})")
        assert (ended.output, ended.is_final_answer) == ({"a": 1}, True)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            executor("1 / 0")
    finally:
        executor.cleanup()
