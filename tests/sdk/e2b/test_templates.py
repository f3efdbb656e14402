"""Templates, built by E2B's own SDK on this machine's system directories and on images of a registry."""

import os

import httpx
import pytest
from conftest import TOKEN, has, needs
from e2b import Sandbox, Template
from e2b.exceptions import BuildException, SandboxException
from waiting import eventually


def test_a_template_is_built_from_steps(server, tmp_path, monkeypatch):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("print('from the template')\n")
    (tmp_path / "one.txt").write_text("one\n")
    name = f"built-{os.getpid()}"
    template = (
        Template(file_context_path=str(tmp_path))
        .from_base_image()
        .set_envs({"COLOUR": "blue"})
        .set_workdir("/home/user/work")
        .copy("app", "/home/user/work/app")
        .copy("one.txt", "named.txt")
        .run_cmd("echo $COLOUR > colour; pwd >> colour")
    )
    lines = []
    Template.build(template, name, on_build_logs=lambda entry: lines.append(entry.message))
    assert any("echo $COLOUR" in line for line in lines), lines
    exists = getattr(Template, "exists", None) or Template.alias_exists
    assert exists(name) and not exists(name + "-other")
    sandbox = Sandbox.create(name, timeout=120)
    try:
        ran = sandbox.commands.run("pwd; cat colour named.txt; python3 app/main.py; echo $COLOUR")
        assert ran.stdout == "/home/user/work\nblue\n/home/user/work\none\nfrom the template\nblue\n"
    finally:
        sandbox.kill()


def test_values_of_steps_have_variables(server):
    name = f"variables-{os.getpid()}"
    template = (
        Template()
        .from_base_image()
        .set_envs({"APP": "/home/user/app"})
        .set_envs({"DATA": "${APP}/data", "PATH": "/home/user/bin:$PATH", "KIND": "${KIND:-none}", "PRICE": "\\$5"})
        .set_workdir("$APP")
        .run_cmd("mkdir $DATA; pwd > $DATA/here; tr '\\0' '\\n' < /proc/$$/environ | grep ^PATH= > path")
    )
    lines = []
    Template.build(template, name, on_build_logs=lambda entry: lines.append(entry.message))
    assert not any("environ" in line for line in lines if "grep" not in line), lines
    sandbox = Sandbox.create(name, timeout=120)
    try:
        ran = sandbox.commands.run("pwd; cat /home/user/app/data/here; echo $DATA $KIND $PRICE; cat path")
        *others, path = ran.stdout.splitlines()
        assert others == ["/home/user/app", "/home/user/app", "/home/user/app/data none $5"]
        assert path.startswith("PATH=/home/user/bin:/") and path.endswith(":/bin"), path
    finally:
        sandbox.kill()


def test_files_are_copied_as_by_a_dockerfile(server, tmp_path):
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for path in ["folder/one.txt", "folder/inner/two.txt", "a b.txt", "run.sh"]:
        (tmp_path / path).write_text(f"{path}\n")
        # The user of the client does not exist in the box.
        os.chown(tmp_path / path, 4321, 4321)
    (folder / "link").symlink_to("nowhere")
    template = (
        Template(file_context_path=str(tmp_path))
        .from_base_image()
        .run_cmd("mkdir merged real; echo kept > merged/kept; ln -s nowhere merged/one.txt; ln -s ../real merged/inner")
        .copy("a b.txt", "spaces/")
        .copy("run.sh", "bin/", mode=0o755)
        .copy("folder", "private", mode=0o600)
        .copy("folder/*", "merged")
        .copy("*.sh", "scripts")
    )
    name = f"copied-{os.getpid()}"
    Template.build(template, name)
    sandbox = Sandbox.create(name, timeout=120)
    try:
        ran = sandbox.commands.run(
            "cat 'spaces/a b.txt' merged/kept merged/one.txt real/two.txt scripts/run.sh;"
            "readlink merged/link; stat -c %a bin bin/run.sh private/inner private/inner/two.txt; ls /tmp"
        )
        assert ran.stdout.split("\n") == [
            *["a b.txt", "kept", "folder/one.txt", "folder/inner/two.txt", "run.sh"],
            *["nowhere", "755", "755", "700", "600", ""],
        ]
    finally:
        sandbox.kill()


def test_a_template_inherits_from_its_template(server):
    base, name = f"base-{os.getpid()}", f"heir-{os.getpid()}"
    template = Template().from_base_image().set_envs({"COLOUR": "blue"}).set_workdir("~/app")
    Template.build(template.set_start_cmd("touch /tmp/up; sleep 1000", "test -e /tmp/up"), base)
    template = Template().from_template(base).run_cmd("echo $COLOUR > colour")
    Template.build(template.set_envs({"SHAPE": "round"}), name)
    sandbox = Sandbox.create(name, timeout=120)
    try:
        ran = sandbox.commands.run("pwd; cat colour; echo $COLOUR $SHAPE; ls /tmp/up")
        assert ran.stdout == "/home/user/app\nblue\nblue round\n/tmp/up\n"
        # The box of the build is no sandbox of the client.
        assert not [item for item in Sandbox.list().next_items() if not item.template_id]
    finally:
        sandbox.kill()


@needs("Template.assign_tags")
def test_a_tag_is_the_build_that_named_it(server):
    name = f"tagged-{os.getpid()}"
    for tag, memory in [("v1", 512), ("v2", 640)]:
        template = Template().from_base_image().run_cmd(f"echo {tag} > version; df -m --output=size /tmp > size")
        Template.build(template, f"{name}:{tag}", cpu_count=1, memory_mb=memory)
    for suffix, version, memory in [(":v1", "v1", 512), (":v2", "v2", 640), ("", "v2", 640)]:
        assert Template.exists(name + suffix)
        sandbox = Sandbox.create(name + suffix, timeout=120)
        assert sandbox.files.read("version") == f"{version}\n"
        assert sandbox.get_info().memory_mb == memory
        # The private files of the box of the build had three quarters of its memory.
        assert int(sandbox.files.read("size").split()[1]) == memory * 3 // 4
        sandbox.kill()
    # The files of templates are no snapshots, and templates keep them.
    assert not [name for item in Sandbox.list_snapshots().next_items() for name in item.names if "template-" in name]


def test_a_template_keeps_its_snapshot(server):
    sandbox = Sandbox.create(timeout=120)
    headers = {"X-API-Key": TOKEN}
    name = f"kept-{os.getpid()}"
    Template.build(Template().from_base_image().run_cmd("echo 1 > kept"), name)
    api = httpx.Client(base_url=f"{server.url}/e2b/api", headers=headers)
    (template,) = [item for item in api.get("/v2/templates").json() if name in item["names"]]
    snapshot = f"template-{template['buildID']}"
    refused = api.delete(f"/templates/{snapshot}")
    assert refused.status_code == 409 and name in refused.json()["message"], refused.text
    Sandbox.create(name, timeout=120).kill()
    eventually(lambda: api.delete(f"/templates/{name}").status_code == 204)
    eventually(lambda: api.delete(f"/templates/{snapshot}").status_code == 404)
    sandbox.kill()


def test_a_failed_step_is_named(server):
    name = f"broken-{os.getpid()}"
    template = Template().from_base_image().run_cmd("echo fine").run_cmd("echo why >&2; exit 4")
    lines = []
    with pytest.raises(BuildException, match="step 2: the command failed with exit code 4"):
        Template.build(template, name, on_build_logs=lambda entry: lines.append(entry.message))
    assert "fine" in lines and "why" in lines, lines
    with pytest.raises(SandboxException, match="not built"):
        Sandbox.create(name)


def test_a_template_is_built_from_an_image(server, image):
    name = f"on-image-{os.getpid()}"
    # The box of the build is root of the image, whichever user a step names.
    template = (
        Template()
        .from_image(image)
        .run_cmd("cat /etc/of-the-image > /usr/bin/installed && id -un", user="root")
        .set_workdir("/home/user/work")
        .run_cmd("echo made > by-the-build")
    )
    Template.build(template, name)
    sandbox = Sandbox.create(name, timeout=120)
    try:
        ran = sandbox.commands.run("pwd; echo ~; cat /usr/bin/installed; echo more >> by-the-build; cat by-the-build")
        assert ran.stdout == "/home/user/work\n/home/user\nof the image\nmade\nmore\n"
        sandbox.files.write("a.txt", "a")
        assert sandbox.files.read("/home/user/a.txt") == "a"
        if has("Sandbox.create_snapshot"):
            # A snapshot of the sandbox begins on the same image.
            snapshot = sandbox.create_snapshot()
            copy = Sandbox.create(snapshot.snapshot_id, timeout=120)
            ran = copy.commands.run("cat /home/user/work/by-the-build; echo 2 > /home/user/a.txt; cat /etc/of-the-image")
            assert ran.stdout == "made\nmore\nof the image\n"
            copy.kill()
    finally:
        sandbox.kill()


def test_a_template_is_built_from_a_dockerfile(server, image, tmp_path):
    (tmp_path / "app.txt").write_text("app\n")
    (tmp_path / "Dockerfile").write_text(
        f"FROM {image}\nENV COLOUR=blue\nWORKDIR /app\nCOPY app.txt /app/\n"
        "RUN cat app.txt > copy && echo $COLOUR >> copy\n"
        "RUN echo 'echo login >> /dev/shm/logins' > /home/user/.profile\n"
        'CMD ["sleep", "1000"]\n'
    )
    name = f"dockerfile-{os.getpid()}"
    template = Template(file_context_path=str(tmp_path)).from_dockerfile(str(tmp_path / "Dockerfile"))
    Template.build(template, name)
    sandbox = Sandbox.create(name, timeout=120)
    try:
        # The SDK gives the start command the ready command `sleep 20`, in a login shell of its own. Only the build waits.
        eventually(lambda: sandbox.files.exists("/dev/shm/logins"))
        assert sandbox.files.read("/dev/shm/logins") == "login\n"
        assert sandbox.commands.run("cat /app/copy; echo $COLOUR").stdout == "app\nblue\nblue\n"
    finally:
        sandbox.kill()


def test_a_build_ends_with_its_server(own_server):
    server = own_server()
    api = httpx.Client(base_url=f"{server.url}/e2b/api", headers={"X-API-Key": TOKEN})
    made = api.post("/v3/templates", json={"name": "cut-off"}).json()
    build = f"/v2/templates/{made['templateID']}/builds/{made['buildID']}"
    steps = [{"type": "RUN", "args": ["sleep 1000"]}]
    assert api.post(build, json={"fromImage": "e2bdev/base", "steps": steps}).status_code == 202
    state = lambda: [item["buildStatus"] for item in api.get("/templates").json()]
    assert state() == ["building"]
    server.kill()
    server.start()
    assert state() == ["error"]
    assert api.get(f"/templates/{made['templateID']}").json()["buildStatus"] == "error"
    status = api.get(f"/templates/{made['templateID']}/builds/{made['buildID']}/status").json()
    assert status["status"] == "error" and "server" in status["reason"]["message"]


def test_an_image_that_does_not_exist_fails_the_build(server, image):
    with pytest.raises(BuildException, match="missing"):
        Template.build(Template().from_image(image.replace("small", "missing")), f"none-{os.getpid()}")


def test_a_sandbox_waits_until_its_template_is_ready(server):
    name = f"ready-{os.getpid()}"
    template = Template().from_base_image().set_start_cmd("sleep 1; echo up > /tmp/up; sleep 1000", "test -e /tmp/up")
    Template.build(template, name)
    sandbox = Sandbox.create(name, timeout=120)
    try:
        assert sandbox.files.read("/tmp/up") == "up\n"
        assert "sleep 1000" in sandbox.commands.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
        listed = [item.sandbox_id for item in Sandbox.list().next_items()]
        assert sandbox.sandbox_id in listed
    finally:
        sandbox.kill()


def test_the_ready_command_of_a_build_has_its_variables_and_directory(server):
    name = f"ready-in-{os.getpid()}"
    ready = 'test "$COLOUR" = blue && test "$(cat up)" = "$PWD"'
    template = Template().from_base_image().set_envs({"COLOUR": "blue"}).set_workdir("/home/user/app")
    # The ready command itself makes `checked`, so the test knows its directory.
    template = template.set_start_cmd("pwd > up; sleep 1000", f"{ready} && touch checked")
    lines = []
    Template.build(template, name, on_build_logs=lambda entry: lines.append(entry.message))
    sandbox = Sandbox.create(name, timeout=120)
    try:
        assert sandbox.commands.run("cat up; ls; echo $COLOUR").stdout == "/home/user/app\nchecked\nup\nblue\n"
    finally:
        sandbox.kill()


def test_the_box_of_a_build_ends_soon_after_its_logs_are_read(server):
    api = httpx.Client(base_url=f"{server.url}/e2b/api", headers={"X-API-Key": TOKEN})
    builds = []
    for name, step in [("logs", "seq 150"), ("failed-logs", "echo why; exit 4")]:
        name, lines = f"{name}-{os.getpid()}", []
        template = Template().from_base_image().run_cmd(step)
        try:
            Template.build(template, name, on_build_logs=lambda entry: lines.append(entry.message))
        except BuildException:
            assert "why" in lines, lines
        made = api.get(f"/templates/{name}").json()
        builds.append((f"/templates/{made['templateID']}/builds/{made['buildID']}/status", made["buildID"]))
    (status, build), _ = builds
    end = lambda: api.get(f"/sandboxes/{build}").json()["endAt"]
    # A client that has read a full page asks for the next one.
    before = end()
    assert len(api.get(status, params={"logsOffset": 100}).json()["logs"]) == 51
    assert end() == before
    assert len(api.get(status).json()["logs"]) == 100
    assert end() > before
    for (status, build), state in zip(builds, ["ready", "error"]):
        eventually(lambda: api.get(f"/sandboxes/{build}").status_code == 404)
        ended = api.get(status).json()
        assert (ended["status"], ended["logs"]) == (state, [])


def test_a_failed_build_keeps_the_template(server):
    name = f"again-{os.getpid()}"
    Template.build(Template().from_base_image().run_cmd("echo first > version"), name)
    with pytest.raises(BuildException):
        Template.build(Template().from_base_image().run_cmd("false"), name)
    sandbox = Sandbox.create(name, timeout=120)
    assert sandbox.files.read("version") == "first\n"
    sandbox.kill()
    Template.build(Template().from_base_image().run_cmd("echo second > version"), name)
    sandbox = Sandbox.create(name, timeout=120)
    assert sandbox.files.read("version") == "second\n"
    sandbox.kill()
    # Builds run in boxes of their own, which are no sandboxes of the client.
    assert not [item for item in Sandbox.list().next_items() if not item.template_id]


def test_the_templates_of_the_cloud_exist(server):
    for name in ["base", "code-interpreter-v1"]:
        sandbox = Sandbox.create(name, timeout=60)
        assert sandbox.get_info().template_id == name
        sandbox.kill()
