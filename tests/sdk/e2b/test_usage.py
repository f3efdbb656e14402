"""Logs and metrics of sandboxes, through the client that E2B generates from its API, which is in the package of its SDK."""

import importlib.util

import pytest
from conftest import OTHER, has
from e2b import ConnectionConfig, Sandbox
from e2b.api.client.api.sandboxes import get_sandboxes_metrics, get_sandboxes_sandbox_id_logs
from e2b.api.client.models import LogLevel, SandboxMetric
from e2b.api.client_sync import get_api_client


@pytest.fixture
def api(server):
    return get_api_client(ConnectionConfig())


def paused_and_resumed(sandbox) -> None:
    sandbox.pause() if has("Sandbox.pause") else sandbox.beta_pause()
    Sandbox.connect(sandbox.sandbox_id)


def test_the_log_has_the_events_of_the_sandbox_in_order(sandbox, api):
    before = get_sandboxes_sandbox_id_logs.sync(sandbox.sandbox_id, client=api)
    paused_and_resumed(sandbox)
    found = get_sandboxes_sandbox_id_logs.sync(sandbox.sandbox_id, client=api)
    lines = [line.line for line in found.logs]
    # The old events are the same, and the pause comes before the resume.
    assert lines[: len(before.logs)] == [line.line for line in before.logs]
    assert lines[0].startswith("started") and len(before.logs) < len(lines)
    new = [line.split(":")[0] for line in lines[len(before.logs) :]]
    assert new.index("paused") < new.index("resumed"), new
    times = [line.timestamp for line in found.logs]
    assert times == sorted(times)
    assert [entry.message for entry in found.log_entries] == lines
    assert {entry.level for entry in found.log_entries} == {LogLevel.INFO}
    one = get_sandboxes_sandbox_id_logs.sync(sandbox.sandbox_id, client=api, limit=1)
    assert [line.line for line in one.logs] == lines[:1]
    none = get_sandboxes_sandbox_id_logs.sync(sandbox.sandbox_id, client=api, start=9_999_999_999_999)
    assert none.logs == []
    assert get_sandboxes_sandbox_id_logs.sync_detailed("0" * 32, client=api).status_code == 404
    other = get_api_client(ConnectionConfig(api_key=OTHER))
    assert get_sandboxes_sandbox_id_logs.sync_detailed(sandbox.sandbox_id, client=other).status_code == 404


if importlib.util.find_spec("e2b.api.client.api.sandboxes.get_v_2_sandboxes_sandbox_id_logs"):
    from e2b.api.client.api.sandboxes import get_v_2_sandboxes_sandbox_id_logs
    from e2b.api.client.models import LogsDirection

    def test_the_log_is_read_in_pages_in_both_directions(sandbox, api):
        paused_and_resumed(sandbox)

        def entries(**options) -> list:
            return get_v_2_sandboxes_sandbox_id_logs.sync(sandbox.sandbox_id, client=api, **options).logs

        whole = entries()
        assert len(whole) >= 3 and whole[0].message.startswith("started")
        backward = entries(direction=LogsDirection.BACKWARD)
        assert [entry.message for entry in backward] == [entry.message for entry in reversed(whole)]
        assert [entry.message for entry in entries(limit=2)] == [entry.message for entry in whole[:2]]
        last = entries(direction=LogsDirection.BACKWARD, limit=1)
        assert [entry.message for entry in last] == [whole[-1].message]
        # The cursor is a time in milliseconds, of the next page's first event.
        at = round(whole[-1].timestamp.timestamp() * 1000)
        later = entries(cursor=at, direction=LogsDirection.FORWARD)
        assert later and all(entry.timestamp >= whole[-1].timestamp for entry in later)
        earlier = entries(cursor=at - 1, direction=LogsDirection.BACKWARD)
        assert earlier and all(entry.timestamp < whole[-1].timestamp for entry in earlier)
        assert entries(level=LogLevel.ERROR) == [] and entries(level=LogLevel.DEBUG) == whole
        assert [entry.message for entry in entries(search="resumed")] == [
            entry.message for entry in whole if "resumed" in entry.message
        ]


def test_metrics_of_several_sandboxes(sandbox, api):
    second = Sandbox.create(timeout=120)
    try:
        ids = [sandbox.sandbox_id, second.sandbox_id]
        found = get_sandboxes_metrics.sync(client=api, sandbox_ids=[*ids, "0" * 32]).sandboxes
        assert set(found) == set(ids)
        for sample in map(SandboxMetric.from_dict, found.values()):
            assert sample.cpu_count >= 1 and 0 < sample.mem_used <= sample.mem_total
            assert sample.cpu_used_pct >= 0 and 0 <= sample.disk_used <= sample.disk_total
        other = get_api_client(ConnectionConfig(api_key=OTHER))
        assert get_sandboxes_metrics.sync(client=other, sandbox_ids=ids).sandboxes == {}
        many = get_sandboxes_metrics.sync_detailed(client=api, sandbox_ids=["0" * 32] * 101)
        assert many.status_code == 400
    finally:
        second.kill()
