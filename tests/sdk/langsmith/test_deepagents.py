"""The sandbox of deepagents, which runs on LangSmith's client."""

import asyncio

import pytest
from conftest import call, create
from deepagents.backends.langsmith import LangSmithSandbox
from langsmith.sandbox import CommandTimeoutError

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
        downloaded = sandbox.download_files(["/tmp/work/b.bin", "/tmp/none", "/tmp/work"])
        assert downloaded[0].content == bytes(range(256))
        assert [file.error for file in downloaded] == [None, "file_not_found", "is_directory"]

    await asyncio.to_thread(use)
    done = await sandbox.aexecute("echo async")
    assert done.output == "async\n"
    await sandbox.aclose()
    await call(client.delete_sandbox, box.name)


async def test_asynchronous_commands_and_files(server):
    client, box, sandbox = await backend(server)
    assert (await sandbox.awrite("/tmp/work/a.py", "import os\nprint('one')\n")).error is None
    assert "print('one')" in (await sandbox.aread("/tmp/work/a.py")).file_data["content"]
    part = await sandbox.aread("/tmp/work/a.py", offset=1, limit=1)
    assert (part.file_data["content"], part.total_lines) == ("print('one')", 2)
    assert "file_not_found" in (await sandbox.aread("/tmp/none")).error
    edited = await sandbox.aedit("/tmp/work/a.py", "one", "two")
    assert edited.error is None and edited.occurrences == 1
    assert (await sandbox.aedit("/tmp/work/a.py", "none", "two")).error
    # Text of this size does not fit into a command.
    large = "x" * 300_000
    edited = await sandbox.aedit("/tmp/work/a.py", "two", large)
    assert edited.error is None and edited.occurrences == 1
    ran = await sandbox.aexecute("python3 /tmp/work/a.py | wc -c")
    assert (ran.output.strip(), ran.exit_code) == ("300001", 0)
    assert [entry["path"] for entry in (await sandbox.als("/tmp/work")).entries] == ["/tmp/work/a.py"]
    found = await sandbox.agrep("import os", path="/tmp/work")
    assert [(match["path"], match["line"]) for match in found.matches] == [("/tmp/work/a.py", 1)]
    globbed = await sandbox.aglob("**/*.py", path="/tmp/work")
    assert [match["path"].rsplit("/", 1)[-1] for match in globbed.matches] == ["a.py"]
    uploaded = await sandbox.aupload_files([("/tmp/work/b.bin", bytes(range(256))), ("relative", b"x")])
    assert [file.error for file in uploaded] == [None, "invalid_path"]
    (downloaded,) = await sandbox.adownload_files(["/tmp/work/b.bin"])
    assert (downloaded.content, downloaded.error) == (bytes(range(256)), None)
    deleted = await sandbox.adelete("/tmp/work/b.bin")
    assert deleted.error is None
    (downloaded,) = await sandbox.adownload_files(["/tmp/work/b.bin"])
    assert downloaded.error == "file_not_found"
    assert (await sandbox.adelete("/tmp/work/b.bin")).error
    await sandbox.aclose()
    await call(client.delete_sandbox, box.name)


async def test_a_command_that_takes_too_long_is_a_timeout(server):
    client, box, sandbox = await backend(server)
    with pytest.raises(CommandTimeoutError):
        await asyncio.to_thread(sandbox.execute, "sleep 100", timeout=1)
    with pytest.raises(CommandTimeoutError):
        await sandbox.aexecute("sleep 100", timeout=1)
    # The box runs on.
    assert sandbox.execute("echo after").output == "after\n"
    await sandbox.aclose()
    await call(client.delete_sandbox, box.name)


async def test_much_output_goes_to_a_file(server):
    client, box, sandbox = await backend(server)
    command, limits = "seq 1 100000; exit 3", {"max_inline_bytes": 10_000}
    for number, ran in enumerate(
        [
            await asyncio.to_thread(sandbox.execute_with_offload, command, "/tmp/captured0", **limits),
            await sandbox.aexecute_with_offload(command, "/tmp/captured1", **limits),
        ]
    ):
        assert ran.offloaded and ran.response.exit_code == 3 and len(ran.response.output) < 20_000
        written = await asyncio.to_thread(box.read, f"/tmp/captured{number}")
        assert written.decode() == "".join(f"{line}\n" for line in range(1, 100001))
    await sandbox.aclose()
    await call(client.delete_sandbox, box.name)
