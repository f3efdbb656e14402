"""Skills, which LangBot up to 4.11.0 has its Box runtime keep: its own client, and every answer beside its own server's."""

import asyncio
import base64
import datetime
import io
import json
import logging
import pathlib
import stat
import zipfile

import pytest
import pytest_asyncio
import websockets
from aiohttp import web
from conftest import INSTANCE, TOKEN, connected, spec, websocket
from langbot_plugin.box.actions import LangBotToBoxAction
from langbot_plugin.box.client import ActionRPCBoxClient
from langbot_plugin.box.errors import BoxAdmissionError, BoxValidationError
from langbot_plugin.box.models import SandboxAdmissionGrant
from langbot_plugin.box.runtime import BoxRuntime
from langbot_plugin.box.server import create_app
from langbot_plugin.box.skill_store import BoxSkillStore
from langbot_plugin.box.tenancy import box_namespace
from langbot_plugin.entities.io.context import ActionContext

pytestmark = pytest.mark.asyncio

HEAD = "---\nname: {name}\ndescription: >-\n  Does\n  things\n---\n\nDo it.\n"


@pytest_asyncio.fixture
async def theirs():
    runtime = BoxRuntime(logging.getLogger("theirs"), backends=[])
    runner = web.AppRunner(create_app(runtime, control_token=TOKEN))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site._server.sockets[0].getsockname()[1]
    await runner.cleanup()


class Uploads:
    """The uploads of their server, by its own store: some of its versions do not find files that were just sent to them."""

    def __init__(self, caller):
        self.store = BoxSkillStore({"local": {"host_root": str(caller.root)}})
        self.store = self.store.scoped(box_namespace(ActionContext(**caller.context)))

    def answer(self, action: str, content: bytes, **members) -> dict:
        work = self.store.preview_zip_upload if "preview" in action else self.store.install_zip_upload
        try:
            data, code, message = {"skills": work(file_bytes=content, **members)}, 0, "success"
        except Exception as error:
            data, code, message = {}, 1, f"BoxValidationError: {error}"
        return {"code": code, "message": message, "data": data, "chunk_status": "continue"}


class Caller:
    """Speaks to one of the two servers, each with a directory of its own, and keeps every answer."""

    def __init__(self, port: int, root: pathlib.Path, workspace: str):
        self.port, self.root = port, root
        self.context = {"instance_uuid": INSTANCE, "workspace_uuid": workspace, "placement_generation": 1}
        self.answers: list[tuple[str, dict]] = []

    async def talk(self, conversation):
        headers = {"X-LangBot-Instance-Id": INSTANCE, "X-LangBot-Box-Control-Token": TOKEN}
        url = f"ws://127.0.0.1:{self.port}/rpc/ws"
        async with websockets.connect(url, additional_headers=headers, proxy=None, max_size=None) as self.socket:
            await self.ask("init", "box_init", {"local": {"host_root": str(self.root)}})
            await conversation(self)
        # Where a server keeps things is its own.
        return [(name, json.loads(json.dumps(answer).replace(str(self.root), "/root"))) for name, answer in self.answers]

    async def ask(self, name: str, action: str, data: dict) -> dict:
        seq_id = len(self.answers)
        await self.socket.send(json.dumps({"seq_id": seq_id, "action": action, "data": data, "context": self.context}))
        answer = json.loads(await asyncio.wait_for(self.socket.recv(), 60))
        assert answer.pop("seq_id") == seq_id
        self.answers.append((name, answer))
        return answer["data"]

    async def upload(self, content: bytes, number: int) -> str:
        key = f"ft1_{number:064x}.zip"
        pieces = [content[at : at + 16384] for at in range(0, len(content), 16384)] or [b""]
        for index, piece in enumerate(pieces):
            told = await self.ask(
                "piece",
                "__file_chunk",
                {
                    "file_key": key,
                    "file_length": len(content),
                    "chunk_base64": base64.b64encode(piece).decode(),
                    "chunk_index": index,
                    "chunk_amount": len(pieces),
                    "chunk_size": len(piece),
                },
            )
            assert (told, self.answers.pop()[1]["code"]) == ({}, 0)
        return key

    def skills(self) -> pathlib.Path:
        [place] = (self.root / "skills" / "tenants").iterdir()
        return place


OWN = {"created_at", "updated_at"}


def without_times(value):
    if isinstance(value, dict):
        return {name: isinstance(item, str) if name in OWN else without_times(item) for name, item in value.items()}
    return [without_times(item) for item in value] if isinstance(value, list) else value


async def same(own_server, theirs, tmp_path, context, conversation):
    ours = Caller(own_server().port, tmp_path / "ours", context.workspace_uuid)
    upstream = Caller(theirs, tmp_path / "theirs", context.workspace_uuid)
    mine, other = await ours.talk(conversation), await upstream.talk(conversation)
    differences = [
        f"{name}: {without_times(one)} and {without_times(two)}"
        for (name, one), (_, two) in zip(mine, other, strict=True)
        if without_times(one) != without_times(two)
    ]
    assert not differences, "\n".join(differences)
    return ours, upstream


def archive(entries: dict[str, bytes], **modes: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = modes.get(name, 0o644) << 16
            file.writestr(info, content)
    return made.getvalue()


async def test_skills_are_kept_as_langbots_own_server_keeps_them(own_server, theirs, tmp_path, context):
    async def conversation(caller: Caller):
        ask = caller.ask
        await ask("none", "box_list_skills", {})
        await ask("get none", "box_get_skill", {"name": "one"})
        await ask("get, no name", "box_get_skill", {})
        skill = {"name": "one", "display_name": "One", "description": "Does things", "instructions": "Do it.\n"}
        await ask("create", "box_create_skill", {"skill": skill})
        await ask("create again", "box_create_skill", {"skill": skill})
        await ask("create, no skill", "box_create_skill", {})
        for bad in ("", "a b", "../x", "x" * 65, "-", "ä-1"):
            await ask(f"create {bad}", "box_create_skill", {"skill": {"name": bad}})
        await ask("get", "box_get_skill", {"name": "one"})
        await ask("text", "box_read_skill_file", {"name": "one", "path": "SKILL.md"})
        await ask("update", "box_update_skill", {"name": "one", "skill": {"description": "Other things", "instructions": "No.\n"}})
        await ask("update, another name", "box_update_skill", {"name": "one", "skill": {"name": "two"}})
        await ask("update, elsewhere", "box_update_skill", {"name": "one", "skill": {"package_root": "/tmp"}})
        await ask("update none", "box_update_skill", {"name": "none", "skill": {}})
        await ask("text then", "box_read_skill_file", {"name": "one", "path": "./SKILL.md"})
        await ask("write", "box_write_skill_file", {"name": "one", "path": "deep/er/run.py", "content": "print('ä')\n"})
        await ask("write again", "box_write_skill_file", {"name": "one", "path": "deep/er/run.py", "content": "pass\n"})
        await ask("read", "box_read_skill_file", {"name": "one", "path": "deep/er/../er/run.py"})
        await ask("write hidden", "box_write_skill_file", {"name": "one", "path": ".hidden", "content": ""})
        await ask("write requirements", "box_write_skill_file", {"name": "one", "path": "requirements.txt", "content": "x"})
        await ask("too long", "box_write_skill_file", {"name": "one", "path": "long", "content": "x" * (1 << 20 | 1)})
        for path in ("../x", "/etc/passwd", "a/../../x", "..x/../.."):
            await ask(f"write {path}", "box_write_skill_file", {"name": "one", "path": path, "content": ""})
            await ask(f"read {path}", "box_read_skill_file", {"name": "one", "path": path})
        await ask("read none", "box_read_skill_file", {"name": "one", "path": "none"})
        await ask("read a directory", "box_read_skill_file", {"name": "one", "path": "deep"})
        await ask("read, no path", "box_read_skill_file", {"name": "one"})
        await ask("files", "box_list_skill_files", {"name": "one"})
        await ask("files, hidden", "box_list_skill_files", {"name": "one", "include_hidden": True, "path": "."})
        await ask("files, deep", "box_list_skill_files", {"name": "one", "path": "deep/er"})
        await ask("files, one", "box_list_skill_files", {"name": "one", "max_entries": 1})
        await ask("files, none", "box_list_skill_files", {"name": "one", "max_entries": 0})
        await ask("files, not there", "box_list_skill_files", {"name": "one", "path": "not/there"})
        await ask("files of none", "box_list_skill_files", {"name": "none"})
        place = caller.skills()
        (place / "group" / "inner").mkdir(parents=True)
        (place / "group" / "inner" / "SKILL.md").write_text(HEAD.format(name="inner-1"))
        (place / "broken").mkdir()
        (place / "broken" / "SKILL.md").write_text("---\nname: [\n---\n")
        (place / "lower").mkdir()
        (place / "lower" / "skill.md").write_text("Only instructions.\n")
        await ask("inner", "box_get_skill", {"name": "inner-1"})
        await ask("lower", "box_get_skill", {"name": "lower"})
        await ask("broken", "box_get_skill", {"name": "broken"})
        await ask("scan", "box_scan_skill_directory", {"path": str(place / "group")})
        await ask("scan many", "box_scan_skill_directory", {"path": str(place)})
        await ask("scan elsewhere", "box_scan_skill_directory", {"path": "/tmp"})
        await ask("scan nothing", "box_scan_skill_directory", {"path": str(place / "one" / "deep")})
        await ask("scan none", "box_scan_skill_directory", {"path": str(place / "none")})
        await ask("import", "box_create_skill", {"skill": {"name": "inner-2", "package_root": str(place / "group" / "inner")}})
        await ask("import elsewhere", "box_create_skill", {"skill": {"name": "x", "package_root": "/tmp"}})
        await ask("delete", "box_delete_skill", {"name": "one"})
        await ask("delete again", "box_delete_skill", {"name": "one"})
        await ask("delete inner", "box_delete_skill", {"name": "inner-2"})
        await ask("storage", "box_get_session", {"session_id": "none"})

    ours, _ = await same(own_server, theirs, tmp_path, context, conversation)
    assert sorted(path.name for path in ours.skills().iterdir()) == ["broken", "lower", "ä-1"]


async def test_archives_are_installed_as_langbots_own_server_does(own_server, theirs, tmp_path, context):
    head = HEAD.format(name="packed").encode()
    good = archive({"top/SKILL.md": head, "top/run.sh": b"#!/bin/sh\n"}, **{"top/run.sh": 0o755})
    two = archive({"top/a/SKILL.md": HEAD.format(name="a").encode(), "top/b/SKILL.md": HEAD.format(name="b").encode()})
    bad = {
        "empty": b"",
        "no archive": b"PK nonsense",
        "without skills": archive({"a/b": b"x"}),
        "leads out": archive({"../SKILL.md": head}),
        "absolute": archive({"/etc/SKILL.md": head}),
        "drive": archive({"c:/SKILL.md": head}),
        "link": archive({"SKILL.md": b"/etc/passwd"}, **{"SKILL.md": stat.S_IFLNK | 0o777}),
        "pipe": archive({"SKILL.md": head, "p": b""}, p=stat.S_IFIFO | 0o644),
        "bomb": archive({"SKILL.md": head, "zeros": bytes(8 << 20)}),
        "too many": archive({f"f{n}": b"" for n in range(513)}),
        "too large": archive({"SKILL.md": head, "large": bytes((16 << 20) + 1)}),
    }

    async def conversation(caller: Caller):
        ask, number = caller.ask, 0

        async def with_file(name, action, content, **members):
            nonlocal number
            number += 1
            members["filename"] = "My Pack!.zip"
            if caller.port == theirs:
                caller.answers.append((name, Uploads(caller).answer(action, content, **members)))
                return
            key = await caller.upload(content, number)
            await ask(name, action, {"file_key": key, **members})

        await with_file("preview", "box_preview_skill_zip", good)
        await with_file("preview two", "box_preview_skill_zip", two, target_suffix="")
        await with_file("install", "box_install_skill_zip", good)
        await ask("installed", "box_list_skills", {})
        await with_file("install again", "box_install_skill_zip", good)
        await with_file("install two", "box_install_skill_zip", two)
        await with_file("install one of two", "box_install_skill_zip", two, source_paths=["b"])
        await with_file("install none of two", "box_install_skill_zip", two, source_paths=["c"])
        await with_file("install by the old name", "box_install_skill_zip", two, source_path="/a/")
        await with_file("subdirectory", "box_preview_skill_zip", two, source_subdir="a")
        await with_file("subdirectory, none", "box_preview_skill_zip", two, source_subdir="c")
        await with_file("subdirectory, outside", "box_preview_skill_zip", two, source_subdir="../..")
        for name, content in bad.items():
            await with_file(name, "box_preview_skill_zip", content)
        # A path of a temporary directory is in theirs.
        for _, answer in caller.answers:
            answer["message"] = answer["message"].split(" in /tmp")[0].split(" in the archive")[0]
        await ask("no key", "box_install_skill_zip", {})

    ours, upstream = await same(own_server, theirs, tmp_path, context, conversation)
    for caller in (ours, upstream):
        [run] = caller.skills().glob("My-Pack-upload/run.sh")
        assert run.stat().st_mode & 0o777 == 0o755
        # Nothing is left of what was not good.
        assert len(list(caller.skills().iterdir())) == 3
    async with connected(websocket(own_server())) as client:
        await client.init({"local": {"host_root": str(tmp_path / "more")}})
        with pytest.raises(BoxValidationError, match="No SKILL.md found"):
            await client.preview_skill_zip(bad["without skills"], "x.zip", action_context=context)


async def test_the_client_of_that_time_uploads_and_runs_a_skill(client: ActionRPCBoxClient, context, tmp_path):
    await client.init({"local": {"host_root": str(tmp_path / "data")}})
    # More than one piece.
    entries = {"SKILL.md": HEAD.format(name="runs").encode(), "run.sh": b"echo ran\n", "noise": bytes(range(256)) * 200}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    [preview] = await client.preview_skill_zip(content.getvalue(), "runs.zip", action_context=context)
    assert (preview["name"], preview["description"]) == ("runs", "Does things")
    with pytest.raises(BoxValidationError):
        # Taken by the call that named it, and by no other.
        members = {"file_key": "ft1_" + "f" * 64, "filename": "x.zip"}
        await client._call(LangBotToBoxAction.PREVIEW_SKILL_ZIP, members, action_context=context)
    [skill] = await client.install_skill_zip(content.getvalue(), "runs.zip", action_context=context)
    assert [one["name"] for one in await client.list_skills(action_context=context)] == ["runs"]
    workspace = tmp_path / "workspace"
    mount = {"host_path": skill["package_root"], "mount_path": "/workspace/.skills/runs", "mode": "rw"}
    run = spec(cmd="sh .skills/runs/run.sh; echo new > .skills/runs/made", host_path=str(workspace), extra_mounts=[mount])
    assert (await client.execute(run, action_context=context)).stdout == "ran"
    told = await client.read_skill_file("runs", "made", action_context=context)
    assert told["content"] == "new\n"
    # What a box has put there leads nowhere.
    link = spec(cmd="ln -s /etc/hostname .skills/runs/link; ln -sf /etc/hostname .skills/runs/SKILL.md", host_path=str(workspace), extra_mounts=[mount])
    await client.execute(link, action_context=context)
    assert await client.list_skills(action_context=context) == []
    other = context.model_copy(update={"workspace_uuid": context.workspace_uuid + "-other"})
    assert await client.list_skills(action_context=other) == []


async def test_a_link_in_a_skill_leads_nowhere(client: ActionRPCBoxClient, context, tmp_path):
    await client.init({"local": {"host_root": str(tmp_path / "data")}})
    skill = await client.create_skill({"name": "one", "instructions": "x"}, action_context=context)
    root = pathlib.Path(skill["package_root"])
    (tmp_path / "secret").write_text("secret")
    (root / "out").symlink_to(tmp_path)
    (root / "file").symlink_to(tmp_path / "secret")
    (root / "in").symlink_to("SKILL.md")
    for path in ("out/secret", "file"):
        with pytest.raises(BoxValidationError, match="must stay within the skill package root"):
            await client.read_skill_file("one", path, action_context=context)
    with pytest.raises(BoxValidationError):
        await client.write_skill_file("one", "out/made", "x", action_context=context)
    assert not (tmp_path / "made").exists()
    assert "x" in (await client.read_skill_file("one", "in", action_context=context))["content"]
    # Written over, not through.
    await client.write_skill_file("one", "file", "mine", action_context=context)
    assert (tmp_path / "secret").read_text() == "secret"


async def test_where_grants_are_required_a_skill_is_mounted_by_its_name(own_server, context, tmp_path):
    soft = {"LANGBOT_BOX_ALLOW_UNSAFE_SOFT_STORAGE_LIMITS": "1"}
    async with connected(websocket(own_server(env=soft))) as client:
        await client.init({"admission": {"required": True}, "local": {"host_root": str(tmp_path / "root")}})
        soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60)
        await client.upsert_sandbox_admission_grant(
            SandboxAdmissionGrant(
                instance_uuid=INSTANCE,
                workspace_uuid=context.workspace_uuid,
                execution_generation=1,
                entitlement_revision=1,
                expires_at=soon,
                max_sessions=1,
                max_managed_processes=0,
            )
        )
        for name in ("one", "two"):
            await client.create_skill({"name": name, "instructions": f"I am {name}\n"}, action_context=context)
        look = "cat /workspace/.skills/*/SKILL.md | grep 'I am'; touch /workspace/.skills/one/x 2>/dev/null || echo kept"

        async def told(**members):
            asked = spec(session_id="global", cmd=look, **members)
            return (await client.execute(asked, action_context=context)).stdout

        assert await told(skill_name="one") == "I am one\nkept"
        # What was mounted stays.
        assert await told(skill_name="two") == "I am one\nI am two\nkept"
        assert await told() == "I am one\nI am two\nkept"
        with pytest.raises(BoxAdmissionError, match="Managed sandbox skill is unavailable in this Workspace"):
            await told(skill_name="three")
