"""E2B: `create` ends after the first command of a new sandbox, `hundred` after those of a hundred at once."""

import asyncio
import os


def actions(url: str) -> dict:
    os.environ.update(
        E2B_API_KEY="e2b_" + "0" * 40,
        E2B_API_URL=f"{url}/e2b/api",
        E2B_SANDBOX_URL=f"{url}/e2b/envd",
    )
    from e2b import AsyncSandbox, Sandbox

    def create():
        sandbox = Sandbox.create()
        assert sandbox.commands.run("true").exit_code == 0
        return sandbox.kill

    async def one():
        sandbox = await AsyncSandbox.create()
        assert (await sandbox.commands.run("true")).exit_code == 0
        return sandbox

    async def hundred():
        sandboxes = await asyncio.gather(*(one() for _ in range(100)))

        async def end():
            await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes))

        return end

    return {"create": create, "hundred": hundred}
