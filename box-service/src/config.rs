//! What an operator says about the policy layer.

use std::collections::BTreeMap;
use std::path::PathBuf;

use box_protocol::{BoxError, BoxProfile};
use box_rpc::Caller;
use serde::{Deserialize, Deserializer};

use crate::paths;
use crate::policy::Policy;
use crate::quota::DEFAULT_MAX_WORKSPACE_ENTRIES;
use crate::session_id::DEFAULT_SESSION_ID_TEMPLATE;
use crate::truncate::DEFAULT_OUTPUT_LIMIT_CHARS;

/// The configuration of a [`BoxService`](crate::BoxService). Members it does not know are passed over:
/// the section it is read from also configures others.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct ServiceConfig {
    /// Whether boxes are offered at all.
    pub enabled: bool,
    /// The profile in use, built in or one of `profiles`.
    pub profile: String,
    /// Profiles beside the built-in ones. One with a built-in's name takes its place.
    pub profiles: Vec<BoxProfile>,
    /// One directory for everything that is shared with boxes. Unless said otherwise, its
    /// subdirectory `default` is the default workspace, and it is the only allowed root.
    #[serde(deserialize_with = "path")]
    pub shared_host_root: Option<PathBuf>,
    /// The directories below which host paths may be mounted: a list, or a text with commas. None
    /// means that none may.
    #[serde(deserialize_with = "path_list")]
    pub allowed_host_mount_roots: Vec<PathBuf>,
    /// The workspace of a box that names none; created on initialise.
    #[serde(deserialize_with = "path")]
    pub default_host_workspace: Option<PathBuf>,
    /// What single callers may mount, by the names of their tokens, in place of the two above.
    pub tokens: BTreeMap<String, CallerMounts>,
    /// Whether the user this process runs as may mount every directory that this user can read, apart from the
    /// blocked ones. That user is the caller without a token.
    #[serde(skip)]
    pub owner_mounts: bool,
    /// Paths of the server's own: its state directory, its token file, its key. A directory that holds one of them is
    /// mounted for no caller.
    #[serde(skip)]
    pub private: Vec<PathBuf>,
    /// Takes the place of the profile's `workspace_quota_mb`. To take it out of the caller's hands,
    /// lock it in a profile.
    pub workspace_quota_mb: Option<u64>,
    /// The most entries a workspace with a quota may have.
    pub max_workspace_entries: u64,
    /// The longest output of a stream in characters; 0 for no limit.
    pub output_limit_chars: usize,
    /// How a box is named whose caller does not, from what is known of the query.
    pub session_id_template: String,
    /// Whether host paths mean the same here and at the runtime. If not, they are compared as text,
    /// and neither looked at nor counted.
    pub shared_filesystem: bool,
    /// Whether command texts go into the log. They may hold secrets.
    pub log_commands: bool,
}

/// What one caller may mount.
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
    /// What follows for requests. Looks up where the configured directories really are.
    pub(crate) fn policy(&self) -> Result<Policy, BoxError> {
        let mut profile = self.chosen_profile()?;
        if let Some(quota) = self.workspace_quota_mb {
            profile.workspace_quota_mb = quota;
        }
        let real = |field, path: &PathBuf| paths::configured(field, path, self.shared_filesystem);
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

    /// The policies of callers who have one of their own, by name.
    pub(crate) fn policies(&self, all: &Policy) -> Result<BTreeMap<String, Policy>, BoxError> {
        let real = |field, path: &PathBuf| paths::configured(field, path, self.shared_filesystem);
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

    fn chosen_profile(&self) -> Result<BoxProfile, BoxError> {
        let mut named = self
            .profiles
            .iter()
            .filter(|profile| profile.name.as_str() == self.profile);
        let custom = named.next().cloned();
        if named.next().is_some() {
            return Err(BoxError::validation(format!(
                "box profile {:?} is defined twice",
                self.profile
            )));
        }
        custom
            .or_else(|| BoxProfile::built_in(&self.profile))
            .ok_or_else(|| {
                let own = self.profiles.iter().map(|profile| profile.name.as_str());
                let known: Vec<&str> = BoxProfile::BUILT_IN.into_iter().chain(own).collect();
                BoxError::validation(format!(
                    "unknown box profile {:?}; known are {}",
                    self.profile,
                    known.join(", ")
                ))
            })
    }
}

/// A path; an empty text, which is how some files write "not set", is none.
fn path<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    Ok(text.as_deref().and_then(filled))
}

fn path_list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PathBuf>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        List(Vec<String>),
        Commas(String),
    }
    Ok(match Option::<Written>::deserialize(deserializer)? {
        None => Vec::new(),
        Some(Written::List(list)) => list.iter().filter_map(|text| filled(text)).collect(),
        Some(Written::Commas(text)) => text.split(',').filter_map(filled).collect(),
    })
}

fn filled(text: &str) -> Option<PathBuf> {
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
    fn nothing_said_is_the_default() {
        assert_eq!(read(json!({})), ServiceConfig::default());
        let empty = json!({"shared_host_root": "", "default_host_workspace": "",
            "allowed_host_mount_roots": [], "runtime": {"endpoint": "x"}});
        assert_eq!(read(empty), ServiceConfig::default());
    }

    #[test]
    fn roots_come_as_a_list_or_with_commas() {
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
        let profile = config.chosen_profile().unwrap();
        assert_eq!(
            (profile.network, profile.max_timeout_sec),
            (Network::On, 600)
        );
        config.profile = "default".into();
        assert_eq!(config.chosen_profile().unwrap().network, Network::On);
        config.profile = "offline_readonly".into();
        assert_eq!(config.chosen_profile().unwrap().network, Network::Off);
    }

    #[test]
    fn an_unknown_or_ambiguous_profile_is_refused() {
        let profiles = json!([{"name": "mine"}, {"name": "mine"}]);
        for (name, text) in [
            ("nonexistent", "unknown box profile \"nonexistent\""),
            ("mine", "defined twice"),
        ] {
            let config = read(json!({"profile": name, "profiles": profiles}));
            let error = config.policy().unwrap_err();
            assert_eq!(error.code(), Code::Validation);
            assert!(error.message().contains(text), "{error}");
        }
    }

    #[test]
    fn a_profile_that_breaks_a_rule_is_refused_on_read() {
        let broken = json!({"profiles": [{"name": "mine", "memory_mb": 1}]});
        let error = serde_json::from_value::<ServiceConfig>(broken).unwrap_err();
        assert!(
            error.to_string().contains("memory_mb must be at least 32"),
            "{error}"
        );
    }
}
