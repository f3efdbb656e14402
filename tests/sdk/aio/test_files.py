"""`/v1/file`: content, lists, searches, edits and watches."""

import base64
import threading

import pytest
import requests
from agent_sandbox.core.api_error import ApiError
from conftest import run
from waiting import eventually

HOME = "/home/gem"


def write(client, name: str, content: str, **options):
    return client.file.write_file(file=f"{HOME}/{name}", content=content, **options).data


def read(client, name: str, **options) -> str:
    return client.file.read_file(file=f"{HOME}/{name}", **options).data.content


def refused(call) -> int:
    with pytest.raises(ApiError) as error:
        call()
    assert error.value.body["success"] is False and error.value.body["message"]
    return error.value.status_code


def test_text_is_written_appended_and_read(client):
    assert write(client, "a/b.txt", "one\n").bytes_written == 4
    write(client, "a/b.txt", "two", append=True, leading_newline=False, trailing_newline=True)
    assert read(client, "a/b.txt") == "one\ntwo\n"
    write(client, "a/b.txt", "é")
    assert read(client, "a/b.txt") == "é"
    write(client, "new", "x", append=True, leading_newline=True)
    assert read(client, "new") == "\nx"


def test_lines_count_from_zero_and_the_end_is_excluded(client):
    write(client, "f", "0\n1\n2\n3\n")
    assert read(client, "f", start_line=1, end_line=3) == "1\n2\n"
    assert read(client, "f", start_line=2) == "2\n3\n"
    assert read(client, "f", end_line=1) == "0\n"
    assert read(client, "f", start_line=2, end_line=2) == ""
    assert read(client, "f", start_line=99) == ""


def test_bytes_are_written_as_base64_and_downloaded(client):
    data = bytes(range(256)) * 2000
    write(client, "bin", base64.b64encode(data).decode(), encoding="base64")
    assert b"".join(client.file.download_file(path=f"{HOME}/bin")) == data
    assert refused(lambda: read(client, "bin")) == 400
    assert refused(lambda: write(client, "bin", "?", encoding="base64")) == 400
    assert b"".join(client.file.download_file(path=f"{HOME}/bin")) == data
    write(client, "empty", "")
    assert b"".join(client.file.download_file(path=f"{HOME}/empty")) == b""


def test_large_files_pass_both_ways(sandbox):
    data = b"0123456789abcdef" * (3 * 1024 * 1024)
    write(sandbox, "large", base64.b64encode(data).decode(), encoding="base64")
    assert b"".join(sandbox.file.download_file(path=f"{HOME}/large")) == data
    assert refused(lambda: read(sandbox, "large")) == 413


def test_a_form_uploads_a_file(client):
    data = b"\x00\xff" * 100_000
    uploaded = client.file.upload_file(file=("name.bin", data), path=f"{HOME}/up/x.bin").data
    assert (uploaded.file_path, uploaded.file_size, uploaded.success) == (f"{HOME}/up/x.bin", 200_000, True)
    assert b"".join(client.file.download_file(path=f"{HOME}/up/x.bin")) == data
    assert client.file.upload_file(file=("n.bin", b"1"), path=f"{HOME}/up").data.file_path == f"{HOME}/up/n.bin"
    assert client.file.upload_file(file=("t.bin", b"1")).data.file_path == "/tmp/t.bin"


def test_failures_have_real_statuses(client):
    assert refused(lambda: read(client, "missing")) == 404
    assert refused(lambda: client.file.read_file(file=HOME)) == 400
    assert refused(lambda: client.file.read_file(file="relative")) == 400
    assert refused(lambda: client.file.read_file(file=f"{HOME}/../x")) == 400
    assert refused(lambda: client.file.write_file(file="/proc/1/mem", content="x")) in (400, 403, 404)
    assert refused(lambda: write(client, "x" * 300, "x")) == 400
    assert refused(lambda: client.file.list_path(path=f"{HOME}/missing")) == 404
    assert refused(lambda: client.file.find_files(path=f"{HOME}/missing", glob="*")) == 404
    assert refused(lambda: client.file.grep_files(path=f"{HOME}/missing", pattern="x")) == 404
    run(client, f"mkfifo {HOME}/fifo; echo x > {HOME}/locked; chmod 0 {HOME}/locked")
    assert refused(lambda: client.file.read_file(file=f"{HOME}/fifo")) == 400
    assert refused(lambda: read(client, "locked")) == 403
    assert refused(lambda: list(client.file.download_file(path=f"{HOME}/none"))) == 404
    assert refused(lambda: list(client.file.download_file(path="/a/../b"))) == 400


def test_an_endless_device_is_not_read(box_url):
    answer = requests.post(f"{box_url}/v1/file/read", json={"file": "/dev/zero"}, timeout=60)
    assert 400 <= answer.status_code < 500
    answer = requests.get(f"{box_url}/v1/file/download", params={"path": "/dev/zero"}, timeout=60)
    assert 400 <= answer.status_code < 500


def test_links_resolve_inside_the_box(client):
    run(client, f"ln -s /etc/passwd {HOME}/link; ln -s target {HOME}/soft; echo t > {HOME}/target; chmod 640 {HOME}/target")
    assert "gem" in read(client, "link")
    write(client, "soft", "through\n")
    assert run(client, f"cat {HOME}/target; stat -c %a {HOME}/target; test -L {HOME}/soft && echo link").output == (
        "through\n640\nlink\n"
    )


def test_directories_are_listed(client):
    for name in ["b.py", "a.txt", ".hidden", "sub/c.py", "sub/deep/d.txt"]:
        write(client, f"tree/{name}", name)
    listed = client.file.list_path(path=f"{HOME}/tree").data
    assert [entry.name for entry in listed.files] == [".hidden", "a.txt", "b.py", "sub"]
    assert (listed.total_count, listed.directory_count, listed.file_count) == (4, 1, 3)
    entry = listed.files[1]
    assert (entry.path, entry.is_directory, entry.size, entry.extension) == (f"{HOME}/tree/a.txt", False, 5, ".txt")
    assert listed.files[3].is_directory
    deep = client.file.list_path(path=f"{HOME}/tree", recursive=True, show_hidden=False).data
    assert f"{HOME}/tree/sub/deep/d.txt" in [entry.path for entry in deep.files]
    shallow = client.file.list_path(path=f"{HOME}/tree", recursive=True, max_depth=2).data
    assert f"{HOME}/tree/sub/deep/d.txt" not in [entry.path for entry in shallow.files]
    typed = client.file.list_path(path=f"{HOME}/tree", recursive=True, file_types=[".py"], include_permissions=True).data
    assert [entry.name for entry in typed.files if not entry.is_directory] == ["b.py", "c.py"]
    assert typed.files[0].permissions
    by_size = client.file.list_path(path=f"{HOME}/tree", sort_by="size", sort_desc=True).data
    assert by_size.files[0].size is None or by_size.files[0].size >= (by_size.files[-1].size or 0)
    assert client.file.list_path(path=f"{HOME}/tree/sub/deep").data.total_count == 1


def test_files_are_found_by_name(client):
    for name in ["top.py", "sub/a.py", "sub/b.txt", ".git/c.py"]:
        write(client, f"tree/{name}", "x")
    found = client.file.find_files(path=f"{HOME}/tree", glob="**/*.py").data.files
    assert set(found) == {f"{HOME}/tree/{name}" for name in ["top.py", "sub/a.py", ".git/c.py"]}
    assert client.file.find_files(path=f"{HOME}/tree", glob="*.py").data.files == [f"{HOME}/tree/top.py"]
    globbed = client.file.glob_files(path=f"{HOME}/tree", pattern="**/*", exclude=["*.txt"]).data
    assert [file.name for file in globbed.files] == ["a.py", "top.py"] and not globbed.truncated
    cut = client.file.glob_files(path=f"{HOME}/tree", pattern="**/*", include_hidden=True, max_results=1).data
    assert len(cut.files) == 1 and cut.truncated
    assert refused(lambda: client.file.find_files(path=f"{HOME}/tree", glob="[")) == 400


def test_lines_are_found_by_content(client):
    write(client, "g/a.py", "one\ntwo\nTwo three\n")
    write(client, "g/sub/b.txt", "two\n")
    found = client.file.grep_files(path=f"{HOME}/g", pattern="two", case_insensitive=True).data
    lines = [(match.file, match.line_number, match.line_content) for match in found.matches]
    assert lines == [
        (f"{HOME}/g/a.py", 2, "two"),
        (f"{HOME}/g/a.py", 3, "Two three"),
        (f"{HOME}/g/sub/b.txt", 1, "two"),
    ]
    assert (found.match_count, found.files_matched, found.truncated) == (3, 2, False)
    around = client.file.grep_files(path=f"{HOME}/g", pattern="^two", include=["*.py"], context_before=1, context_after=1)
    match = around.data.matches[0]
    assert (match.context_before, match.context_after) == (["one"], ["Two three"])
    assert client.file.grep_files(path=f"{HOME}/g", pattern="two", recursive=False).data.match_count == 1
    assert client.file.grep_files(path=f"{HOME}/g", pattern="two", type="py").data.match_count == 1
    assert client.file.grep_files(path=f"{HOME}/g", pattern="t.o", fixed_strings=True).data.match_count == 0
    assert client.file.grep_files(path=f"{HOME}/g", pattern="two", max_results=1).data.truncated
    pages = [
        client.file.grep_files(path=f"{HOME}/g", pattern="two", case_insensitive=True, max_results=2, offset=offset).data
        for offset in (0, 2)
    ]
    paged = [(match.file, match.line_number, match.line_content) for page in pages for match in page.matches]
    assert paged == lines and [page.truncated for page in pages] == [True, False]
    for pattern in ["(", "(?=x)"]:
        assert refused(lambda: client.file.grep_files(path=f"{HOME}/g", pattern=pattern)) == 400  # noqa: B023
    searched = client.file.search_in_file(file=f"{HOME}/g/a.py", regex="t[wh]").data
    assert (searched.matches, searched.line_numbers) == (["two", "Two three"], [2, 3])


def test_text_is_replaced_everywhere(client):
    write(client, "r", "a.b a.b")
    assert client.file.replace_in_file(file=f"{HOME}/r", old_str="a.b", new_str="c").data.replaced_count == 2
    assert read(client, "r") == "c c"
    assert client.file.replace_in_file(file=f"{HOME}/r", old_str="zzz", new_str="").data.replaced_count == 0
    assert refused(lambda: client.file.replace_in_file(file=f"{HOME}/none", old_str="a", new_str="b")) == 404


def test_the_editor_views_creates_replaces_and_inserts(client):
    def edit(command, **options):
        return client.file.str_replace_editor(command=command, path=f"{HOME}/e.txt", **options).data

    created = edit("create", file_text="one\ntwo\ntwo\n")
    assert (created.prev_exist, created.new_content) == (False, "one\ntwo\ntwo\n")
    assert edit("view").output.splitlines() == ["     1\tone", "     2\ttwo", "     3\ttwo"]
    assert edit("view", view_range=[2, -1]).output.startswith("     2\ttwo")
    assert refused(lambda: edit("str_replace", old_str="two", new_str="x")) == 400
    assert refused(lambda: edit("str_replace", old_str="none", new_str="x")) == 400
    edited = edit("str_replace", old_str="one", new_str="1")
    assert (edited.old_content, edited.new_content) == ("one\ntwo\ntwo\n", "1\ntwo\ntwo\n")
    assert edit("str_replace", old_str="two", new_str="last", replace_mode="LAST").new_content == "1\ntwo\nlast\n"
    assert edit("str_replace", old_str="two", new_str="2", replace_mode="FIRST").new_content == "1\n2\nlast\n"
    assert edit("insert", insert_line=1, new_str="between").new_content == "1\nbetween\n2\nlast\n"
    assert "e.txt" in client.file.str_replace_editor(command="view", path=HOME).data.output
    assert refused(lambda: edit("undo_edit")) == 501


def test_the_editor_changes_a_long_file(sandbox):
    run(sandbox, f"seq -f '%015.0f' 800000 > {HOME}/long")

    def edit(old, new, **options):
        path = f"{HOME}/long"
        return sandbox.file.str_replace_editor(command="str_replace", path=path, old_str=old, new_str=new, **options).data

    assert edit("000000000400001\n", "unique\n").new_content.count("unique") == 1
    last = edit("0000", "last", replace_mode="LAST")
    assert last.new_content.endswith("\n00000000080last\n") and last.new_content.count("last") == 1
    assert len(last.new_content) == len(last.old_content) > 12_000_000


def test_changes_are_watched(client):
    made = client.file.watch_create(path=HOME, recursive=True, include_patterns=["*.py"], exclude=["skip"])
    watcher = made["watcher_id"]
    assert [entry["watcher_id"] for entry in client.file.watch_list()["watchers"]] == [watcher]
    for name in ["a.txt", "skip/b.py", "c.py"]:
        write(client, name, "x")
    seen, cursor = [], 0

    def complete():
        nonlocal cursor
        polled = client.file.watch_poll(watcher, since=cursor, timeout=2)
        cursor = polled["cursor"]
        seen.extend(polled["events"])
        return any(event["path"] == f"{HOME}/c.py" for event in seen)

    eventually(complete)
    assert {event["path"] for event in seen} == {f"{HOME}/c.py"}
    assert seen[0]["type"] in ("create", "write", "rename")
    assert client.file.watch_poll(watcher, since=cursor)["events"] == []
    client.file.watch_stop(watcher)
    with pytest.raises(ApiError) as error:
        client.file.watch_poll(watcher)
    assert error.value.status_code == 404


def test_one_change_is_awaited(sandbox):
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(sandbox.file.watch_wait(path=f"{HOME}/late", timeout=120, event_types=["create"]))
    )
    waiting.start()

    def appeared():
        run(sandbox, f"rm -f {HOME}/late; touch {HOME}/late")
        return answers

    eventually(appeared)
    waiting.join()
    assert answers[0]["triggered"] and answers[0]["event"]["path"] == f"{HOME}/late"
    assert not sandbox.file.watch_wait(path=f"{HOME}/never", timeout=1)["triggered"]


def test_changes_are_streamed(sandbox, box_url):
    watcher = sandbox.file.watch_create(path=HOME)["watcher_id"]
    with requests.get(f"{box_url}/v1/file/watch/{watcher}/events", stream=True, timeout=120) as stream:
        assert stream.headers["content-type"] == "text/event-stream"
        write(sandbox, "streamed", "x")
        assert any(f"{HOME}/streamed" in line for line in stream.iter_lines(decode_unicode=True))


def test_parallel_appends_lose_nothing(sandbox):
    write(sandbox, "log", "")

    def append(number):
        for line in range(10):
            write(sandbox, "log", f"{number}-{line}\n", append=True)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(read(sandbox, "log").splitlines())) == 80


def test_no_part_of_a_result_passes_for_all(client):
    run(client, "mkdir /tmp/many; cd /tmp/many; seq 12000 | xargs touch; seq 25000 > /tmp/lines; truncate -s 17M /tmp/large")
    found = client.file.find_files(path="/tmp/many", glob="*").data
    assert len(found.files) < 12000 and found.truncated is True
    assert client.file.find_files(path="/tmp/many", glob="1*0").data.truncated is False
    lines = client.file.search_in_file(file="/tmp/lines", regex="[0-9]").data
    assert lines.line_numbers == list(range(1, 25001)) and lines.matches[-1] == "25000"
    with pytest.raises(ApiError) as refused:
        client.file.search_in_file(file="/tmp/large", regex="x")
    assert refused.value.status_code == 413


def test_a_file_in_the_place_of_a_directory_is_400(client):
    with pytest.raises(ApiError) as refused:
        client.file.write_file(file="/etc/passwd/x", content="")
    assert refused.value.status_code == 400 and refused.value.body["data"]["error_type"] == "invalid_target"


def test_the_editor_creates_over_any_file(client):
    run(client, "head -c 100 /dev/zero | tr '\\0' '\\377' > /tmp/binary; truncate -s 17M /tmp/large")
    for path in ["/tmp/binary", "/tmp/large"]:
        created = client.file.str_replace_editor(command="create", path=path, file_text="new").data
        assert (created.prev_exist, created.old_content) == (True, None)
        assert client.file.read_file(file=path).data.content == "new"
    with pytest.raises(ApiError) as refused:
        client.file.str_replace_editor(command="create", path="/bin/ls", file_text="new")
    assert refused.value.status_code == 403
