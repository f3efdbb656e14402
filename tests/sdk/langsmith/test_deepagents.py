"""The sandbox of deepagents, which runs on LangSmith's client."""

import asyncio

import pytest
from conftest import call, create
from deepagents.backends.langsmith import LangSmithSandbox

pytestmark = pytest.mark.asyncio


async def backend(server) -> tuple:
    client = server.client()
    box = await create(client)
    return client, box, LangSmithSandbox(box)


async def test_commands_and_files(server):
    client, box, sandbox = await backend(server)

    def use() -> None:
        assert sandbox.id == box.name
        done = sandbox.execute("echo out; echo err >&2; exit 2")
        assert done.exit_code == 2 and "out" in done.output and "err" in done.output
        assert sandbox.write("/tmp/work/a.py", "import os\nprint('one')\n").error is None
        read = sandbox.read("/tmp/work/a.py")
        assert "print('one')" in read.file_data["content"]
        edited = sandbox.edit("/tmp/work/a.py", "one", "two")
        assert edited.error is None and edited.occurrences == 1
        assert sandbox.execute("python3 /tmp/work/a.py").output.strip() == "two"
        assert [entry["path"] for entry in sandbox.ls("/tmp/work").entries] == ["/tmp/work/a.py"]
        found = sandbox.grep("two", path="/tmp/work")
        assert [(match["path"], match["line"]) for match in found.matches] == [("/tmp/work/a.py", 2)]
        globbed = sandbox.glob("**/*.py", path="/tmp/work")
        assert [match["path"].rsplit("/", 1)[-1] for match in globbed.matches] == ["a.py"]
        uploaded = sandbox.upload_files([("/tmp/work/b.bin", bytes(range(256)))])
        assert uploaded[0].error is None
        downloaded = sandbox.download_files(["/tmp/work/b.bin", "/tmp/none"])
        assert downloaded[0].content == bytes(range(256)) and downloaded[1].error

    await asyncio.to_thread(use)
    done = await sandbox.aexecute("echo async")
    assert done.output == "async\n"
    await sandbox.aclose()
    await call(client.delete_sandbox, box.name)
