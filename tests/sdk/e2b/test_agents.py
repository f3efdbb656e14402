"""The sandboxes of OpenAI's agents, through their E2B client."""

import io
import pathlib

import pytest
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions, E2BSandboxType
from agents.sandbox import Manifest


@pytest.mark.parametrize("kind", list(E2BSandboxType))
@pytest.mark.asyncio(loop_scope="session")
async def test_a_session(server, kind):
    client = E2BSandboxClient()
    options = E2BSandboxClientOptions(kind, timeout=300, envs={"COLOUR": "blue"}, exposed_ports=(8000,))
    session = await client.create(manifest=Manifest(), options=options)
    await session.start()
    ran = await session.exec("pwd; echo $COLOUR; echo why >&2; exit 3", shell=True)
    assert (ran.stdout, ran.stderr, ran.exit_code) == (b"/workspace\nblue\n", b"why\n", 3)
    note = pathlib.Path("notes/a.txt")
    await session.mkdir(note.parent, parents=True)
    await session.write(note, io.BytesIO(b"hello"))
    assert (await session.read(note)).read() == b"hello"
    assert await session.running()
    port = await session.resolve_exposed_port(8000)
    assert port.host.startswith("8000-") and port.host.endswith(".box.localhost") and port.port == server.port
    # A session outlives its process by an archive of its workspace, or by its sandbox.
    archive = (await session.persist_workspace()).read()
    await session.exec("rm", "-r", "notes")
    await session.hydrate_workspace(io.BytesIO(archive))
    await session.stop()
    resumed = await client.resume(session.state)
    await resumed.start()
    assert resumed.state.sandbox_id == session.state.sandbox_id
    assert (await resumed.exec("cat", str(note))).stdout == b"hello"
    await resumed.aclose()


@pytest.mark.asyncio(loop_scope="session")
async def test_a_terminal(server):
    client = E2BSandboxClient()
    session = await client.create(manifest=Manifest(), options=E2BSandboxClientOptions("e2b", timeout=300))
    await session.start()
    begun = await session.pty_exec_start("sh", "-c", "read word; echo got-$word", tty=True)
    text = begun.output
    for _ in range(100):
        if b"got-hi" in text:
            break
        more = await session.pty_write_stdin(session_id=begun.process_id, chars="" if b"hi" in text else "hi\n")
        text += more.output
    assert b"got-hi" in text
    await session.aclose()
