//! Whether an existing box fits a requested spec.

use std::fmt;

use super::adjusted;
use super::fields::*;
use super::info::BoxInfo;
use super::spec::{BoxSpec, SpecDraft};
use crate::error::{BoxError, Detail, Subject};
use crate::ids::BoxId;

macro_rules! declare {
    ($($name:ident: $type:tt = $default:tt, $shown:ident;)*) => {
        /// The fields that cannot change during the life of a box, in the order of comparison.
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct Fixed<'a> {
            $($name: &'a held!($type, $default),)*
        }

        impl<'a> From<&'a BoxSpec> for Fixed<'a> {
            fn from(of: &'a BoxSpec) -> Self {
                Self { $($name: &of.$name,)* }
            }
        }

        impl<'a> From<&'a BoxInfo> for Fixed<'a> {
            fn from(of: &'a BoxInfo) -> Self {
                Self { $($name: &of.$name,)* }
            }
        }

        /// Compares an existing box with a requested spec: two specs, or the record of a box and a
        /// spec.
        pub fn first_conflict<'a>(
            existing: impl Into<Fixed<'a>>,
            asked: impl Into<Fixed<'a>>,
        ) -> Option<Conflict> {
            let (old, new) = (existing.into(), asked.into());
            $(
                if PartialEq::ne(old.$name, new.$name) {
                    let values = values!($shown, old.$name, new.$name);
                    return Some(Conflict { field: stringify!($name), values });
                }
            )*
            None
        }

        impl SpecDraft {
            /// Fills every unset fixed field from an existing box.
            pub fn inherit_unset(&mut self, info: &BoxInfo) {
                $(
                    if self.$name.is_none() {
                        self.$name = info.$name.clone().into();
                    }
                )*
            }
        }
    };
}

/// Both values as text, if an error may show them.
macro_rules! values {
    (shown, $old:expr, $new:expr) => {
        Some((adjusted::text($old), adjusted::text($new)))
    };
    (hidden, $old:expr, $new:expr) => {
        None
    };
}

spec_fields!(fixed_fields declare);

/// The first field in which the requested spec differs from the existing box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// The name of the field.
    pub field: &'static str,
    /// The existing and the requested value; `None` for paths, which errors do not show.
    pub values: Option<(String, String)>,
}

impl Conflict {
    /// Converts to the error `conflict` for the existing box.
    pub fn into_error(self, box_id: &BoxId) -> BoxError {
        let field = self.field;
        let difference = match &self.values {
            Some((existing, asked)) => format!("{existing}, not {asked}"),
            None => "another".to_owned(),
        };
        let message =
            format!("{field}: box {box_id} has {difference}; omit {field} or use another box_id");
        let (existing, asked) = self.values.unzip();
        BoxError::conflict(message).with_detail(&Detail {
            field: Some(field.to_owned()),
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
    use crate::time::UnixMs;
    use serde_json::{Value, json};

    fn spec(members: &Value) -> BoxSpec {
        let mut all = json!({"box_id": "s1"});
        all.as_object_mut()
            .unwrap()
            .extend(members.as_object().unwrap().clone());
        BoxSpec::from_value(all).unwrap()
    }

    macro_rules! names {
        ($($name:ident: $type:tt = $default:tt, $shown:ident;)*) => {
            &[$(stringify!($name)),*]
        };
    }

    const FIXED: &[&str] = spec_fields!(fixed_fields names);

    /// Each fixed field with a value that is not the default.
    fn differences() -> Vec<(&'static str, Value)> {
        let value = |name: &str| match name {
            "network" => json!("on"),
            "image" | "snapshot" | "template" => json!("alpine"),
            "user" => json!("root"),
            "host_path" => json!("/srv"),
            "host_path_mode" => json!("none"),
            "mount_path" => json!("/project"),
            "volumes" => json!([{"volume": "data", "mount_path": "/data"}]),
            "persistent" => json!(true),
            "cpus" => json!(2.0),
            "memory_mb" => json!(1024),
            "pids_limit" => json!(64),
            "read_only_rootfs" => json!(false),
            "disk_mb" | "workspace_quota_mb" => json!(1),
            other => panic!("{other}: a value that is not the default is missing"),
        };
        FIXED.iter().map(|name| (*name, value(name))).collect()
    }

    /// Those that one spec can have: it has an image or a snapshot.
    fn combined() -> Vec<(&'static str, Value)> {
        let mut all = differences();
        all.retain(|(name, _)| *name != "snapshot");
        all
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
    fn the_first_conflict_in_order_is_reported() {
        let existing = SpecDraft::new("s1").build().unwrap();
        let all = combined();
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
    fn fields_of_a_single_call_may_differ() {
        let existing = SpecDraft::new("s1").build().unwrap();
        let info = BoxInfo::starting(&existing, "fake", "b", UnixMs(0));
        let asked = spec(
            &json!({"cmd": "ls", "workdir": "/tmp", "timeout_sec": 5, "env": {"A": "1"},
            "labels": {"x": "y"}, "mount_path": "/workspace/"}),
        );
        assert_eq!(first_conflict(&existing, &asked), None);
        assert_eq!(first_conflict(&info, &asked), None);
    }

    #[test]
    fn a_draft_inherits_unset_fixed_fields() {
        let members: serde_json::Map<_, _> = combined()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        let info = BoxInfo::starting(&spec(&members.into()), "fake", "b", UnixMs(0));
        let mut draft = SpecDraft::new("s1").cmd("ls").memory_mb(64);
        draft.inherit_unset(&info);
        assert_eq!(draft.cmd.as_deref(), Some("ls"));
        let conflict = first_conflict(&info, &draft.clone().build().unwrap()).unwrap();
        assert_eq!(conflict.to_string(), "memory_mb=1024, asked for 64");
        let same = draft.memory_mb(1024).build().unwrap();
        assert_eq!(first_conflict(&info, &same), None);
    }

    #[test]
    fn the_error_names_field_and_both_values() {
        let existing = SpecDraft::new("s1").build().unwrap();
        let error = first_conflict(&existing, &spec(&json!({"memory_mb": 1024})))
            .unwrap()
            .into_error(&existing.box_id);
        assert_eq!(error.code(), Code::Conflict);
        assert_eq!(
            error.message(),
            "memory_mb: box s1 has 512, not 1024; omit memory_mb or use another box_id"
        );
        let detail: Detail = error.detail().unwrap();
        assert_eq!(detail.field.as_deref(), Some("memory_mb"));
        assert_eq!(
            (detail.existing.as_deref(), detail.asked.as_deref()),
            (Some("512"), Some("1024"))
        );

        let cpus = first_conflict(&existing, &spec(&json!({"cpus": 2.5}))).unwrap();
        assert_eq!(cpus.to_string(), "cpus=1.0, asked for 2.5");
        let snapshot = first_conflict(&existing, &spec(&json!({"snapshot": "s"}))).unwrap();
        assert_eq!(snapshot.to_string(), "snapshot=none, asked for s");
        let image = first_conflict(&existing, &spec(&json!({"image": "alpine"}))).unwrap();
        assert_eq!(image.to_string(), "image=none, asked for alpine");
    }

    #[test]
    fn errors_do_not_show_paths() {
        let existing = spec(&json!({"host_path": "/srv/secret-a"}));
        let asked = spec(&json!({"host_path": "/srv/secret-b"}));
        let conflict = first_conflict(&existing, &asked).unwrap();
        let error = conflict.into_error(&existing.box_id);
        assert_eq!(
            error.message(),
            "host_path: box s1 has another; omit host_path or use another box_id"
        );
        assert!(!format!("{error:?}").contains("secret"));
    }
}
