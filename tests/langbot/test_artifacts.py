"""Content that LangBot mounts by its digest, as it does with skills: boxes have what the digest stands for, or nothing."""

import json
import pathlib

import pytest
from conftest import spec
from langbot_plugin.artifact import build_tree_manifest, materialize_tree
from langbot_plugin.box import errors

pytestmark = pytest.mark.asyncio


class Tree:
    """A published tree and its manifest, made by LangBot's own code."""

    def __init__(self, root: pathlib.Path):
        self.root = root / "package"
        (self.root / "deep").mkdir(parents=True)
        (self.root / "SKILL.md").write_text("how to ä\n")
        (self.root / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (self.root / "deep" / "run.sh").chmod(0o755)
        self.manifest = root / "manifest.json"
        self.digest, manifest = build_tree_manifest(str(self.root), max_files=2048, max_total_bytes=1 << 28)
        # Written in another way than it is digested.
        self.manifest.write_text(json.dumps(manifest, indent=2))
        self.place = f"/opt/langbot-artifacts/{self.digest[7:]}"

    def mount(self, **members) -> dict:
        return {
            "host_path": str(self.root),
            "mount_path": self.place,
            "mode": "ro",
            "content_digest": self.digest,
            "manifest_path": str(self.manifest),
            **members,
        }

    def refusal(self, cache: pathlib.Path) -> str:
        """What LangBot's own backend says about it."""
        cache.mkdir()
        with pytest.raises(ValueError) as refused:
            materialize_tree(str(self.root), str(self.manifest), self.digest, str(cache))
        return f"BoxError: Immutable artifact preparation failed: {refused.value}"


async def test_a_box_has_what_the_digest_stands_for(client, context, tmp_path):
    tree = Tree(tmp_path)
    await client.execute(spec(cmd="touch /tmp/same-box"), action_context=context)
    look = f"cat {tree.place}/SKILL.md; {tree.place}/deep/run.sh; ls /tmp/same-box; touch {tree.place}/x 2>/dev/null || echo kept"
    # Added to a box that is there.
    mounted = spec(cmd=look, extra_mounts=[tree.mount()])
    result = await client.execute(mounted, action_context=context)
    assert result.stdout == "how to ä\nran\n/tmp/same-box\nkept"
    # What becomes of the source is not seen, whether it is asked for again or not.
    (tree.root / "SKILL.md").write_text("harm\n")
    for again in (mounted, spec(cmd=look)):
        assert (await client.execute(again, action_context=context)).stdout == result.stdout


async def test_content_that_is_not_what_its_digest_says_is_refused(client, context, tmp_path):
    tree = Tree(tmp_path)
    await client.execute(spec(cmd="echo 1 > /tmp/same-box"), action_context=context)
    (tree.root / "SKILL.md").write_text("harm")
    text = tree.refusal(tmp_path / "cache")
    for session in ("s1", "fresh"):
        with pytest.raises(errors.BoxError) as refused:
            await client.execute(spec(session_id=session, extra_mounts=[tree.mount()]), action_context=context)
        assert (type(refused.value), str(refused.value)) == (errors.BoxError, text)
    # A box that was there is preserved.
    assert (await client.execute(spec(cmd="cat /tmp/same-box"), action_context=context)).stdout == "1"
    assert [session["session_id"] for session in await client.get_sessions(action_context=context)] == ["s1"]


@pytest.mark.parametrize("manifest", ["{", "[]", '{"algorithm": "sha256-tree-v1", "files": [], "total_bytes": 0}'])
async def test_another_manifest_is_refused(client, context, tmp_path, manifest):
    tree = Tree(tmp_path)
    tree.manifest.write_text(manifest)
    with pytest.raises(errors.BoxError) as refused:
        await client.execute(spec(extra_mounts=[tree.mount()]), action_context=context)
    assert str(refused.value) == tree.refusal(tmp_path / "cache")


async def test_manifests_of_blocked_places_are_not_read(client, context, tmp_path):
    tree = Tree(tmp_path)
    with pytest.raises(errors.BoxValidationError, match="manifest_path /etc/passwd is blocked for security"):
        await client.execute(spec(extra_mounts=[tree.mount(manifest_path="/etc/passwd")]), action_context=context)
