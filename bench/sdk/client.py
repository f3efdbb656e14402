"""An SDK, timed: `client.py WORLD URL` reads lines `ACTION COUNT`, and prints the milliseconds of each call.

The file of a protocol has `actions(url)`: a map from names to functions. Each call of a function is timed. It returns
nothing, or a function that cleans up, or the milliseconds if it measures them itself.
"""

import asyncio
import inspect
import pathlib
import runpy
import sys
import time

# The files here have names of packages.
sys.path.pop(0)


async def finished(value):
    return await value if inspect.isawaitable(value) else value


async def timed(action) -> float:
    begun = time.perf_counter()
    returned = await finished(action())
    milliseconds = (time.perf_counter() - begun) * 1000
    if callable(returned):
        await finished(returned())
    return returned if isinstance(returned, float) else milliseconds


async def times(action, count: int) -> list[float]:
    return [await timed(action) for _ in range(count)]


def main(protocol: str, url: str) -> None:
    actions = runpy.run_path(str(pathlib.Path(__file__).with_name(f"{protocol}.py")))["actions"](url)
    loop = asyncio.new_event_loop()
    for line in sys.stdin:
        name, count = line.split()
        print(*loop.run_until_complete(times(actions[name], int(count))), flush=True)


main(sys.argv[1], sys.argv[2])
