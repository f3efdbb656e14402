"""LangChain's own tests of sandboxes, through its E2B backend."""

import inspect

import pytest
from e2b import Sandbox
from langchain_e2b import E2BSandbox
from langchain_tests.integration_tests import SandboxIntegrationTests


class TestE2BSandbox(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self, server):
        sandbox = Sandbox.create(timeout=600)
        # Its tests call `python`, which Debian has under another name.
        sandbox.commands.run("mkdir bin; ln -s $(command -v python3) bin/python; echo 'PATH=~/bin:$PATH' > .profile")
        yield E2BSandbox(sandbox=sandbox)
        sandbox.kill()


# LangChain leaves it to the settings of pytest how its asynchronous tests run.
for _name, _run in inspect.getmembers(SandboxIntegrationTests, inspect.iscoroutinefunction):
    setattr(TestE2BSandbox, _name, pytest.mark.asyncio(loop_scope="session")(_run))
