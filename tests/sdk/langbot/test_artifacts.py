"""Content that LangBot mounts by its digest, such as skills: a box gets exactly that content, or none."""

import json
import pathlib

import pytest
from conftest import spec
from langbot_plugin.artifact import build_tree_manifest, materialize_tree
from langbot_plugin.box import errors

pytestmark = pytest.mark.asyncio


class Tree:
    """A published tree and its manifest, created by LangBot's own code."""

    def __init__(self, root: pathlib.Path):
        self.root = root / "package"
        (self.root / "deep").mkdir(parents=True)
        (self.root / "SKILL.md").write_text("how to ä\n")
        (self.root / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (self.root / "deep" / "run.sh").chmod(0o755)
        self.manifest = root / "manifest.json"
        self.digest, manifest = build_tree_manifest(str(self.root), max_files=2048, max_total_bytes=1 << 28)
        # The JSON of the file differs from the JSON that is digested.
        self.manifest.write_text(json.dumps(manifest, indent=2))
        self.mount_path = f"/opt/langbot-artifacts/{self.digest[7:]}"

    def mount(self, **members) -> dict:
        return {
            "host_path": str(self.root),
            "mount_path": self.mount_path,
            "mode": "ro",
            "content_digest": self.digest,
            "manifest_path": str(self.manifest),
            **members,
        }

    def refusal(self, cache: pathlib.Path) -> str:
        """Returns the refusal of LangBot's own backend."""
        cache.mkdir()
        with pytest.raises(ValueError) as refused:
            materialize_tree(str(self.root), str(self.manifest), self.digest, str(cache))
        return f"BoxError: Immutable artifact preparation failed: {refused.value}"


async def test_a_box_gets_the_content_of_the_digest(client, context, tmp_path):
    tree = Tree(tmp_path)
    await client.execute(spec(cmd="touch /tmp/same-box"), action_context=context)
    script = f"cat {tree.mount_path}/SKILL.md; {tree.mount_path}/deep/run.sh; ls /tmp/same-box; touch {tree.mount_path}/x 2>/dev/null || echo kept"
    # Add the mount to an existing box.
    mounted = spec(cmd=script, extra_mounts=[tree.mount()])
    result = await client.execute(mounted, action_context=context)
    assert result.stdout == "how to ä\nran\n/tmp/same-box\nkept"
    # Later changes of the source are not visible in the box, even if the mount is requested again.
    (tree.root / "SKILL.md").write_text("harm\n")
    for again in (mounted, spec(cmd=script)):
        assert (await client.execute(again, action_context=context)).stdout == result.stdout


async def test_content_with_a_wrong_digest_is_refused(client, context, tmp_path):
    tree = Tree(tmp_path)
    await client.execute(spec(cmd="echo 1 > /tmp/same-box"), action_context=context)
    (tree.root / "SKILL.md").write_text("harm")
    text = tree.refusal(tmp_path / "cache")
    for session in ("s1", "fresh"):
        with pytest.raises(errors.BoxError) as refused:
            await client.execute(spec(session_id=session, extra_mounts=[tree.mount()]), action_context=context)
        assert (type(refused.value), str(refused.value)) == (errors.BoxError, text)
    # An existing box is preserved.
    assert (await client.execute(spec(cmd="cat /tmp/same-box"), action_context=context)).stdout == "1"
    assert [session["session_id"] for session in await client.get_sessions(action_context=context)] == ["s1"]


@pytest.mark.parametrize("manifest", ["{", "[]", '{"algorithm": "sha256-tree-v1", "files": [], "total_bytes": 0}'])
async def test_another_manifest_is_refused(client, context, tmp_path, manifest):
    tree = Tree(tmp_path)
    tree.manifest.write_text(manifest)
    with pytest.raises(errors.BoxError) as refused:
        await client.execute(spec(extra_mounts=[tree.mount()]), action_context=context)
    assert str(refused.value) == tree.refusal(tmp_path / "cache")


async def test_manifests_in_blocked_directories_are_not_read(client, context, tmp_path):
    tree = Tree(tmp_path)
    with pytest.raises(errors.BoxValidationError, match="manifest_path /etc/passwd is blocked for security"):
        await client.execute(spec(extra_mounts=[tree.mount(manifest_path="/etc/passwd")]), action_context=context)
