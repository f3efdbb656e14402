"""Files, through E2B's own SDK."""

import gzip
import io

import httpx
import pytest
from conftest import needs
from e2b import FileType, NotFoundException
from e2b.exceptions import InvalidArgumentException, NotEnoughSpaceException, SandboxException
from waiting import eventually


def test_text_and_bytes(sandbox):
    info = sandbox.files.write("folder/ä b.txt", "grüße\n")
    assert (info.name, info.path) == ("ä b.txt", "/home/user/folder/ä b.txt")
    assert sandbox.files.read("folder/ä b.txt") == "grüße\n"
    data = bytes(range(256)) * 20_000
    sandbox.files.write("data", data)
    assert bytes(sandbox.files.read("data", format="bytes")) == data
    assert b"".join(sandbox.files.read("data", format="stream")) == data
    sandbox.files.write("data", io.BytesIO(data[:1000]))
    assert bytes(sandbox.files.read("data", format="bytes")) == data[:1000]
    sandbox.files.write("empty", "")
    assert sandbox.files.read("empty") == ""
    sandbox.files.write("~/tilde", "~")
    assert sandbox.files.read("/home/user/tilde") == "~"
    assert sandbox.files.read("$HOME" if sandbox.files.exists("$HOME") else "tilde") == "~"


def test_several_files_at_once(sandbox):
    many = [{"path": f"/tmp/many/ü{n}/f", "data": str(n)} for n in range(5)]
    write = getattr(sandbox.files, "write_files", None) or sandbox.files.write
    assert [info.path for info in write(many)] == [entry["path"] for entry in many]
    assert [sandbox.files.read(entry["path"]) for entry in many] == list("01234")


def test_directories(sandbox):
    assert sandbox.files.make_dir("a/b/c") is True
    assert sandbox.files.make_dir("a/b/c") is False
    sandbox.files.write("a/x", "1")
    sandbox.files.write("a/.hidden", "1")
    names = {entry.name: entry.type for entry in sandbox.files.list("a")}
    assert names == {"b": FileType.DIR, "x": FileType.FILE, ".hidden": FileType.FILE}
    deep = [entry.path for entry in sandbox.files.list("a", depth=3)]
    assert "/home/user/a/b/c" in deep
    assert sandbox.files.exists("a/x") and not sandbox.files.exists("a/y")
    info = sandbox.files.get_info("a/x")
    assert (info.size, info.permissions, info.owner, info.group) == (1, "-rw-r--r--", "user", "user")
    moved = sandbox.files.rename("a/x", "new/place/y")
    assert moved.path == "/home/user/new/place/y" and not sandbox.files.exists("a/x")
    sandbox.files.remove("a")
    sandbox.files.remove("a")
    assert not sandbox.files.exists("a")
    sandbox.commands.run("mkdir d; ln -s d link")
    link = sandbox.files.get_info("link")
    assert link.symlink_target == "/home/user/d"
    assert link.type in (FileType.DIR, getattr(FileType, "SYMLINK", None))


def test_errors(sandbox):
    with pytest.raises(NotFoundException):
        sandbox.files.read("missing")
    with pytest.raises(NotFoundException):
        sandbox.files.list("missing")
    with pytest.raises(NotFoundException):
        sandbox.files.rename("missing", "b")
    with pytest.raises(NotFoundException):
        sandbox.files.get_info("missing")
    sandbox.files.write("file", "x")
    with pytest.raises((InvalidArgumentException, SandboxException)):
        sandbox.files.list("file")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read("/tmp")
    with pytest.raises(SandboxException):
        sandbox.files.write("/usr/bin/x", "x")


def test_signed_addresses(sandbox, server):
    sandbox.files.write("secret file", "content")
    address = sandbox.download_url("secret file")
    answer = httpx.get(address)
    assert (answer.status_code, answer.text) == (200, "content")
    assert httpx.get(address, headers={"Range": "bytes=1-3"}).text == "ont"
    limited = sandbox.download_url("secret file", use_signature_expiration=100)
    assert httpx.get(limited).text == "content"
    for wrong in [
        address.replace("v1_", "v1_x"),
        address.replace("secret", "other"),
        limited.replace("signature_expiration=", "signature_expiration=9"),
        f"{server.url}/files?path=secret%20file",
        sandbox.download_url("secret file", use_signature_expiration=-100),
    ]:
        assert httpx.get(wrong).status_code == 401, wrong
    # An address to read does not write.
    assert httpx.post(address, files={"file": b"x"}).status_code == 401
    upload = sandbox.upload_url("up/loaded")
    assert httpx.post(upload, files={"file": ("x", b"sent")}).status_code == 200
    assert sandbox.files.read("up/loaded") == "sent"


def test_uploads_may_be_compressed(sandbox, server):
    headers = {
        "X-Access-Token": sandbox._envd_access_token,
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "Content-Type": "application/octet-stream",
        "Content-Encoding": "gzip",
    }
    url = f"{server.url}/e2b/envd/files?path=packed"
    content = b"text " * 100_000
    answer = httpx.post(url, headers=headers, content=gzip.compress(content))
    assert answer.json() == [{"name": "packed", "type": "file", "path": "/home/user/packed"}]
    assert bytes(sandbox.files.read("packed", format="bytes")) == content
    assert httpx.post(url, headers=headers, content=gzip.compress(content)[:-9]).status_code == 400
    assert bytes(sandbox.files.read("packed", format="bytes")) == content, "a broken upload changes nothing"


def test_watchers(sandbox):
    sandbox.files.make_dir("watched/sub")
    watcher = sandbox.files.watch_dir("watched", recursive=True)
    sandbox.files.write("watched/new", "1")
    sandbox.commands.run("cd watched; echo more >> new; mv new old; rm old; touch sub/deep")
    seen = []

    def saw_all():
        seen.extend((event.type.value, event.name) for event in watcher.get_new_events())
        return ("create", "sub/deep") in seen and seen

    events = eventually(saw_all)
    for expected in [("create", "new"), ("write", "new"), ("rename", "new"), ("create", "old"), ("remove", "old")]:
        assert expected in events, events
    assert not [name for _, name in events if name.startswith("#")]
    assert watcher.get_new_events() == []
    watcher.stop()
    with pytest.raises(SandboxException):
        watcher.get_new_events()
    with pytest.raises(NotFoundException):
        sandbox.files.watch_dir("missing")


def watching(server, sandbox, method, body, timeout=120):
    headers = {"X-Access-Token": sandbox._envd_access_token, "E2b-Sandbox-Id": sandbox.sandbox_id}
    url = f"{server.url}/e2b/envd/filesystem.Filesystem/{method}"
    return httpx.post(url, headers=headers, json=body, timeout=timeout)


def test_a_client_that_leaves_a_poll_loses_no_events(sandbox, server):
    sandbox.files.make_dir("polled")
    body = {"path": "polled", "includeEntry": True}
    watcher = watching(server, sandbox, "CreateWatcher", body).json()
    sandbox.commands.run("cd polled; seq 1 1500 | xargs touch")
    # The entries of so many events take longer than this.
    with pytest.raises(httpx.TimeoutException):
        watching(server, sandbox, "GetWatcherEvents", watcher, timeout=1)
    seen = set()

    def saw_all():
        events = watching(server, sandbox, "GetWatcherEvents", watcher).json()["events"]
        seen.update(event["name"] for event in events)
        return len(seen) == 1500

    eventually(saw_all)


def test_a_watcher_of_another_sandbox_is_unknown(sandbox, server):
    sandbox.files.make_dir("own")
    watcher = watching(server, sandbox, "CreateWatcher", {"path": "own"}).json()
    sandbox.files.write("own/file", "x")

    def poll():
        return watching(server, sandbox, "GetWatcherEvents", watcher).json()["events"]

    eventually(lambda: any(event["name"] == "file" for event in poll()))
    eventually(lambda: poll() == [])
    with type(sandbox).create(timeout=600) as other:
        assert watching(server, other, "RemoveWatcher", watcher).status_code == 404
        assert watching(server, other, "GetWatcherEvents", watcher).status_code == 404
    assert poll() == [], "the place of the watcher is kept"



# Moves a directory here that is too deep to be watched.
TOO_DEEP = """python3 -c '
import os
target = os.path.join(os.getcwd(), "deep")
os.mkdir("../deep")
os.chdir("../deep")
for _ in range(20):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
os.rename("/home/user/deep", target)
'"""


def test_lost_changes_fail_a_watcher_once(sandbox):
    sandbox.files.make_dir("lost")
    watcher = sandbox.files.watch_dir("lost", recursive=True)
    sandbox.commands.run(TOO_DEEP, cwd="/home/user/lost")

    def failure():
        try:
            watcher.get_new_events()
        except SandboxException as error:
            return str(error)

    assert "changes were lost" in eventually(failure)
    sandbox.files.write("lost/later", "x")
    eventually(lambda: [event for event in watcher.get_new_events() if event.name == "later"])


def test_a_full_disk_is_named(sandbox):
    sandbox.commands.run("head -c 370M /dev/zero > big")
    with pytest.raises(NotEnoughSpaceException, match="space"):
        for number in range(8):
            sandbox.files.write(f"more-{number}", b"x" * 8_000_000)


def test_a_watcher_sees_what_changed(sandbox):
    """The events of E2B's own server, for a file of the SDK and for files of commands."""
    sandbox.files.make_dir("seen")
    watcher = sandbox.files.watch_dir("seen")

    seen = []

    def new(count):
        """Returns the next events: as many, and those that a second request finds."""
        seen.clear()
        more = lambda: [(event.type.value, event.name) for event in watcher.get_new_events()]
        eventually(lambda: seen.extend(more()) or len(seen) >= count)
        return seen + more()

    sandbox.files.write("seen/f", "1")
    assert new(3) == [("create", "f"), ("chmod", "f"), ("write", "f")]
    sandbox.commands.run("chmod 600 seen/f")
    assert new(1) == [("chmod", "f")]
    sandbox.commands.run("echo 2 >> seen/f")
    assert new(1) == [("write", "f")]
    sandbox.commands.run("mkdir seen/d; mv seen/f seen/g; rm seen/g")
    assert new(4) == [("create", "d"), ("rename", "f"), ("create", "g"), ("remove", "g")]
    watcher.stop()


@needs("sandbox_sync.filesystem.filesystem.Filesystem.write(metadata)")
def test_metadata_of_files(sandbox):
    metadata = {"author": "me", "purpose": "a test"}
    for name, options in [("form", {}), ("bytes", {"use_octet_stream": True})]:
        assert sandbox.files.write(f"m/{name}", "x", metadata=metadata, **options).metadata == metadata
        assert sandbox.files.get_info(f"m/{name}").metadata == metadata
    assert [entry.metadata for entry in sandbox.files.list("m")] == [metadata, metadata]
    large = sandbox.files.write("m/large", b"x" * 3_000_000, metadata={"k": "v"})
    assert large.metadata == {"k": "v"} == sandbox.files.get_info("m/large").metadata
    assert sandbox.files.rename("m/form", "m/moved").metadata == metadata
    assert sandbox.files.write("m/moved", "y").metadata is None
    assert sandbox.files.get_info("m/moved").metadata is None
    sandbox.commands.run("python3 -c 'import os; os.setxattr(\"m/moved\", \"user.e2b.by\", b\"command\")'")
    assert sandbox.files.get_info("m/moved").metadata == {"by": "command"}
    with pytest.raises(InvalidArgumentException, match="at most 4096"):
        sandbox.files.write("m/no", "x", metadata={"k": "v" * 4096})
    assert not sandbox.files.exists("m/no")
