"""Grants, where LangBot's configuration requires them."""

import datetime

import pytest
from conftest import INSTANCE, connected, spec, websocket
from langbot_plugin.box import errors
from langbot_plugin.box.models import BoxManagedProcessSpec, SandboxAdmissionGrant, SandboxAdmissionRevocation
from langbot_plugin.box.tenancy import box_namespace

pytestmark = pytest.mark.asyncio


def grant(context, **members) -> SandboxAdmissionGrant:
    now = datetime.datetime.now(datetime.timezone.utc)
    return SandboxAdmissionGrant(
        **{
            "instance_uuid": INSTANCE,
            "workspace_uuid": context.workspace_uuid,
            "execution_generation": context.placement_generation,
            "entitlement_revision": 1,
            "expires_at": now + datetime.timedelta(seconds=60),
            "max_sessions": 1,
            "max_managed_processes": 0,
            **members,
        }
    )


def revocation(context, revision) -> SandboxAdmissionRevocation:
    return SandboxAdmissionRevocation(
        instance_uuid=INSTANCE, workspace_uuid=context.workspace_uuid, entitlement_revision=revision
    )


async def test_without_a_policy_grants_are_refused(client, context):
    for call in (
        client.upsert_sandbox_admission_grant(grant(context)),
        client.revoke_sandbox_admission_grant(revocation(context, 1)),
    ):
        with pytest.raises(errors.BoxAdmissionError) as refused:
            await call
        assert str(refused.value) == "BoxAdmissionError: Sandbox admission enforcement is not enabled"


async def test_a_workspace_needs_a_valid_grant(own_server, context, tmp_path):
    server = own_server(env={"LANGBOT_BOX_ALLOW_UNSAFE_SOFT_STORAGE_LIMITS": "1"})
    async with connected(websocket(server)) as client:
        await client.init({"admission": {"required": True}, "local": {"host_root": str(tmp_path / "root")}})
        info = await client.get_backend_info()
        assert (info["name"], info["available"], info["readiness"]["mode"]) == ("nsjail", True, "grant_enforced")
        assert len(info["readiness"]["checks"]) == 14
        globally = spec(session_id="global", cmd="echo granted > /workspace/f; cat /workspace/f", memory_mb=4096)
        with pytest.raises(errors.BoxAdmissionError, match="Sandbox admission grant is missing"):
            await client.execute(globally, action_context=context)
        request = grant(context)
        granted = await client.upsert_sandbox_admission_grant(request)
        assert granted["installed"] is True
        assert granted["expires_at"] == request.expires_at.isoformat()
        result = await client.execute(globally, action_context=context)
        assert result.stdout == "granted"
        workspace = tmp_path / "root" / "default" / "tenants" / box_namespace(context)
        assert (workspace / "f").read_text() == "granted\n"
        # A workspace has one box, regardless of its name.
        other = await client.execute(spec(session_id="other", cmd="cat /workspace/f"), action_context=context)
        assert (other.session_id, other.stdout) == ("global", "granted")
        with pytest.raises(errors.BoxAdmissionError, match="session_id is runtime-owned"):
            await client.get_session("other", action_context=context)
        [session] = await client.get_sessions(action_context=context)
        assert (session["memory_mb"], session["persistent"]) == (512, True)
        status = await client.get_status(action_context=context)
        assert status["capacity"]["limit"] == 1
        for refused, text in [
            (spec(session_id="global", network="on"), "network access is disabled"),
            (spec(session_id="global", mount_path="/x", workdir="/x"), "mount_path is runtime-owned"),
            (spec(session_id="global", workdir="/tmp"), "workdir must stay under /workspace"),
            (spec(session_id="global", host_path=str(tmp_path)), "host_path is runtime-owned"),
        ]:
            with pytest.raises(errors.BoxAdmissionError, match=text):
                await client.execute(refused, action_context=context)
        with pytest.raises(errors.BoxAdmissionError, match="does not permit managed processes"):
            await client.start_managed_process("global", BoxManagedProcessSpec(command="true"), action_context=context)
        revoked = await client.revoke_sandbox_admission_grant(revocation(context, 1))
        assert revoked == {"revoked": True, "workspace_uuid": context.workspace_uuid, "entitlement_revision": 1}
        with pytest.raises(errors.BoxAdmissionError, match="grant is missing"):
            await client.execute(globally, action_context=context)
        with pytest.raises(errors.BoxAdmissionError, match="revision was revoked"):
            await client.upsert_sandbox_admission_grant(grant(context))
        await client.upsert_sandbox_admission_grant(grant(context, entitlement_revision=2))
        assert await client.get_sessions(action_context=context) == []
        # Grants cannot be disabled.
        await client.init({"admission": {"required": False}})
        with pytest.raises(errors.BoxReadinessError):
            await client.execute(globally, action_context=context)


async def test_without_hard_quotas_no_caller_is_admitted(own_server, context, tmp_path):
    async with connected(websocket(own_server())) as client:
        await client.init({"admission": {"required": True}, "local": {"host_root": str(tmp_path / "root")}})
        with pytest.raises(errors.BoxReadinessError, match="managed sandbox isolation is not ready"):
            await client._call(_health(), {})
        with pytest.raises(errors.BoxReadinessError, match="failed checks: .*hard_workspace_quota"):
            await client.get_sessions(action_context=context)


def _health():
    from langbot_plugin.box.actions import LangBotToBoxAction

    return LangBotToBoxAction.HEALTH
