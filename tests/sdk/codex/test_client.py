"""The published Codex runs the commands of its model in a box, over both transports."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import uuid

import pytest
from conftest import COMMAND
from model import Model, message, run, tool
from program import BOXD, environment

PATCH = """*** Begin Patch
*** Update File: note.txt
@@
-old
+new
*** Add File: added.txt
+by a patch
*** End Patch"""


@pytest.fixture
def codex(tmp_path, workspace):
    """Runs `codex exec` with a model of these steps; returns what the tools said to it."""
    home = tmp_path / "home"
    home.mkdir()

    def execute(steps: list, *options: str, environments: str | None = None, **variables: str) -> list[str]:
        if environments is not None:
            (home / "environments.toml").write_text(environments)
        model = Model(steps)
        with model.serving() as url:
            (home / "config.toml").write_text(
                'model = "gpt-5"\nmodel_provider = "test"\n[model_providers.test]\nname = "test"\n'
                f'base_url = "{url}"\nwire_api = "responses"\nenv_key = "TEST_KEY"\n'
            )
            ran = subprocess.run(
                [COMMAND, "exec", "--skip-git-repo-check", *options, "begin"],
                cwd=workspace, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
                env=environment(CODEX_HOME=str(home), TEST_KEY="x", **variables),
            )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert not model.steps, (model.said, ran.stdout, ran.stderr)
        return model.said

    return execute


DOCUMENT = (pathlib.Path(__file__).parents[3] / "docs" / "codex.md").read_text()


def documented(language: str) -> str:
    """Returns the only block of a language in the documentation."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    return block


def program(*options: str) -> str:
    """Returns the file that makes Codex start our exec-server."""
    arguments = ", ".join(f'"{option}"' for option in ("codex-exec", *options))
    return f'default = "box"\ninclude_local = false\n[[environments]]\nid = "box"\nprogram = "{BOXD}"\nargs = [{arguments}]\n'


def test_commands_run_in_a_box_with_the_workspace(codex, workspace):
    mark = uuid.uuid4().hex
    (workspace / "given.txt").write_text("given\n")
    private = pathlib.Path(f"/tmp/{mark}")
    steps = [
        run(f"hostname; pwd; cat given.txt; echo {mark} | tee made.txt {private}; echo err >&2"),
        run(f"cat {private}; exit 7"),
        message("end"),
    ]
    environments = documented("toml").replace('"boxd"', f'"{BOXD}"')
    first, second = codex(steps, "--sandbox", "workspace-write", environments=environments)
    assert socket.gethostname() not in first.split("\n")
    for line in ("box", str(workspace), "given", mark, "err"):
        assert line in first.split("\n"), first
    assert mark in second and "exited with code 7" in second, second
    assert (workspace / "made.txt").read_text() == f"{mark}\n"
    assert not private.exists(), "the file is in the box only"


def test_without_a_workspace_the_directory_is_empty_and_private(codex, workspace):
    (workspace / "given.txt").write_text("given\n")
    (said,) = codex([run("pwd; ls -A; touch made.txt; ls"), message("end")], environments=program())
    assert str(workspace) in said and "made.txt" in said and "given.txt" not in said
    assert not (workspace / "made.txt").exists()


def test_a_patch_changes_files_of_the_box(codex, workspace):
    (workspace / "note.txt").write_text("old\n")
    script = f"apply_patch <<'EOF'\n{PATCH}\nEOF\n"
    options = ["--sandbox", "workspace-write"]
    said = codex([run(script), run("cat note.txt added.txt"), message("end")], *options, environments=program("--workspace", "."))
    assert "new\nby a patch" in said[1], said
    assert (workspace / "note.txt").read_text() == "new\n"


def test_a_session_with_a_terminal(codex, workspace):
    def write(said: str, text: str) -> dict:
        (session,) = re.findall(r"session ID (\d+)", said)
        return tool("write_stdin", session_id=int(session), chars=text, yield_time_ms=5000)

    steps = [
        run("read a; echo got $a; read b; echo and $b; test -t 0 && echo terminal", tty=True, yield_time_ms=1000),
        lambda said: write(said, "one\n"),
        lambda said: write(said, "two\n"),
        message("end"),
    ]
    said = codex(steps, environments=program())
    assert "got one" in said[1], said
    assert "and two" in said[2] and "terminal" in said[2], said


def test_over_a_websocket_with_a_box_that_stays(codex, workspace, own_server):
    server = own_server(env={"BOXD_POLICY_ALLOWED_HOST_MOUNT_ROOTS": f'["{workspace}"]'})

    def shell(script: str) -> str:
        variables = environment(PATH=f"{os.path.dirname(BOXD)}:{os.environ['PATH']}")
        ran = subprocess.run(["bash", "-c", script], cwd=workspace, capture_output=True, text=True, timeout=120, env=variables)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    serve, create, use = documented("sh").replace("127.0.0.1:7080", f"127.0.0.1:{server.port}").splitlines()
    assert serve.startswith("boxd serve --http ")
    shell(create)
    url = re.fullmatch(r"CODEX_EXEC_SERVER_URL=(\S+) codex", use)[1]
    (said,) = codex([run("hostname; pwd; echo made > made.txt; echo kept > /tmp/kept"), message("end")], CODEX_EXEC_SERVER_URL=url)
    assert "work" in said.split("\n") and str(workspace) in said, said
    assert (workspace / "made.txt").read_text() == "made\n"
    assert shell(f"boxd --endpoint ws://127.0.0.1:{server.port}/rpc/ws exec work 'cat /tmp/kept'") == "kept\n"


def test_with_a_box_of_a_server(codex, workspace, server):
    name = f"codex-{uuid.uuid4().hex[:8]}"
    endpoint = f"unix:{server.state}/boxd.sock"
    options = ["--endpoint", endpoint, "--box", name, "--workspace", "."]
    (said,) = codex([run("hostname; echo made > made.txt"), message("end")], environments=program(*options))
    assert name in said, said
    assert (workspace / "made.txt").read_text() == "made\n"
