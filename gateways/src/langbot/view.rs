//! LangBot's view of a box, and a few of its constants.

use box_protocol::{BoxInfo, ExecStatus, GatewayName, HostPathMode, Network, UnixMs};
use serde::{Serialize, Serializer};

/// The gateway's name, which its boxes carry.
pub(super) const GATEWAY: GatewayName = GatewayName::of("langbot");

/// The actions that need no tenant context.
pub(super) const WITHOUT_CONTEXT: &[&str] = &[
    "box_health",
    "box_get_backend_info",
    "box_init",
    "box_upsert_sandbox_admission_grant",
    "box_revoke_sandbox_admission_grant",
    "box_verify_shared_workspace",
    "box_shutdown",
];

/// Returns LangBot's standard error text for a timeout without output.
pub(super) fn timeout_notice(timeout_sec: u64) -> String {
    format!("Command timed out after {timeout_sec} seconds.")
}

/// Serializes a time as LangBot reads it.
#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
pub(super) fn as_text<S: Serializer>(time: &UnixMs, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(time)
}

/// A box in LangBot's format, with times as text.
#[derive(Debug, Serialize)]
pub(super) struct SessionView<'a> {
    session_id: &'a str,
    backend_name: &'a str,
    backend_session_id: &'a str,
    image: &'a str,
    network: Network,
    host_path: Option<&'a str>,
    host_path_mode: HostPathMode,
    mount_path: &'a str,
    persistent: bool,
    cpus: f64,
    memory_mb: u64,
    pids_limit: u64,
    read_only_rootfs: bool,
    workspace_quota_mb: u64,
    #[serde(serialize_with = "as_text")]
    created_at: UnixMs,
    #[serde(serialize_with = "as_text")]
    last_used_at: UnixMs,
    status: ExecStatus,
}

impl<'a> From<&'a BoxInfo> for SessionView<'a> {
    fn from(info: &'a BoxInfo) -> Self {
        Self {
            session_id: info.box_id.as_str(),
            backend_name: &info.backend_name,
            backend_session_id: &info.backend_id,
            image: info.image.as_deref().unwrap_or_default(),
            network: info.network,
            host_path: info.host_path.as_deref(),
            host_path_mode: info.host_path_mode,
            mount_path: &info.mount_path,
            persistent: info.persistent,
            cpus: info.cpus,
            memory_mb: info.memory_mb,
            pids_limit: info.pids_limit,
            read_only_rootfs: info.read_only_rootfs,
            workspace_quota_mb: info.workspace_quota_mb,
            created_at: info.created_at,
            last_used_at: info.last_used_at,
            status: info.status,
        }
    }
}

#[cfg(test)]
mod tests {
    use box_protocol::SpecDraft;

    use super::*;

    #[test]
    fn a_session_has_exactly_langbots_members() {
        let spec = SpecDraft::new("s1").build().unwrap();
        let mut info = BoxInfo::starting(&spec, "fake", "b1", UnixMs(1_794_784_697_977));
        info.status = ExecStatus::Running;
        let json = serde_json::to_value(SessionView::from(&info)).unwrap();
        let members: Vec<_> = json
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let mut expected = vec![
            "session_id",
            "backend_name",
            "backend_session_id",
            "image",
            "network",
            "host_path",
            "host_path_mode",
            "mount_path",
            "persistent",
            "cpus",
            "memory_mb",
            "pids_limit",
            "read_only_rootfs",
            "workspace_quota_mb",
            "created_at",
            "last_used_at",
            "status",
        ];
        expected.sort_unstable();
        assert_eq!(members, expected);
        assert_eq!(json["created_at"], "2026-11-15T23:18:17.977000Z");
        assert_eq!(json["status"], "running");
    }

    #[test]
    fn the_timeout_notice_matches_langbots() {
        assert_eq!(timeout_notice(30), "Command timed out after 30 seconds.");
    }
}
