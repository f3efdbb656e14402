//! Whether a box that exists may serve what is asked for.

use std::fmt;

use super::info::BoxSessionInfo;
use super::mount::HostPathMode;
use super::spec::{BoxSpec, Network};
use crate::error::{BoxError, Detail, Subject};
use crate::ids::SessionId;

/// The fields of a box that cannot change while it lives, in the order in which they are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fixed<'a> {
    network: Network,
    image: &'a str,
    host_path: Option<&'a str>,
    host_path_mode: HostPathMode,
    mount_path: &'a str,
    persistent: bool,
    cpus: f64,
    memory_mb: u64,
    pids_limit: u64,
    read_only_rootfs: bool,
    workspace_quota_mb: u64,
}

macro_rules! fixed_of {
    ($($owner:ty),*) => {$(
        impl<'a> From<&'a $owner> for Fixed<'a> {
            fn from(of: &'a $owner) -> Self {
                Self {
                    network: of.network,
                    image: &of.image,
                    host_path: of.host_path.as_deref(),
                    host_path_mode: of.host_path_mode,
                    mount_path: &of.mount_path,
                    persistent: of.persistent,
                    cpus: of.cpus,
                    memory_mb: of.memory_mb,
                    pids_limit: of.pids_limit,
                    read_only_rootfs: of.read_only_rootfs,
                    workspace_quota_mb: of.workspace_quota_mb,
                }
            }
        }
    )*};
}

fixed_of!(BoxSpec, BoxSessionInfo);

/// The first field in which what is asked for differs from what exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// The field.
    pub field: &'static str,
    /// What exists and what is asked for; absent for paths, which are not told.
    pub values: Option<(String, String)>,
}

/// Compares what exists with what is asked for: two specs, or a box's info and a spec.
pub fn first_conflict<'a>(
    existing: impl Into<Fixed<'a>>,
    asked: impl Into<Fixed<'a>>,
) -> Option<Conflict> {
    let (old, new) = (existing.into(), asked.into());
    let differences = [
        ("network", old.network != new.network),
        ("image", old.image != new.image),
        ("host_path", old.host_path != new.host_path),
        ("host_path_mode", old.host_path_mode != new.host_path_mode),
        ("mount_path", old.mount_path != new.mount_path),
        ("persistent", old.persistent != new.persistent),
        // Always finite and above zero, so equal numbers are equal bits.
        ("cpus", old.cpus.to_bits() != new.cpus.to_bits()),
        ("memory_mb", old.memory_mb != new.memory_mb),
        ("pids_limit", old.pids_limit != new.pids_limit),
        (
            "read_only_rootfs",
            old.read_only_rootfs != new.read_only_rootfs,
        ),
        (
            "workspace_quota_mb",
            old.workspace_quota_mb != new.workspace_quota_mb,
        ),
    ];
    let (field, _) = differences.into_iter().find(|(_, differs)| *differs)?;
    Some(Conflict {
        field,
        values: old.shown(field).zip(new.shown(field)),
    })
}

impl Fixed<'_> {
    /// The field's value as LangBot writes it; paths are not told.
    fn shown(&self, field: &str) -> Option<String> {
        Some(match field {
            "network" => self.network.as_str().to_owned(),
            "image" => self.image.to_owned(),
            "host_path_mode" => self.host_path_mode.as_str().to_owned(),
            "persistent" => self.persistent.to_string(),
            "cpus" => format!("{:?}", self.cpus),
            "memory_mb" => self.memory_mb.to_string(),
            "pids_limit" => self.pids_limit.to_string(),
            "read_only_rootfs" => self.read_only_rootfs.to_string(),
            "workspace_quota_mb" => self.workspace_quota_mb.to_string(),
            _ => return None,
        })
    }
}

impl Conflict {
    /// The `conflict` for the box that exists.
    pub fn into_error(self, session_id: &SessionId) -> BoxError {
        let message = format!("Box session {session_id} already exists with {self}");
        let (existing, asked) = self.values.unzip();
        BoxError::conflict(message).with_detail(&Detail {
            field: Some(self.field.to_owned()),
            existing,
            asked,
            ..Detail::about(Subject::Box)
        })
    }
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.values {
            Some((existing, asked)) => write!(f, "{}={existing}, asked for {asked}", self.field),
            None => write!(f, "another {}", self.field),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use crate::model::SpecDraft;
    use crate::time::UnixMs;
    use serde_json::{Value, json};

    fn spec(members: &Value) -> BoxSpec {
        let mut all = json!({"session_id": "s1"});
        all.as_object_mut()
            .unwrap()
            .extend(members.as_object().unwrap().clone());
        BoxSpec::from_value(all).unwrap()
    }

    /// In the order of comparison, each with a value that is not the default.
    fn differences() -> Vec<(&'static str, Value)> {
        vec![
            ("network", json!("on")),
            ("image", json!("alpine")),
            ("host_path", json!("/srv")),
            ("host_path_mode", json!("none")),
            ("mount_path", json!("/project")),
            ("persistent", json!(true)),
            ("cpus", json!(2.0)),
            ("memory_mb", json!(1024)),
            ("pids_limit", json!(64)),
            ("read_only_rootfs", json!(false)),
            ("workspace_quota_mb", json!(1)),
        ]
    }

    #[test]
    fn each_field_conflicts_alone() {
        let existing = SpecDraft::new("s1").build().unwrap();
        for (field, value) in differences() {
            let conflict = first_conflict(&existing, &spec(&json!({field: value}))).unwrap();
            assert_eq!(conflict.field, field);
            assert_eq!(
                conflict.values.is_none(),
                ["host_path", "mount_path"].contains(&field)
            );
        }
    }

    #[test]
    fn the_first_in_order_is_told() {
        let existing = SpecDraft::new("s1").build().unwrap();
        let all = differences();
        for start in 0..all.len() {
            let members: serde_json::Map<_, _> = all[start..]
                .iter()
                .map(|(name, value)| ((*name).to_owned(), value.clone()))
                .collect();
            let conflict = first_conflict(&existing, &spec(&members.into())).unwrap();
            assert_eq!(conflict.field, all[start].0);
        }
    }

    #[test]
    fn what_belongs_to_one_call_may_differ() {
        let existing = SpecDraft::new("s1").build().unwrap();
        let info = BoxSessionInfo::starting(&existing, "fake", "b", UnixMs(0));
        let asked = spec(
            &json!({"cmd": "ls", "workdir": "/tmp", "timeout_sec": 5, "env": {"A": "1"},
            "labels": {"x": "y"}, "mount_path": "/workspace/"}),
        );
        assert_eq!(first_conflict(&existing, &asked), None);
        assert_eq!(first_conflict(&info, &asked), None);
    }

    #[test]
    fn the_error_names_field_and_both_values() {
        let existing = SpecDraft::new("s1").build().unwrap();
        let error = first_conflict(&existing, &spec(&json!({"memory_mb": 1024})))
            .unwrap()
            .into_error(&existing.session_id);
        assert_eq!(error.code(), Code::Conflict);
        assert_eq!(
            error.message(),
            "Box session s1 already exists with memory_mb=512, asked for 1024"
        );
        let detail: Detail = error.detail().unwrap();
        assert_eq!(detail.field.as_deref(), Some("memory_mb"));
        assert_eq!(
            (detail.existing.as_deref(), detail.asked.as_deref()),
            (Some("512"), Some("1024"))
        );

        let cpus = first_conflict(&existing, &spec(&json!({"cpus": 2.5}))).unwrap();
        assert_eq!(cpus.to_string(), "cpus=1.0, asked for 2.5");
    }

    #[test]
    fn paths_are_not_told() {
        let existing = spec(&json!({"host_path": "/srv/secret-a"}));
        let asked = spec(&json!({"host_path": "/srv/secret-b"}));
        let conflict = first_conflict(&existing, &asked).unwrap();
        let error = conflict.into_error(&existing.session_id);
        assert_eq!(
            error.message(),
            "Box session s1 already exists with another host_path"
        );
        assert!(!format!("{error:?}").contains("secret"));
    }
}
