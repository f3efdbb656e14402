//! The configuration from `box_init`: the `box` section of LangBot's configuration.

use std::fs;
use std::path::{Path, PathBuf};

use box_protocol::{BoxError, Code};
use box_service::paths::real_path;
use serde_json::{Map, Value};

use super::TOKEN_VARIABLE;
use super::errors::value_error;
use super::mounts::MountPolicy;

/// The maximum length of a configuration.
const CONFIG_BYTES: usize = 256 * 1024;

/// LangBot's configuration, and the settings derived from it.
#[derive(Debug, Clone, Default)]
pub(super) struct Config {
    pub(super) sections: Map<String, Value>,
    pub(super) limits: Limits,
}

/// LangBot's limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) max_sessions: usize,
    pub(super) max_managed_processes: usize,
    pub(super) max_completed_processes: usize,
    pub(super) max_admission_records: usize,
    pub(super) max_rpc_file_bytes: usize,
    pub(super) completed_process_retention_sec: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_sessions: 64,
            max_managed_processes: 64,
            max_completed_processes: 256,
            max_admission_records: 100_000,
            max_rpc_file_bytes: 20 * 1024 * 1024,
            completed_process_retention_sec: 300,
        }
    }
}

impl Limits {
    /// Returns these limits with the given changes.
    fn with_changes(&self, limits: Option<&Value>) -> Result<Self, BoxError> {
        let empty = Map::new();
        let limits = match limits {
            None | Some(Value::Null) => &empty,
            Some(Value::Object(limits)) => limits,
            Some(_) => return Err(value_error("box.limits must be an object")),
        };
        let read = |name: &str, current: usize, min: usize, max: usize| match limits.get(name) {
            None => Ok(current),
            Some(value) => {
                // Python's integers are unbounded; one beyond 64 bits is out of every range.
                let whole = value.as_number().filter(|number| !number.is_f64());
                let Some(number) = whole else {
                    return Err(value_error(format!("box.limits.{name} must be an integer")));
                };
                let number = number
                    .as_u64()
                    .and_then(|number| usize::try_from(number).ok());
                number
                    .filter(|number| (min..=max).contains(number))
                    .ok_or_else(|| {
                        value_error(format!("box.limits.{name} must be between {min} and {max}"))
                    })
            }
        };
        Ok(Self {
            max_sessions: read("max_sessions", self.max_sessions, 0, 5_000)?,
            max_managed_processes: read(
                "max_managed_processes",
                self.max_managed_processes,
                0,
                1_024,
            )?,
            max_completed_processes: read(
                "max_completed_processes",
                self.max_completed_processes,
                0,
                10_000,
            )?,
            max_admission_records: read(
                "max_admission_records",
                self.max_admission_records,
                1,
                250_000,
            )?,
            max_rpc_file_bytes: read(
                "max_rpc_file_bytes",
                self.max_rpc_file_bytes,
                1,
                100 * 1024 * 1024,
            )?,
            completed_process_retention_sec: read(
                "completed_process_retention_sec",
                self.completed_process_retention_sec,
                0,
                86_400,
            )?,
        })
    }
}

impl Config {
    /// Returns this configuration with the given sections replaced.
    pub(super) fn merged(&self, new: Map<String, Value>) -> Result<Self, BoxError> {
        let mut sections = self.sections.clone();
        sections.extend(new);
        let size = serde_json::to_string(&sections).map_or(usize::MAX, |text| text.len());
        if size > CONFIG_BYTES {
            return Err(BoxError::limit(
                Code::TooLarge,
                "configuration",
                "configuration_bytes",
                CONFIG_BYTES,
            ));
        }
        let limits = self.limits.with_changes(sections.get("limits"))?;
        Ok(Self { sections, limits })
    }

    fn local(&self, name: &str) -> Option<&Value> {
        self.sections.get("local")?.get(name)
    }

    fn local_text(&self, name: &str) -> Option<&str> {
        let text = self.local(name)?.as_str()?.trim();
        (!text.is_empty()).then_some(text)
    }

    fn host_root(&self) -> Option<PathBuf> {
        resolved(self.local_text("host_root")?, None)
    }

    /// Returns the directory of workspaces, if one is configured.
    pub(super) fn default_workspace(&self) -> Option<PathBuf> {
        let root = self.host_root();
        match (self.local_text("default_workspace"), &root) {
            (None, None) => None,
            (configured, root) => resolved(configured.unwrap_or("default"), root.as_deref()),
        }
    }

    /// Returns the directories below which directories may be created.
    pub(super) fn allowed_roots(&self) -> Vec<PathBuf> {
        let paths: Vec<&str> = match self.local("allowed_mount_roots") {
            Some(Value::String(roots)) => roots.split(',').collect(),
            Some(Value::Array(roots)) => roots.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let paths = paths
            .into_iter()
            .map(str::trim)
            .filter(|root| !root.is_empty());
        let roots: Vec<_> = paths.filter_map(|root| resolved(root, None)).collect();
        if roots.is_empty() {
            self.host_root().into_iter().collect()
        } else {
            roots
        }
    }

    /// Creates the default workspace, if one is configured.
    pub(super) fn make_workspace(&self, mount_policy: &MountPolicy) -> Result<(), BoxError> {
        let Some(workspace) = self.default_workspace() else {
            return Ok(());
        };
        let is_refused =
            |path: &Path| real_path(path).map_or(true, |real| mount_policy.refuses(&real));
        if !mount_policy.allow_unlisted && is_refused(&workspace) {
            return Err(BoxError::validation(format!(
                "box.local.default_workspace is outside allowed_host_mount_roots of the Box runtime; \
                 set {TOKEN_VARIABLE} on both sides to let LangBot choose its paths"
            )));
        }
        if workspace.is_dir() {
            return Ok(());
        }
        if workspace.exists() {
            return Err(BoxError::validation(
                "box.local.default_workspace must point to a directory on the Box runtime host",
            ));
        }
        let roots = self.allowed_roots();
        if roots.is_empty() {
            return Err(BoxError::validation(
                "box.local.default_workspace cannot be created because no allowed_mount_roots are configured",
            ));
        }
        if !roots.iter().any(|root| workspace.starts_with(root)) {
            let roots: Vec<_> = roots
                .iter()
                .map(|root| root.display().to_string())
                .collect();
            return Err(BoxError::validation(format!(
                "box.local.default_workspace is outside allowed_mount_roots: {}",
                roots.join(", ")
            )));
        }
        if is_refused(&workspace) {
            return Err(BoxError::validation(
                "box.local.default_workspace is blocked for security",
            ));
        }
        fs::create_dir_all(&workspace).map_err(|error| {
            BoxError::validation(format!(
                "box.local.default_workspace cannot be created: {}",
                error.kind()
            ))
        })
    }
}

/// Resolves a path of the configuration from `base` or the current directory.
fn resolved(path: &str, base: Option<&Path>) -> Option<PathBuf> {
    let home = || std::env::var_os("HOME").map(PathBuf::from);
    let path = match path.strip_prefix('~') {
        Some("") => home()?,
        Some(rest) if rest.starts_with('/') => home()?.join(&rest[1..]),
        _ => PathBuf::from(path),
    };
    let path = if path.is_absolute() {
        path
    } else {
        match base {
            Some(base) => base.join(path),
            None => std::env::current_dir().ok()?.join(path),
        }
    };
    real_path(&path).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config_from(value: &Value) -> Result<Config, BoxError> {
        Config::default().merged(value.as_object().unwrap().clone())
    }

    #[test]
    fn limits_are_integers_in_range() {
        let config =
            config_from(&json!({"limits": {"max_sessions": 7, "unknown": "x"}, "more": [1]}))
                .unwrap();
        assert_eq!(
            (
                config.limits.max_sessions,
                config.limits.max_managed_processes
            ),
            (7, 64)
        );
        for (value, text) in [
            (json!("7"), "box.limits.max_sessions must be an integer"),
            (json!(true), "box.limits.max_sessions must be an integer"),
            (json!(1.0), "box.limits.max_sessions must be an integer"),
            (
                json!(-1),
                "box.limits.max_sessions must be between 0 and 5000",
            ),
            (
                json!(5001),
                "box.limits.max_sessions must be between 0 and 5000",
            ),
        ] {
            let refused = config_from(&json!({"limits": {"max_sessions": value}})).unwrap_err();
            assert_eq!(refused.message(), text);
        }
        assert!(config_from(&json!({"limits": []})).is_err());
    }

    #[test]
    fn new_sections_replace_old_ones() {
        let first =
            config_from(&json!({"limits": {"max_sessions": 7}, "local": {"host_root": "/srv/a"}}))
                .unwrap();
        let second = json!({"limits": {"max_managed_processes": 3}, "local": {}});
        let second = first.merged(second.as_object().unwrap().clone()).unwrap();
        assert_eq!(
            (
                second.limits.max_sessions,
                second.limits.max_managed_processes
            ),
            (7, 3)
        );
        assert_eq!(second.default_workspace(), None);
    }

    fn any_path() -> MountPolicy {
        MountPolicy {
            allow_unlisted: true,
            ..MountPolicy::default()
        }
    }

    #[test]
    fn other_callers_create_workspaces_only_in_allowed_roots() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let config = config_from(&json!({"local": {"host_root": root.join("box")}})).unwrap();
        let refused = config.make_workspace(&MountPolicy::default()).unwrap_err();
        assert!(
            refused
                .message()
                .contains("outside allowed_host_mount_roots")
        );
        assert!(!root.join("box").exists());
        let below = MountPolicy {
            allowed: vec![root.clone()],
            allow_unlisted: false,
            ..MountPolicy::default()
        };
        config.make_workspace(&below).unwrap();
        assert!(root.join("box/default").is_dir());
    }

    #[test]
    fn the_workspace_is_created_inside_the_roots_only() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap().join("box");
        let inside = config_from(&json!({"local": {"host_root": root}})).unwrap();
        inside.make_workspace(&any_path()).unwrap();
        assert!(root.join("default").is_dir());
        let outside =
            json!({"local": {"host_root": root, "default_workspace": dir.path().join("else")}});
        let refused = config_from(&outside)
            .unwrap()
            .make_workspace(&any_path())
            .unwrap_err();
        assert!(
            refused
                .message()
                .starts_with("box.local.default_workspace is outside allowed_mount_roots: ")
        );
        let listed = json!({"local": {"default_workspace": dir.path().join("else"), "allowed_mount_roots": format!(" , {}", dir.path().display())}});
        config_from(&listed)
            .unwrap()
            .make_workspace(&any_path())
            .unwrap();
    }
}
