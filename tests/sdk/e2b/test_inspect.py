"""The conformance checks of `inspect_ai` for sandboxes, through the E2B provider of `inspect-sandboxes`."""

import asyncio
import re

import pytest
import pytest_asyncio
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

CHECKS = [name.removeprefix("test_") for name in self_check.__all__]

ONE_USER = "a box has one user; the machine has no `adduser`"
REFUSED = "`inspect-sandboxes` does not raise `PermissionError` for the server's 403"
FORBIDDEN = "Expected exception PermissionError, but got SandboxException.*403: .*permission denied"

# The checks that fail: the reason, as in `docs/e2b.md`, and the error that shows it.
FAILING = {
    # A machine that has `adduser` fails at the next step.
    "exec_as_user": (ONE_USER, "Failed to add user|not a user of this box"),
    "exec_as_nonexistent_user": (ONE_USER, "not a user of this box"),
    "read_file_not_allowed": (REFUSED, FORBIDDEN),
    "write_text_file_without_permissions": (REFUSED, FORBIDDEN),
    "write_binary_file_without_permissions": (REFUSED, FORBIDDEN),
    "exec_permission_error": (
        "`inspect-sandboxes` does not raise `PermissionError` for the shell's exit code 126",
        "Expected exception PermissionError but no exception was raised",
    ),
    "exec_timeout_not_raised_on_fast_signal_death": (
        "the exit code of a signal is -1, as on E2B's cloud",
        "Expected exit 143 from self-SIGTERM, got -1",
    ),
    "exec_large_command": (
        "the SDK sends a command as one word, and Linux limits words to 128 KiB",
        "arguments and environment too long",
    ),
}

# The checks mostly wait: for time limits, and between the attempts of `inspect-sandboxes`.
AT_ONCE = 8


async def error_of(provider, check, turns: asyncio.Semaphore) -> Exception | None:
    """Runs a check in a sandbox of its own, and returns its error."""
    async with turns:
        sandboxes = await provider.sample_init("checks", None, {})
        try:
            await check(sandboxes["default"])
        except Exception as error:
            return error
        finally:
            await provider.sample_cleanup("checks", None, sandboxes, False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def errors(server):
    """The error of each check that fails, and `None` for the others."""
    provider = registry_find_sandboxenv("e2b")
    await provider.task_init("checks", None)
    turns = asyncio.Semaphore(AT_ONCE)
    runs = [error_of(provider, getattr(self_check, f"test_{name}"), turns) for name in CHECKS]
    errors = await asyncio.gather(*runs)
    await provider.task_cleanup("checks", None, True)
    return dict(zip(CHECKS, errors, strict=True))


@pytest.mark.parametrize("name", CHECKS)
def test_a_check(errors, name):
    error = errors[name]
    if name not in FAILING:
        if error is not None:
            raise error
        return
    reason, shown = FAILING[name]
    assert error is not None, f"the check passes; remove it from the failing ones: {reason}"
    # The second is the provider's error, if the check expected another.
    if not re.search(shown, f"{error} {error.__context__}"):
        pytest.fail(f"the check does not fail because {reason}, but: {error!r}")


def test_failing_checks_exist():
    assert set(FAILING) <= set(CHECKS) and len(CHECKS) == 44
