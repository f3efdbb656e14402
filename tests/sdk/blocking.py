"""Asynchronous clients, called as synchronous ones, so that one test covers both."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """Returns the loop of all asynchronous clients, in a thread of its own."""
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, daemon=True).start()
    return made


class Blocking:
    """An object whose coroutines run in the loop of the other thread; the objects that it gives with coroutines do, too."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return blocking(getattr(self._inner, name))

    def __call__(self, *arguments, **options):
        arguments = [inner_of(argument) for argument in arguments]
        options = {name: inner_of(option) for name, option in options.items()}

        async def called():
            # Some constructors need a running loop.
            result = self._inner(*arguments, **options)
            result = await result if inspect.isawaitable(result) else result
            return [piece async for piece in result] if hasattr(result, "__aiter__") else result

        return blocking(asyncio.run_coroutine_threadsafe(called(), loop()).result(300))


def inner_of(value):
    return value._inner if isinstance(value, Blocking) else value


def blocking(value):
    """Returns a value as it is, or wrapped if its methods are coroutines."""
    methods = (getattr(type(value), name, None) for name in dir(type(value)))
    is_asynchronous = any(map(inspect.iscoroutinefunction, methods))
    return Blocking(value) if callable(value) or is_asynchronous else value
