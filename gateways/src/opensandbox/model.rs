//! The JSON of sandboxes: requests and responses.

use std::collections::BTreeMap;

use box_protocol::{BoxInfo, BoxState, HOST_IMAGE, Note, UnixMs};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

/// A request for a sandbox. Unknown members are ignored, because new clients add some.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CreateRequest {
    pub(super) image: Option<Image>,
    pub(super) snapshot_id: Option<String>,
    pub(super) template_id: Option<String>,
    /// Seconds; the sandbox stays until it is deleted if absent.
    pub(super) timeout: Option<u64>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) resource_limits: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) resource_requests: BTreeMap<String, String>,
    pub(super) entrypoint: Option<Vec<String>>,
    pub(super) env: Option<BTreeMap<String, Option<String>>>,
    pub(super) metadata: Option<BTreeMap<String, String>>,
    pub(super) platform: Option<Platform>,
    pub(super) network_policy: Option<Policy>,
    pub(super) credential_proxy: Option<CredentialProxy>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) volumes: Vec<Volume>,
    pub(super) extensions: Option<BTreeMap<String, String>>,
    pub(super) lifecycle: Option<Hooks>,
}

/// Reads `null` as the default, as the reference does.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    let value: Option<T> = Option::deserialize(deserializer)?;
    Ok(value.unwrap_or_default())
}

#[derive(Debug, Deserialize)]
pub(super) struct Image {
    pub(super) uri: String,
    pub(super) auth: Option<Value>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Platform {
    pub(super) os: Option<String>,
    pub(super) arch: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct CredentialProxy {
    #[serde(default, deserialize_with = "or_default")]
    pub(super) enabled: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Volume {
    pub(super) name: String,
    pub(super) mount_path: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) read_only: bool,
    pub(super) sub_path: Option<String>,
    pub(super) host: Option<HostVolume>,
    pub(super) pvc: Option<Claim>,
    pub(super) ossfs: Option<Value>,
}

#[derive(Debug, Deserialize)]
pub(super) struct HostVolume {
    pub(super) path: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Claim {
    #[serde(rename = "claimName")]
    pub(super) volume: String,
    #[serde(default = "yes")]
    pub(super) create_if_not_exists: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) delete_on_sandbox_termination: bool,
    pub(super) storage: Option<String>,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Hooks {
    pub(super) pre_start: Option<Hook>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) periodic: Vec<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Hook {
    pub(super) command: Vec<String>,
    pub(super) timeout_seconds: Option<u64>,
}

/// A network policy.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Policy {
    pub(super) default_action: Option<Action>,
    #[serde(default)]
    pub(super) egress: Option<Vec<Rule>>,
}

/// What a policy does with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Action {
    Allow,
    Deny,
}

/// A rule of a policy.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Rule {
    pub(super) action: Action,
    pub(super) target: String,
}

/// The command of sandboxes that name none: it waits.
pub(super) const WAITING: [&str; 3] = ["tail", "-f", "/dev/null"];

/// What the record of a box does not hold of a request.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct SandboxNote {
    pub(super) entrypoint: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) extensions: BTreeMap<String, String>,
}

/// Returns the state of a sandbox.
pub(super) fn state(info: &BoxInfo) -> &'static str {
    match info.state {
        BoxState::Starting => "Pending",
        BoxState::Running => "Running",
        // A stopped box keeps its files, and a resume starts it.
        BoxState::Paused | BoxState::Stopped => "Paused",
        BoxState::Failed => "Failed",
        BoxState::Unreachable => "Unknown",
    }
}

/// Returns a sandbox as the protocol describes it.
pub(super) fn sandbox(info: &BoxInfo) -> Value {
    let kept = info.note.as_ref().and_then(Note::read::<SandboxNote>);
    let kept = kept.unwrap_or_default();
    let entrypoint = if kept.entrypoint.is_empty() {
        WAITING.map(str::to_owned).to_vec()
    } else {
        kept.entrypoint
    };
    let mut status = json!({
        "state": state(info),
        "lastTransitionAt": info.since.to_string(),
    });
    if let Some(reason) = &info.reason {
        status["reason"] = "FAILED".into();
        status["message"] = reason.as_str().into();
    } else if info.state == BoxState::Stopped {
        status["reason"] = "STOPPED".into();
    }
    let mut sandbox = json!({
        "id": info.box_id,
        "status": status,
        "createdAt": info.created_at.to_string(),
        "entrypoint": entrypoint,
        "metadata": info.labels,
        "platform": {"os": "linux", "arch": arch()},
    });
    match &info.snapshot {
        Some(snapshot) => sandbox["snapshotId"] = snapshot.to_string().into(),
        None => sandbox["image"] = json!({"uri": info.image.as_deref().unwrap_or(HOST_IMAGE)}),
    }
    let expires = info
        .lifetime
        .as_ref()
        .and_then(|lifetime| lifetime.expires_at);
    if let Some(expires) = expires {
        sandbox["expiresAt"] = expires.to_string().into();
    }
    if !kept.extensions.is_empty() {
        sandbox["extensions"] = json!(kept.extensions);
    }
    sandbox
}

/// Returns the architecture of this machine.
pub(super) fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Parses an RFC 3339 time with any offset.
pub(super) fn time(text: &str) -> Option<UnixMs> {
    if let Some(time) = UnixMs::from_text(text) {
        return Some(time);
    }
    let (local, offset) = text.split_at_checked(text.len().checked_sub(6)?)?;
    let (sign, offset) = offset.split_at_checked(1)?;
    let (hours, minutes) = offset.split_once(':')?;
    let (hours, minutes): (u64, u64) = (hours.parse().ok()?, minutes.parse().ok()?);
    if hours > 23 || minutes > 59 {
        return None;
    }
    let local = UnixMs::from_text(&format!("{local}Z"))?.0;
    let offset = (hours * 60 + minutes) * 60_000;
    match sign {
        "+" => local.checked_sub(offset).map(UnixMs),
        "-" => local.checked_add(offset).map(UnixMs),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_means_the_default() {
        let body = json!({
            "image": {"uri": "host"},
            "resourceLimits": null,
            "resourceRequests": null,
            "volumes": null,
            "metadata": null,
            "credentialProxy": {"enabled": null},
        });
        let request: CreateRequest = serde_json::from_value(body).unwrap();
        assert!(request.resource_limits.is_empty() && request.volumes.is_empty());
    }

    #[test]
    fn times_may_have_any_offset() {
        let utc = time("2026-11-15T23:41:52.280352+00:00").unwrap();
        for text in [
            "2026-11-15T23:41:52.280Z",
            "2026-11-16T07:41:52.280+08:00",
            "2026-11-15T18:11:52.28-05:30",
        ] {
            assert_eq!(time(text), Some(utc), "{text}");
        }
        for text in [
            "",
            "now",
            "2026-11-15T23:41:52",
            "2026-11-15T23:41:52+99:00",
            "+00:00",
        ] {
            assert_eq!(time(text), None, "{text}");
        }
    }
}
