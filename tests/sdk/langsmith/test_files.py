"""Files of a box."""

import asyncio
import os

import pytest
from conftest import HAS_TEMPLATES, call, create
from langsmith.sandbox import ResourceNotFoundError, SandboxOperationError

pytestmark = pytest.mark.asyncio


async def test_files_are_written_and_read(box):
    for content in [b"", b"text\n", bytes(range(256)) * 40, os.urandom(3 << 20)]:
        await call(box.write, "/tmp/a/b/file", content)
        assert await call(box.read, "/tmp/a/b/file") == content
    await call(box.write, "/tmp/text", "\u00fcber")
    assert await call(box.read, "/tmp/text") == "\u00fcber".encode()


async def test_odd_names_are_kept(box):
    for name in ["with space", "100%", "\u00fc\u20ac", "a+b&c=d?e#f", "q'uo\"te"]:
        await call(box.write, f"/tmp/odd/{name}", name.encode())
        assert await call(box.read, f"/tmp/odd/{name}") == name.encode()
    listed = await call(box.run, "ls /tmp/odd | wc -l")
    assert listed.stdout.strip() == "5"


async def test_commands_see_the_files(box):
    await call(box.write, "/tmp/script", "echo from a file")
    assert (await call(box.run, "bash /tmp/script")).stdout == "from a file\n"


async def test_a_relative_path_begins_at_the_working_directory(box):
    await call(box.write, "relative.txt", b"r")
    assert (await call(box.run, "cat relative.txt")).stdout == "r"


async def test_a_missing_file_is_not_found(box):
    with pytest.raises(ResourceNotFoundError) as refused:
        await call(box.read, "/tmp/none")
    assert refused.value.resource_type == "file"


async def test_a_directory_is_an_operation_error(box):
    with pytest.raises(SandboxOperationError) as refused:
        await call(box.read, "/tmp")
    assert (refused.value.operation, refused.value.error_type) == ("read", "ReadError")
    with pytest.raises(SandboxOperationError) as refused:
        await call(box.write, "/tmp", b"x")
    assert (refused.value.operation, refused.value.error_type) == ("write", "WriteError")


async def test_a_forbidden_file_is_an_operation_error(box):
    await call(box.run, "mkdir -p /tmp/locked && touch /tmp/locked/file && chmod 000 /tmp/locked")
    with pytest.raises(SandboxOperationError) as refused:
        await call(box.read, "/tmp/locked/file")
    assert refused.value.error_type == "PermissionDenied"
    with pytest.raises(SandboxOperationError):
        await call(box.write, "/tmp/locked/other", b"x")


async def test_a_deleted_box_has_no_files(client, box):
    other = await create(client)
    await call(client.delete_sandbox, other.name)
    with pytest.raises(ResourceNotFoundError):
        await call(other.read, "/etc/hostname")
    with pytest.raises(ResourceNotFoundError):
        await call(other.write, "/tmp/file", b"x")


if not HAS_TEMPLATES:

    async def test_attributes_and_ranges(box):
        await call(box.write, "/tmp/digits", b"0123456789")
        stat = await call(box.stat, "/tmp/digits")
        assert (stat.size_bytes, stat.content_type) == (10, "application/octet-stream")
        assert stat.etag and stat.last_modified
        part = await call(box.read_range, "/tmp/digits", start=2, end=4)
        assert (part.content, part.start, part.end, part.total_bytes, part.partial) == (b"234", 2, 5, 10, True)
        assert part.etag == stat.etag
        tail = await call(box.read_range, "/tmp/digits", suffix_bytes=3)
        assert (tail.content, tail.start) == (b"789", 7)
        rest = await call(box.read_range, "/tmp/digits", start=8, end=100)
        assert rest.content == b"89"
        unchanged = await call(box.read_range, "/tmp/digits", start=0, if_none_match=stat.etag)
        assert unchanged.unchanged and unchanged.content == b""
        await call(box.write, "/tmp/digits", b"changed content")
        whole = await call(box.read_range, "/tmp/digits", start=2, if_range=stat.etag)
        assert (whole.content, whole.partial) == (b"changed content", False)
        with pytest.raises(SandboxOperationError):
            await call(box.read_range, "/tmp/digits", start=1000)
        with pytest.raises(ResourceNotFoundError):
            await call(box.stat, "/tmp/none")

    async def test_files_are_found(box):
        for name in ["a.py", "b.txt", "sub/c.py", "sub/deep/d.py", ".env", ".hidden/e.py"]:
            await call(box.write, f"/tmp/tree/{name}", f"line one\nneedle.* in {name}\nlast\n")
        found = await call(box.glob, "**/*.py", "/tmp/tree")
        paths = sorted(entry.path for entry in found)
        assert paths == [f"/tmp/tree/{name}" for name in [".hidden/e.py", "a.py", "sub/c.py", "sub/deep/d.py"]]
        assert not found.truncated and all(not entry.is_dir and entry.size_bytes > 0 and entry.modified_at for entry in found)
        listed = await call(box.ls, "/tmp/tree")
        assert sorted((entry.path, entry.is_dir) for entry in listed) == [
            ("/tmp/tree/.env", False),
            ("/tmp/tree/.hidden", True),
            ("/tmp/tree/a.py", False),
            ("/tmp/tree/b.txt", False),
            ("/tmp/tree/sub", True),
        ]
        few = await call(box.glob, "**/*.py", "/tmp/tree", limit=1)
        assert len(few) == 1 and few.truncated
        with pytest.raises(ResourceNotFoundError):
            await call(box.glob, "*", "/tmp/none")

    async def test_lines_are_found_literally(box):
        for name in ["a.py", "b.txt", "sub/c.py"]:
            await call(box.write, f"/tmp/tree/{name}", f"line one\nneedle.* in {name}\nneedlexx\n")
        found = await call(box.grep, "needle.*", "/tmp/tree")
        assert sorted((match.path, match.line) for match in found) == [
            ("/tmp/tree/a.py", 2),
            ("/tmp/tree/b.txt", 2),
            ("/tmp/tree/sub/c.py", 2),
        ]
        some = await call(box.grep, "needle", "/tmp/tree", glob="*.py")
        assert {match.path for match in some} == {"/tmp/tree/a.py", "/tmp/tree/sub/c.py"}
        few = await call(box.grep, "needle", "/tmp/tree", limit=1)
        assert len(few) == 1 and few.truncated


    @pytest.mark.parametrize(
        "pattern, found, searched",
        [
            # Without a slash, `grep` compares the name, and `glob` the whole path.
            ("*.py", ["a.py", "b.py"], ["a.py", "b.py", "sub/a.py", "sub/deep/c.py"]),
            ("sub/*.py", ["sub/a.py"], ["sub/a.py"]),
            ("**/a.py", ["a.py", "sub/a.py"], ["a.py", "sub/a.py"]),
            ("[ab].py", ["a.py", "b.py"], ["a.py", "b.py", "sub/a.py"]),
            ("[!a].py", ["b.py"], ["b.py", "sub/deep/c.py"]),
            ("?.py", ["a.py", "b.py"], ["a.py", "b.py", "sub/a.py", "sub/deep/c.py"]),
            ("*.{txt,md}", ["c.txt"], ["c.txt"]),
        ],
    )
    async def test_patterns_select_files(box, pattern, found, searched):
        for name in ["a.py", "b.py", "c.txt", "sub/a.py", "sub/deep/c.py"]:
            await call(box.write, f"/tmp/tree/{name}", "needle\n")
        globbed = await call(box.glob, pattern, "/tmp/tree")
        assert sorted(entry.path for entry in globbed) == [f"/tmp/tree/{name}" for name in found]
        grepped = await call(box.grep, "needle", "/tmp/tree", glob=pattern)
        assert sorted(match.path for match in grepped) == [f"/tmp/tree/{name}" for name in searched]


async def test_an_upload_is_written_at_once(client, box):
    """A reader sees the old file or the new one."""
    await call(box.write, "/tmp/big", b"a" * (4 << 20))
    writing = asyncio.gather(*(call(box.write, "/tmp/big", letter * (4 << 20)) for letter in (b"b", b"c")))
    for _ in range(5):
        content = await call(box.read, "/tmp/big")
        assert len(content) == 4 << 20 and len(set(content)) == 1
    await writing
