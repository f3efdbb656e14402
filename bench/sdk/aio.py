"""AIO Sandbox: `run` runs `true`; `shells` runs a loop in 16 shells at once, `plain` the same loops outside a box, and
`alone` one of them, of which it returns the CPU time; `idle` creates a box, runs `true` in it, and leaves it."""

import asyncio
import resource
import subprocess
import uuid

import httpx
from agent_sandbox import AsyncSandbox, Sandbox

SHELLS = 16
SECONDS = 0.5


def loop(turns: int) -> str:
    return f"i=0; while [ $i -lt {turns} ]; do i=$((i+1)); done"


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_seconds(text: str) -> float:
    before = children_seconds()
    subprocess.run(["bash", "-c", text], check=True)
    return children_seconds() - before


def actions(url: str) -> dict:
    sandbox = Sandbox(base_url=url, timeout=300)
    together = AsyncSandbox(base_url=url, timeout=300)
    work = []

    def run():
        assert sandbox.shell.exec_command(command="true").data.exit_code == 0

    def start():
        """Chooses a loop of about half a second."""
        turns = 100_000
        work.append(loop(int(turns * SECONDS / cpu_seconds(loop(turns)))))

    def alone() -> float:
        return cpu_seconds(work[0]) * 1000

    async def plain():
        loops = [await asyncio.create_subprocess_exec("bash", "-c", work[0]) for _ in range(SHELLS)]
        assert not any([await process.wait() for process in loops])

    async def shells():
        ran = (together.shell.exec_command(command=work[0]) for _ in range(SHELLS))
        for answer in await asyncio.gather(*ran):
            assert answer.data.exit_code == 0, answer

    def idle():
        body = {"sandbox_id": uuid.uuid4().hex[:16]}
        created = httpx.post(f"{url}/api/sandboxes", json=body, timeout=60).raise_for_status()
        box = Sandbox(base_url=created.json()["sandbox_url"], timeout=60)
        assert box.shell.exec_command(command="true").data.exit_code == 0

    return {"run": run, "start": start, "alone": alone, "plain": plain, "shells": shells, "idle": idle}
