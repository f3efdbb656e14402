"""Files and directories through the SDK, and the wire below it."""

from __future__ import annotations

import hashlib
import json

import httpx
import pytest
from conftest import texts
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)


@pytest.fixture
def folder(sandbox, request):
    """A folder of one test in the sandbox."""
    path = f"/tmp/{request.node.name.replace('[', '-').replace(']', '')}"
    sandbox.files.create_directories([WriteEntry(path=path)])
    yield path
    sandbox.files.delete_directories([path])


def refused(status: int, code: str | None = None):
    class Refused:
        def __enter__(self):
            self.context = pytest.raises(SandboxApiException)
            self.error = self.context.__enter__()
            return self.error

        def __exit__(self, *details):
            caught = self.context.__exit__(*details)
            assert self.error.value.status_code == status, self.error.value
            assert code is None or self.error.value.error.code == code
            return caught

    return Refused()


def test_text_and_bytes_are_written_and_read(sandbox, folder):
    files = sandbox.files
    files.write_file(f"{folder}/new/dir/text", "h\u00e9llo\nworld\n")
    assert files.read_file(f"{folder}/new/dir/text") == "h\u00e9llo\nworld\n"
    data = bytes(range(256)) * 8
    files.write_file(f"{folder}/binary", data)
    assert files.read_bytes(f"{folder}/binary") == data
    files.write_files([WriteEntry(path=f"{folder}/one", data="1"), WriteEntry(path=f"{folder}/two", data=b"2", mode=600)])
    assert files.read_file(f"{folder}/one") == "1" and files.read_file(f"{folder}/two") == "2"
    files.write_file(f"{folder}/empty", "")
    assert files.read_file(f"{folder}/empty") == "" and files.read_bytes(f"{folder}/empty") == b""
    files.write_file(f"{folder}/one", "replaced")
    assert files.read_file(f"{folder}/one") == "replaced"
    with refused(404, "FILE_NOT_FOUND"):
        files.read_file(f"{folder}/none")
    with refused(400):
        files.read_file(folder)


def test_a_big_file_arrives_unchanged(sandbox, folder):
    data = hashlib.shake_256(b"seed").digest(48 * 1024 * 1024 + 7)
    sandbox.files.write_file(f"{folder}/big", data)
    shown = sandbox.commands.run(f"sha256sum {folder}/big | cut -d' ' -f1")
    assert texts(shown.logs.stdout) == [hashlib.sha256(data).hexdigest()]
    digest = hashlib.sha256()
    for chunk in sandbox.files.read_bytes_stream(f"{folder}/big"):
        digest.update(chunk)
    assert digest.hexdigest() == hashlib.sha256(data).hexdigest()


def test_ranges_and_lines(sandbox, execd, folder):
    files, path = sandbox.files, f"{folder}/lines"
    files.write_file(path, "one\ntwo\nthree\nfour")
    for header, part in [("bytes=4-6", b"two"), ("bytes=14-", b"four"), ("bytes=-4", b"four"), ("bytes=0-0", b"o")]:
        assert files.read_bytes(path, range_header=header) == part
        answer = execd.get("/files/download", params={"path": path}, headers={"Range": header})
        assert answer.status_code == 206 and answer.headers["Content-Range"].endswith("/18")
    answer = execd.get("/files/download", params={"path": path}, headers={"Range": "bytes=18-"})
    assert answer.status_code == 416 and answer.headers["Content-Range"] == "bytes */18"
    for query, text in [((2, 2), "two\nthree"), ((1, 1), "one"), ((4, 10), "four"), ((9, 1), ""), ((3, None), "three\nfour"), ((None, 2), "one\ntwo")]:
        lines = {name: number for name, number in zip(("offset", "limit"), query, strict=True) if number}
        answer = execd.get("/files/download", params={"path": path, **lines})
        assert (answer.status_code, answer.text) == (200, text)
        assert answer.headers["Content-Type"].startswith("text/plain")
    for params in [{"path": path, "limit": "x"}, {"path": path, "offset": 0, "limit": 1}, {}]:
        assert execd.get("/files/download", params=params).status_code == 400
    both = execd.get("/files/download", params={"path": path, "offset": 1}, headers={"Range": "bytes=0-1"})
    assert both.status_code == 400
    assert files.read_file(path, offset=2, limit=1) == "two"
    whole = execd.get("/files/download", params={"path": path})
    assert whole.headers["Content-Length"] == "18"
    etag = {"If-None-Match": whole.headers["ETag"]}
    assert execd.get("/files/download", params={"path": path}, headers=etag).status_code == 304
    head = execd.head("/files/download", params={"path": path})
    assert (head.status_code, head.headers["Content-Length"], head.content) == (200, "18", b"")


def test_attributes_are_those_of_the_protocol(sandbox, execd, folder):
    files = sandbox.files
    files.write_file(f"{folder}/file", "12345", mode=644)
    files.write_file(f"{folder}/script", "#!/bin/sh\n")
    sandbox.commands.run(f"ln -s file {folder}/link")
    paths = [f"{folder}/file", f"{folder}/script", f"{folder}/link", folder]
    info = files.get_file_info(paths)
    assert list(info) == sorted(paths, key=list(info).index) and set(info) == set(paths)
    file = info[f"{folder}/file"]
    assert (file.mode, file.size, file.entry_type, file.path) == (644, 5, "file", f"{folder}/file")
    assert info[f"{folder}/script"].mode == 755, "the mode that the SDK sends by default"
    assert info[f"{folder}/link"].entry_type == "symlink" and info[folder].entry_type == "directory"
    user = texts(sandbox.commands.run("id -un; id -gn").logs.stdout)
    assert [file.owner, file.group] == user
    assert file.modified_at.tzinfo and file.created_at <= file.modified_at
    files.set_permissions([SetPermissionEntry(path=f"{folder}/file", mode=711)])
    assert files.get_file_info([f"{folder}/file"])[f"{folder}/file"].mode == 711
    with refused(400):
        files.set_permissions([SetPermissionEntry(path=f"{folder}/file", mode=4711)])
    answer = execd.post("/files/permissions", json={f"{folder}/file": {"mode": 0, "owner": "", "group": None}})
    assert answer.status_code == 200
    assert execd.post("/files/permissions", json={f"{folder}/file": {"mode": 999}}).status_code == 400
    with refused(404):
        files.get_file_info([f"{folder}/file", f"{folder}/none"])
    with refused(501):
        files.set_permissions([SetPermissionEntry(path=f"{folder}/file", owner="daemon", group="daemon", mode=600)])
    home = execd.get("/files/info", params={"path": "~"}).json()
    assert list(home) == ["~"], "the key is the path as sent"
    assert execd.get("/files/info").json()["code"] == "MISSING_QUERY"


def test_directories_are_listed_to_a_depth(sandbox, execd, folder):
    files = sandbox.files
    files.create_directories([WriteEntry(path=f"{folder}/a/b/c", mode=700), WriteEntry(path=f"{folder}/a")])
    files.write_file(f"{folder}/a/.hidden", "")
    sandbox.commands.run(f"ln -s a {folder}/link")

    def listed(depth=None):
        entry = DirectoryListEntry(path=folder, **({} if depth is None else {"depth": depth}))
        return sorted(item.path.removeprefix(folder) for item in files.list_directory(entry))

    assert listed() == ["/a", "/link"] == listed(1)
    assert listed(2) == ["/a", "/a/.hidden", "/a/b", "/link"]
    assert listed(9) == ["/a", "/a/.hidden", "/a/b", "/a/b/c", "/link"]
    assert listed(0) == []
    assert files.get_file_info([f"{folder}/a/b/c"])[f"{folder}/a/b/c"].mode == 700
    for path, status in [(f"{folder}/link", 400), (f"{folder}/a/.hidden", 400), (f"{folder}/none", 404)]:
        assert execd.get("/directories/list", params={"path": path}).status_code == status
    assert execd.get("/directories/list", params={"path": folder, "depth": "x"}).status_code == 400
    assert execd.get("/directories/list").status_code == 400
    files.create_directories([WriteEntry(path=f"{folder}/void")])
    assert execd.get("/directories/list", params={"path": f"{folder}/void"}).json() == []


def test_search_matches_names(sandbox, execd, folder):
    files = sandbox.files
    for name in ["a.txt", "b.py", ".c.txt", "deep/er/d.txt"]:
        files.write_file(f"{folder}/{name}", "")

    def found(pattern):
        return sorted(item.path.removeprefix(folder) for item in files.search(SearchEntry(path=folder, pattern=pattern)))

    assert found("*.txt") == ["/.c.txt", "/a.txt", "/deep/er/d.txt"]
    assert found("**") == ["/.c.txt", "/a.txt", "/b.py", "/deep/er/d.txt"]
    assert found("?.py") == ["/b.py"] and found("none*") == []
    assert len(execd.get("/files/search", params={"path": folder}).json()) == 4
    assert execd.get("/files/search", params={"path": f"{folder}/none"}).status_code == 404
    assert execd.get("/files/search").status_code == 400


def test_a_search_returns_all_matches(sandbox, folder):
    made = sandbox.commands.run(f"cd {folder} && mkdir a b && seq -f 'a/long-name-of-a-file-%05g.txt' 12000 | xargs touch && touch b/last.txt b/other")
    assert made.exit_code == 0
    found = [item.path for item in sandbox.files.search(SearchEntry(path=folder, pattern="*.txt"))]
    assert len(found) == len(set(found)) == 12001 and f"{folder}/b/last.txt" in found


def test_a_file_without_a_size_is_read(sandbox, execd):
    assert "processor" in sandbox.files.read_file("/proc/cpuinfo")
    answer = execd.get("/files/download", params={"path": "/dev/null"})
    assert answer.status_code == 400, "not a regular file"


def test_an_upload_over_the_limit_is_too_large(execd, folder):
    metadata = json.dumps({"path": f"{folder}/huge"}).encode()
    headers, body = multipart(("metadata", "metadata", metadata), ("file", "f", b"|"))
    head, tail = body.split(b"|")

    def chunks():
        yield head
        for _ in range(257):
            yield b"x" * 1024 * 1024
        yield tail

    answer = execd.post("/files/upload", headers=headers, content=chunks())
    assert (answer.status_code, answer.json()["code"]) == (413, "PAYLOAD_TOO_LARGE")
    assert execd.get("/files/info", params={"path": f"{folder}/huge"}).status_code == 404


def test_move_replace_and_delete(sandbox, execd, folder):
    files = sandbox.files
    files.write_file(f"{folder}/from", "aXbX", mode=640)
    files.move_files([MoveEntry(src=f"{folder}/from", dest=f"{folder}/new/parent/to")])
    path = f"{folder}/new/parent/to"
    with refused(404):
        files.move_files([MoveEntry(src=f"{folder}/from", dest=f"{folder}/x")])
    files.write_file(f"{folder}/taken", "")
    with refused(500):
        files.move_files([MoveEntry(src=path, dest=f"{folder}/taken")])
    files.replace_contents([ContentReplaceEntry(path=path, old_content="X", new_content="yy")])
    assert files.read_file(path) == "ayybyy" and files.get_file_info([path])[path].mode == 640
    detailed = files.replace_contents_detailed([ContentReplaceEntry(path=path, old_content="yy", new_content="z")])
    assert [(item.path, item.replaced_count) for item in detailed] == [(path, 2)]
    none = files.replace_contents_detailed([ContentReplaceEntry(path=path, old_content="q", new_content="z")])
    assert none[0].replaced_count == 0
    silent = execd.post("/files/replace", json={path: {"old": "a", "new": "b"}})
    assert (silent.status_code, silent.content) == (200, b"")
    assert execd.post("/files/replace", json={path: {"old": "", "new": "b"}}).status_code == 400
    assert execd.post("/files/replace", json={f"{folder}/none": {"old": "a", "new": "b"}}).status_code == 404
    files.delete_files([path, f"{folder}/none"])
    with refused(404):
        files.read_file(path)
    files.create_directories([WriteEntry(path=f"{folder}/void")])
    sandbox.commands.run(f"ln -s void {folder}/to-void")
    for directory in ["new", "void"]:
        with refused(500):
            files.delete_files([f"{folder}/taken", f"{folder}/{directory}"])
    files.delete_files([f"{folder}/to-void"])
    assert set(files.get_file_info([f"{folder}/new", f"{folder}/void", f"{folder}/taken"])) == {f"{folder}/{name}" for name in ("new", "void", "taken")}
    files.delete_directories([f"{folder}/new", f"{folder}/never"])
    with refused(404):
        files.get_file_info([f"{folder}/new"])


def test_an_identity_is_the_guest_or_is_refused(sandbox):
    user, group = map(int, texts(sandbox.commands.run("id -u; id -g").logs.stdout))
    files = sandbox.files_with_identity(user, group)
    files.write_file("/tmp/identity", "mine")
    assert files.read_file("/tmp/identity") == "mine"
    for uid, gid in [(user + 1, group), (0, 0), (user, group + 1)]:
        with refused(501):
            sandbox.files_with_identity(uid, gid).write_file("/tmp/identity", "x")
    assert files.read_file("/tmp/identity") == "mine"


def multipart(*parts: tuple[str, str, bytes]) -> tuple[dict[str, str], bytes]:
    body = b""
    for name, filename, content in parts:
        body += b"--b\r\n"
        body += f'Content-Disposition: form-data; name="{name}"; filename="{filename}"\r\n\r\n'.encode()
        body += content + b"\r\n"
    return {"Content-Type": "multipart/form-data; boundary=b"}, body + b"--b--\r\n"


def test_uploads_use_the_path_of_the_metadata(execd, folder):
    metadata = json.dumps({"path": f"{folder}/real", "owner": None, "group": None, "mode": 600}).encode()
    headers, body = multipart(("metadata", "metadata", metadata), ("file", "/etc/other", b"content"))

    def chunks():
        for at in range(0, len(body), 7):
            yield body[at : at + 7]

    # Without a length, as the SDK sends it.
    assert execd.post("/files/upload", headers=headers, content=chunks()).status_code == 200
    assert execd.get("/files/download", params={"path": f"{folder}/real"}).text == "content"
    for parts, code in [
        ([("file", "f", b"x")], "INVALID_FILE_METADATA"),
        ([("metadata", "metadata", b"{}"), ("file", "f", b"x")], "INVALID_FILE_METADATA"),
        ([("metadata", "metadata", b"not json"), ("file", "f", b"x")], "INVALID_FILE_METADATA"),
        ([("metadata", "metadata", metadata)], "INVALID_FILE"),
    ]:
        headers, body = multipart(*parts)
        answer = execd.post("/files/upload", headers=headers, content=body)
        assert (answer.status_code, answer.json()["code"]) == (400, code)
    assert execd.post("/files/upload", content=b"plain").status_code == 400


def test_a_cut_upload_leaves_the_file_as_it_was(execd, folder):
    path = f"{folder}/kept"
    metadata = json.dumps({"path": path}).encode()
    headers, body = multipart(("metadata", "metadata", metadata), ("file", "f", b"old"))
    assert execd.post("/files/upload", headers=headers, content=body).status_code == 200
    _, body = multipart(("metadata", "metadata", metadata), ("file", "f", b"n" * 5_000_000))

    def cut():
        yield body[:3_000_000]
        raise ConnectionError("cut")

    with pytest.raises((ConnectionError, httpx.HTTPError)):
        execd.post("/files/upload", headers=headers, content=cut())
    assert execd.get("/files/download", params={"path": path}).text == "old"
    truncated = execd.post("/files/upload", headers=headers, content=body[:2_000_000])
    assert truncated.status_code == 400
    assert execd.get("/files/download", params={"path": path}).text == "old"


def test_a_long_list_comes_in_parts(sandbox, execd, folder):
    made = sandbox.commands.run(f"cd {folder} && mkdir a b && seq -f a/%g 1 15000 | xargs touch && seq -f b/%g 1 8000 | xargs touch")
    assert made.exit_code == 0
    expected = {f"{folder}/a/{number}" for number in range(1, 15001)} | {f"{folder}/b/{number}" for number in range(1, 8001)}
    for path, query, more in [
        ("/files/search", {"path": folder, "pattern": "*"}, set()),
        ("/directories/list", {"path": folder, "depth": 4_000_000_000}, {f"{folder}/a", f"{folder}/b"}),
    ]:
        answer = execd.get(path, params=query).raise_for_status()
        # The server does not collect the list.
        assert "content-length" not in answer.headers and answer.headers["content-type"] == "application/json"
        found = [entry["path"] for entry in answer.json()]
        assert len(found) == len(set(found)) and set(found) == expected | more
    found = execd.get("/files/search", params={"path": folder, "pattern": "7*"}).json()
    assert len(found) == len([path for path in expected if path.rsplit("/")[-1].startswith("7")])
    assert execd.get("/directories/list", params={"path": f"{folder}/none", "depth": 9}).status_code == 404
