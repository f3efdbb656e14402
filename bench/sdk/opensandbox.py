"""OpenSandbox: `create` ends after the first ping, `run` runs `echo` in one sandbox."""

from opensandbox import Sandbox
from opensandbox.config import ConnectionConfig


def actions(url: str) -> dict:
    config = ConnectionConfig(domain=url.removeprefix("http://"), protocol="http", api_key="bench")
    kept = []

    async def create():
        sandbox = await Sandbox.create("host", connection_config=config)

        async def end():
            await sandbox.kill()
            await sandbox.close()

        return end

    async def start():
        kept.append(await Sandbox.create("host", connection_config=config))

    async def run():
        ran = await kept[0].commands.run("echo hello")
        assert ran.exit_code == 0 and ran.logs.stdout[0].text == "hello", ran

    return {"create": create, "start": start, "run": run}
