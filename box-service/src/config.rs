//! Configuration of the policy layer.

use std::collections::BTreeMap;
use std::path::PathBuf;

use box_protocol::{BoxError, BoxProfile, GatewayName, Invalid};
use box_rpc::Caller;
use serde::{Deserialize, Deserializer};

use crate::paths;
use crate::policy::Policy;
use crate::quota::DEFAULT_MAX_WORKSPACE_ENTRIES;
use crate::session_id::DEFAULT_SESSION_ID_TEMPLATE;
use crate::truncate::DEFAULT_OUTPUT_LIMIT_CHARS;

/// Configuration of a [`BoxService`](crate::BoxService).
/// It ignores unknown members, because its section also configures other components.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct ServiceConfig {
    /// Whether the service offers boxes at all.
    pub enabled: bool,
    /// Name of the active profile, built in or one of `profiles`.
    pub profile: String,
    /// Additional profiles. One with the name of a built-in profile replaces it.
    pub profiles: Vec<BoxProfile>,
    /// Profiles of single gateways, by name, instead of `profile`.
    pub gateways: BTreeMap<String, String>,
    /// Directory that contains everything shared with boxes.
    /// By default, its subdirectory `default` is the default workspace, and it is the only allowed root.
    #[serde(deserialize_with = "path")]
    pub shared_host_root: Option<PathBuf>,
    /// Directories below which host paths may be mounted.
    /// A list, or a text with commas. If empty, no host path may be mounted.
    #[serde(deserialize_with = "path_list")]
    pub allowed_host_mount_roots: Vec<PathBuf>,
    /// Workspace of a box that names none; the service creates it on `initialize`.
    #[serde(deserialize_with = "path")]
    pub default_host_workspace: Option<PathBuf>,
    /// Mounts of single callers, by token name, instead of the two fields above.
    pub tokens: BTreeMap<String, CallerMounts>,
    /// Whether the user of this process may mount every directory it can read.
    /// Blocked directories stay excluded. That user is the caller without a token.
    #[serde(skip)]
    pub owner_mounts: bool,
    /// Private paths of the server: its state directory, token file and key.
    /// No caller can mount a directory that contains one of them.
    #[serde(skip)]
    pub private: Vec<PathBuf>,
    /// Overrides the `workspace_quota_mb` of the profile.
    /// To keep callers from changing it, lock it in a profile.
    pub workspace_quota_mb: Option<u64>,
    /// Maximum number of entries of a workspace with a quota.
    pub max_workspace_entries: u64,
    /// Maximum output of a stream in characters; 0 for no limit.
    pub output_limit_chars: usize,
    /// Template for the name of a box, used if the caller names none.
    pub session_id_template: String,
    /// Whether host paths mean the same here and at the runtime.
    /// If not, the service compares them as text, and neither resolves nor counts them.
    pub shared_filesystem: bool,
    /// Whether the log contains commands, which may contain secrets.
    pub log_commands: bool,
}

/// Mounts of one caller.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CallerMounts {
    /// As [`ServiceConfig::allowed_host_mount_roots`].
    #[serde(deserialize_with = "path_list")]
    pub allowed_host_mount_roots: Vec<PathBuf>,
    /// As [`ServiceConfig::default_host_workspace`].
    #[serde(deserialize_with = "path")]
    pub default_host_workspace: Option<PathBuf>,
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            profile: "default".to_owned(),
            profiles: Vec::new(),
            gateways: BTreeMap::new(),
            shared_host_root: None,
            allowed_host_mount_roots: Vec::new(),
            default_host_workspace: None,
            tokens: BTreeMap::new(),
            owner_mounts: false,
            private: Vec::new(),
            workspace_quota_mb: None,
            max_workspace_entries: DEFAULT_MAX_WORKSPACE_ENTRIES,
            output_limit_chars: DEFAULT_OUTPUT_LIMIT_CHARS,
            session_id_template: DEFAULT_SESSION_ID_TEMPLATE.to_owned(),
            shared_filesystem: true,
            log_commands: false,
        }
    }
}

impl ServiceConfig {
    /// Builds the policy. Resolves the configured directories.
    pub(crate) fn policy(&self) -> Result<Policy, BoxError> {
        let profile = self.profile_named("profile", &self.profile)?;
        let real =
            |field, path: &PathBuf| paths::resolve_configured(field, path, self.shared_filesystem);
        let shared_host_root = self
            .shared_host_root
            .as_ref()
            .map(|path| real("shared_host_root", path))
            .transpose()?;
        let mut roots = Vec::new();
        for root in &self.allowed_host_mount_roots {
            roots.push(real("allowed_host_mount_roots", root)?);
        }
        if roots.is_empty() {
            roots.extend(shared_host_root.clone());
        }
        let derived = shared_host_root.as_ref().map(|root| root.join("default"));
        let default_host_workspace = self
            .default_host_workspace
            .clone()
            .or(derived)
            .map(|path| real("default_host_workspace", &path))
            .transpose()?;
        let private = self.private.iter().map(|path| real("private", path));
        let private = private.collect::<Result<_, _>>()?;
        Ok(Policy {
            profile,
            shared_host_root,
            allowed_host_mount_roots: roots,
            default_host_workspace,
            shared_filesystem: self.shared_filesystem,
            table: None,
            owner_mounts: false,
            private,
        })
    }

    /// Builds the policies of callers that have a separate one, by name.
    pub(crate) fn policies(&self, all: &Policy) -> Result<BTreeMap<String, Policy>, BoxError> {
        let real =
            |field, path: &PathBuf| paths::resolve_configured(field, path, self.shared_filesystem);
        let mut policies = BTreeMap::new();
        for (name, mounts) in &self.tokens {
            let mut roots = Vec::new();
            for root in &mounts.allowed_host_mount_roots {
                roots.push(real("tokens.allowed_host_mount_roots", root)?);
            }
            let workspace = mounts.default_host_workspace.as_ref();
            let workspace = workspace.map(|path| real("tokens.default_host_workspace", path));
            let policy = Policy {
                allowed_host_mount_roots: roots,
                default_host_workspace: workspace.transpose()?,
                table: Some(format!("policy.tokens.{name}")),
                ..all.clone()
            };
            policies.insert(name.clone(), policy);
        }
        if self.owner_mounts && self.shared_filesystem {
            let owner = policies.entry(Caller::Local.name().to_string());
            owner.or_insert_with(|| all.clone()).owner_mounts = true;
        }
        Ok(policies)
    }

    /// Returns the profiles of gateways that have a separate one, by name.
    pub(crate) fn gateway_profiles(&self) -> Result<BTreeMap<String, BoxProfile>, BoxError> {
        let each = self.gateways.iter();
        each.map(|(gateway, name)| {
            GatewayName::try_from(gateway.clone())
                .map_err(|invalid| Invalid::new("gateways", invalid.rule().to_owned()))?;
            let profile = self.profile_named(&format!("gateways.{gateway}"), name)?;
            Ok((gateway.clone(), profile))
        })
        .collect()
    }

    /// Returns the profile that a configuration field names.
    fn profile_named(&self, field: &str, name: &str) -> Result<BoxProfile, BoxError> {
        let mut named = self
            .profiles
            .iter()
            .filter(|profile| profile.name.as_str() == name);
        let custom = named.next().cloned();
        if named.next().is_some() {
            return Err(BoxError::validation(format!(
                "profiles: {name:?} is defined twice; remove one"
            )));
        }
        let found = custom.or_else(|| BoxProfile::built_in(name));
        let mut profile = found.ok_or_else(|| {
            let custom = self.profiles.iter().map(|profile| profile.name.as_str());
            let known: Vec<&str> = BoxProfile::BUILT_IN.into_iter().chain(custom).collect();
            BoxError::validation(format!(
                "{field}: unknown profile {name:?}; use one of {}",
                known.join(", ")
            ))
        })?;
        if let Some(quota) = self.workspace_quota_mb {
            profile.workspace_quota_mb = quota;
        }
        Ok(profile)
    }
}

/// Deserializes a path; an empty text means not set.
fn path<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    Ok(text.as_deref().and_then(non_empty))
}

fn path_list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PathBuf>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum PathList {
        List(Vec<String>),
        Commas(String),
    }
    Ok(match Option::<PathList>::deserialize(deserializer)? {
        None => Vec::new(),
        Some(PathList::List(list)) => list.iter().filter_map(|text| non_empty(text)).collect(),
        Some(PathList::Commas(text)) => text.split(',').filter_map(non_empty).collect(),
    })
}

fn non_empty(text: &str) -> Option<PathBuf> {
    let text = text.trim();
    (!text.is_empty()).then(|| PathBuf::from(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use box_protocol::{Code, Network};
    use serde_json::{Value, json};

    fn read(value: Value) -> ServiceConfig {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn an_empty_table_is_the_default() {
        assert_eq!(read(json!({})), ServiceConfig::default());
        let empty = json!({"shared_host_root": "", "default_host_workspace": "",
            "allowed_host_mount_roots": [], "runtime": {"endpoint": "x"}});
        assert_eq!(read(empty), ServiceConfig::default());
    }

    #[test]
    fn roots_are_a_list_or_a_text_with_commas() {
        let list = read(json!({"allowed_host_mount_roots": ["/a", " ", "/b"]}));
        let commas = read(json!({"allowed_host_mount_roots": "/a, /b,"}));
        assert_eq!(
            list.allowed_host_mount_roots,
            ["/a", "/b"].map(PathBuf::from)
        );
        assert_eq!(list, commas);
    }

    #[test]
    fn custom_profiles_join_and_replace_the_built_in_ones() {
        let custom = json!({"profile": "mine", "profiles": [
            {"name": "mine", "network": "on", "locked": ["network"], "max_timeout_sec": 600},
            {"name": "default", "network": "on"}]});
        let mut config = read(custom);
        let profile = config.policy().unwrap().profile;
        assert_eq!(
            (profile.network, profile.max_timeout_sec),
            (Network::On, 600)
        );
        config.profile = "default".into();
        assert_eq!(config.policy().unwrap().profile.network, Network::On);
        config.profile = "offline_readonly".into();
        assert_eq!(config.policy().unwrap().profile.network, Network::Off);
    }

    #[test]
    fn an_unknown_or_ambiguous_profile_is_refused() {
        let profiles = json!([{"name": "mine"}, {"name": "mine"}]);
        for (name, text) in [
            ("nonexistent", "unknown profile \"nonexistent\""),
            ("mine", "defined twice"),
        ] {
            let config = read(json!({"profile": name, "profiles": profiles}));
            let error = config.policy().unwrap_err();
            assert_eq!(error.code(), Code::Validation);
            assert!(error.message().contains(text), "{error}");
        }
    }

    #[test]
    fn a_gateway_has_its_own_profile() {
        let config = json!({"profiles": [{"name": "mine", "max_timeout_sec": 600}],
            "gateways": {"langbot": "mine", "e2b": "network_extended"}, "workspace_quota_mb": 9});
        let profiles = read(config).gateway_profiles().unwrap();
        let mine = &profiles["langbot"];
        assert_eq!((mine.max_timeout_sec, mine.workspace_quota_mb), (600, 9));
        assert_eq!(profiles["e2b"].network, Network::On);
        for (gateways, text) in [
            (
                json!({"e2b": "none"}),
                "gateways.e2b: unknown profile \"none\"",
            ),
            (
                json!({"No Gateway": "default"}),
                "gateways: must be 1 to 32",
            ),
        ] {
            let error = read(json!({ "gateways": gateways })).gateway_profiles();
            let error = error.unwrap_err();
            assert!(error.message().contains(text), "{error}");
        }
    }

    #[test]
    fn a_profile_that_breaks_a_rule_is_refused_on_read() {
        let broken = json!({"profiles": [{"name": "mine", "memory_mb": 1}]});
        let error = serde_json::from_value::<ServiceConfig>(broken).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("memory_mb: 1 is below the minimum of 32"),
            "{error}"
        );
    }
}
