"""Waiting for a condition, with a limit that suits a busy machine."""

from __future__ import annotations

import asyncio
import time

PAUSE = 0.05


def eventually(condition, what: str = "the condition", limit: float = 120):
    """Waits until the condition gives a true value, and returns it; fails the test after the limit."""
    end = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {limit} s"
        time.sleep(PAUSE)
    return value


async def eventually_async(condition, what: str = "the condition", limit: float = 120):
    """Waits as `eventually` does, for a condition that is a coroutine function."""
    end = time.monotonic() + limit
    while not (value := await condition()):
        assert time.monotonic() < end, f"{what}: not within {limit} s"
        await asyncio.sleep(PAUSE)
    return value
