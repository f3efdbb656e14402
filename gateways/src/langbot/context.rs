//! The workspace that a call belongs to, and the names of its boxes.
//!
//! LangBot names boxes within a workspace. The gateway adds the workspace's namespace and placement generation to each
//! name, so that workspaces cannot collide and the name identifies an old placement.

use box_protocol::{BoxError, BoxId, Code};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::errors::{of_class, permission, value_error};

/// The maximum length of a workspace name in the headers of a relay.
const WORKSPACE_CHARS: usize = 256;

/// A workspace of this installation, and one placement of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The workspace.
    pub workspace: String,
    /// The generation of the placement; it only increases.
    pub generation: u64,
    /// The prefix of the workspace's boxes and directories.
    pub namespace: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    instance_uuid: String,
    workspace_uuid: String,
    #[serde(default = "first")]
    placement_generation: i64,
    #[serde(default, rename = "installation_uuid")]
    _installation: Option<String>,
    #[serde(default, rename = "runtime_revision")]
    _revision: Option<i64>,
    #[serde(default, rename = "artifact_digest")]
    _digest: Option<String>,
}

fn first() -> i64 {
    1
}

/// Parses the placement from a call's context, which must name this instance.
pub(super) fn placement(context: Option<&str>, instance: &str) -> Result<Placement, BoxError> {
    let Some(context) = context else {
        return Err(permission(
            "Box tenant action requires a trusted Workspace context",
        ));
    };
    let envelope = read(context)?;
    if envelope.instance_uuid.trim() != instance {
        return Err(of_another_instance());
    }
    let workspace = envelope.workspace_uuid.trim();
    let generation = u64::try_from(envelope.placement_generation).unwrap_or_default();
    Ok(Placement::new(instance, workspace, generation))
}

/// Checks that an optional context names this instance.
pub(super) fn check_instance(context: Option<&str>, instance: &str) -> Result<(), BoxError> {
    match context {
        Some(context) if read(context)?.instance_uuid.trim() != instance => {
            Err(of_another_instance())
        }
        _ => Ok(()),
    }
}

fn read(context: &str) -> Result<Envelope, BoxError> {
    let invalid = |reason: String| {
        of_class(
            "ValidationError",
            Code::Validation,
            format!("context: {reason}"),
        )
    };
    let envelope: Envelope = serde_json::from_str(context)
        .map_err(|error| invalid(box_protocol::Invalid::from(error).to_string()))?;
    for (field, value) in [
        ("instance_uuid", &envelope.instance_uuid),
        ("workspace_uuid", &envelope.workspace_uuid),
    ] {
        if value.trim().is_empty() {
            return Err(invalid(format!("{field} must not be empty")));
        }
    }
    if envelope.placement_generation < 1 {
        let rule = "placement_generation must be greater than or equal to 1";
        return Err(invalid(rule.to_owned()));
    }
    Ok(envelope)
}

fn of_another_instance() -> BoxError {
    permission("Box action context does not match the trusted instance")
}

/// Returns whether the text is a valid instance name.
///
/// A name is a letter or digit, followed by up to 127 letters, digits or characters of `._:-`.
pub fn is_instance(text: &str) -> bool {
    let rest = text.strip_prefix(|first: char| first.is_ascii_alphanumeric());
    rest.is_some_and(|rest| {
        rest.len() <= 127
            && rest
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte))
    })
}

impl Placement {
    /// Creates a placement of a workspace of this instance.
    pub(super) fn new(instance: &str, workspace: &str, generation: u64) -> Self {
        let mut digest = Sha256::new();
        digest.update(instance.as_bytes());
        digest.update([0]);
        digest.update(workspace.as_bytes());
        let mut hex = format!("{:x}", digest.finalize());
        hex.truncate(24);
        Self {
            workspace: workspace.to_owned(),
            generation,
            namespace: format!("ws-{hex}"),
        }
    }

    /// Parses the placement from the headers of a relay.
    pub(super) fn of_headers(instance: &str, workspace: &str, generation: &str) -> Option<Self> {
        let (workspace, text) = (workspace.trim(), generation.trim());
        if workspace.is_empty() || workspace.chars().count() > WORKSPACE_CHARS {
            return None;
        }
        let generation: u64 = text.parse().ok().filter(|number| *number >= 1)?;
        (generation.to_string() == text).then(|| Self::new(instance, workspace, generation))
    }

    /// Returns the prefix of its box names.
    pub(super) fn prefix(&self) -> String {
        format!("{}-g{}-", self.namespace, self.generation)
    }

    /// Returns the id of the box with this LangBot name.
    pub(super) fn physical(&self, logical: &str) -> Result<BoxId, BoxError> {
        let logical = logical.trim();
        if logical.is_empty() {
            return Err(value_error("Box session_id must not be empty"));
        }
        let mut safe = String::with_capacity(logical.len());
        for c in logical.chars() {
            if c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-') {
                safe.push(c);
            } else if !safe.ends_with('\u{0}') {
                // A run of other characters becomes one dash, independent of its neighbours.
                safe.push('\u{0}');
            }
        }
        let safe = safe.replace('\u{0}', "-");
        let safe = safe.trim_matches('-');
        if safe.is_empty() {
            return Err(value_error("Box session_id must contain a valid character"));
        }
        Ok(BoxId::new(format!("{}{safe}", self.prefix()))?)
    }

    /// Returns LangBot's name of this box; a box of another placement keeps its id.
    pub(super) fn logical<'a>(&self, physical: &'a str) -> &'a str {
        physical.strip_prefix(&self.prefix()).unwrap_or(physical)
    }

    /// Returns whether the box belongs to exactly this placement.
    pub(super) fn owns(&self, physical: &str) -> bool {
        physical
            .strip_prefix(&self.prefix())
            .is_some_and(|rest| !rest.is_empty())
    }

    /// Returns the generation of a box, or `None` if it is of another workspace.
    pub(super) fn generation_of(&self, physical: &str) -> Option<u64> {
        let rest = physical.strip_prefix(&self.namespace)?.strip_prefix("-g")?;
        rest.split_once('-')?.0.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Placement {
        Placement::new("inst-0001", "ws-0001", 1)
    }

    #[test]
    fn box_names_match_langbots() {
        let physical = sample().physical("s1").unwrap();
        assert_eq!(physical.as_str(), "ws-dbae8a731bf25fd875aba279-g1-s1");
        assert_eq!(sample().logical(physical.as_str()), "s1");
        assert!(sample().owns(physical.as_str()));
        assert_eq!(sample().generation_of(physical.as_str()), Some(1));
        let next = Placement::new("inst-0001", "ws-0001", 2);
        assert!(!next.owns(physical.as_str()));
        assert_eq!(next.logical(physical.as_str()), physical.as_str());
        assert_eq!(next.generation_of(physical.as_str()), Some(1));
        assert_eq!(
            Placement::new("inst-0001", "ws-2", 1).generation_of(physical.as_str()),
            None
        );
    }

    #[test]
    fn unsafe_characters_become_dashes() {
        for (logical, safe) in [
            (" a b ", "a-b"),
            ("a  /b", "a-b"),
            ("-a-", "a"),
            ("a-/-b", "a---b"),
            ("ä", ""),
            ("x…y_z.1", "x-y_z.1"),
        ] {
            match sample().physical(logical) {
                Ok(id) => assert_eq!(sample().logical(id.as_str()), safe),
                Err(error) => {
                    assert_eq!(safe, "");
                    assert_eq!(
                        error.message(),
                        "Box session_id must contain a valid character"
                    );
                }
            }
        }
        let empty = sample().physical("  ").unwrap_err();
        assert_eq!(empty.message(), "Box session_id must not be empty");
    }

    #[test]
    fn a_context_must_name_this_instance() {
        let missing = placement(None, "i").unwrap_err();
        assert_eq!(
            missing.message(),
            "Box tenant action requires a trusted Workspace context"
        );
        let other =
            placement(Some(r#"{"instance_uuid":"j","workspace_uuid":"w"}"#), "i").unwrap_err();
        assert_eq!(
            other.message(),
            "Box action context does not match the trusted instance"
        );
        let good = placement(
            Some(r#"{"instance_uuid":" i ","workspace_uuid":"w","installation_uuid":"x"}"#),
            "i",
        );
        assert_eq!(good.unwrap().generation, 1);
        for bad in [
            r#"{"instance_uuid":"i"}"#,
            r#"{"instance_uuid":"i","workspace_uuid":" "}"#,
            r#"{"instance_uuid":"i","workspace_uuid":"w","placement_generation":0}"#,
            r#"{"instance_uuid":"i","workspace_uuid":"w","surprise":1}"#,
        ] {
            assert!(placement(Some(bad), "i").is_err(), "{bad}");
        }
        assert!(check_instance(None, "i").is_ok());
        assert!(
            check_instance(Some(r#"{"instance_uuid":"j","workspace_uuid":"w"}"#), "i").is_err()
        );
    }

    #[test]
    fn headers_have_one_canonical_form() {
        assert!(Placement::of_headers("i", "w", "12").is_some());
        for (workspace, generation) in [
            ("", "1"),
            ("w", "0"),
            ("w", "01"),
            ("w", "+1"),
            ("w", "-1"),
            ("w", "x"),
        ] {
            assert!(Placement::of_headers("i", workspace, generation).is_none());
        }
        assert!(
            is_instance("a.b:c-9") && !is_instance("") && !is_instance(".a") && !is_instance("a b")
        );
        assert!(is_instance(&"a".repeat(128)) && !is_instance(&"a".repeat(129)));
    }
}
