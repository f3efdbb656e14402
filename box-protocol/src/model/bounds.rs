//! How much of everything a box may be asked to keep: a runtime holds it in memory, and on disk, for as long as the box lives.

use super::mount::BoxMountSpec;
use super::parts::{Defaults, Guest, Labels, Main};
use crate::invalid::Invalid;
use crate::paths;

/// Labels of one box.
pub const MAX_LABELS: usize = 64;

/// Bytes of all labels of a box, names and values.
pub const MAX_LABEL_BYTES: usize = 16 * 1024;

/// Mounts one call may ask for beside the workspace.
pub const MAX_MOUNTS: usize = 64;

/// Entries of every other list of a spec: `dirs`, `best_effort`.
pub const MAX_ENTRIES: usize = 64;

/// Arguments of `main`.
pub const MAX_ARGUMENTS: usize = 1024;

/// Bytes of the arguments of `main`, and of the variables of `defaults`.
pub const MAX_TEXT_BYTES: usize = 128 * 1024;

/// Bytes of every short text of a spec: a shell, a user, an image.
pub const MAX_WORD_BYTES: usize = 4096;

/// Refuses more labels than a box may have.
pub fn check_labels(labels: &Labels) -> Result<(), Invalid> {
    let bytes: usize = labels
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    if labels.len() > MAX_LABELS || bytes > MAX_LABEL_BYTES {
        let rule = format!("must be at most {MAX_LABELS}, and {MAX_LABEL_BYTES} bytes in all");
        return Err(Invalid::new("labels", rule));
    }
    Ok(())
}

/// Refuses more mounts than one call may ask for.
pub fn check_mounts(mounts: &[BoxMountSpec]) -> Result<(), Invalid> {
    few("extra_mounts", mounts.len(), MAX_MOUNTS)
}

/// Refuses larger defaults than a box may have, and a working directory that is not in the box.
pub(crate) fn check_defaults(defaults: &Defaults) -> Result<(), Invalid> {
    let variables = defaults.env.iter();
    let bytes: usize = variables
        .map(|(name, value)| name.len() + value.len())
        .sum();
    if bytes > MAX_TEXT_BYTES {
        let rule = format!("must have variables of at most {MAX_TEXT_BYTES} bytes in all");
        return Err(Invalid::new("defaults", rule));
    }
    let Defaults {
        env_file,
        cwd,
        user,
        shell,
        ..
    } = defaults;
    let words = [env_file, cwd, user, shell];
    let mut words = words.into_iter().flatten();
    words.try_for_each(|text| short("defaults", text))?;
    if let Some(cwd) = cwd {
        paths::inside("defaults", cwd)?;
    }
    Ok(())
}

/// Refuses a guest without a home in the box, or with a name that is too long.
pub(super) fn check_guest(guest: &Guest) -> Result<(), Invalid> {
    short("guest", &guest.name)?;
    paths::inside("guest", &guest.home).map(drop)
}

/// Refuses a command without a program, and one that is larger than a box may keep.
pub(super) fn check_main(main: &Main) -> Result<(), Invalid> {
    if main.argv.is_empty() {
        return Err(Invalid::new("main", "must have an argv that is not empty"));
    }
    few("main", main.argv.len(), MAX_ARGUMENTS)?;
    if main.argv.iter().map(String::len).sum::<usize>() > MAX_TEXT_BYTES {
        let rule = format!("must have an argv of at most {MAX_TEXT_BYTES} bytes");
        return Err(Invalid::new("main", rule));
    }
    Ok(())
}

pub(super) fn few(field: &'static str, entries: usize, most: usize) -> Result<(), Invalid> {
    if entries > most {
        return Err(Invalid::new(
            field,
            format!("must have at most {most} entries"),
        ));
    }
    Ok(())
}

pub(super) fn short(field: &'static str, text: &str) -> Result<(), Invalid> {
    if text.len() > MAX_WORD_BYTES {
        let rule = format!("must have no text longer than {MAX_WORD_BYTES} bytes");
        return Err(Invalid::new(field, rule));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::model::BoxSpec;

    /// Which field of this spec is too large.
    fn refused(members: &Value) -> Option<String> {
        let mut spec = json!({"session_id": "s"});
        spec.as_object_mut()
            .unwrap()
            .extend(members.as_object().unwrap().clone());
        BoxSpec::from_value(spec)
            .err()
            .map(|invalid| invalid.field().to_owned())
    }

    #[test]
    fn what_a_box_keeps_has_bounds() {
        let labels = |count: usize, bytes: usize| -> Value {
            (0..count)
                .map(|number| (format!("{number:0>4}"), json!("x".repeat(bytes))))
                .collect()
        };
        let mount =
            |number: usize| json!({"host_path": "/srv", "mount_path": format!("/m{number}")});
        let mounts = |count| (0..count).map(mount).collect::<Vec<_>>();
        let long = "x".repeat(5000);
        for (fine, too_much) in [
            (
                json!({"labels": labels(64, 252)}),
                json!({"labels": labels(65, 1)}),
            ),
            (
                json!({"labels": labels(4, 4092)}),
                json!({"labels": labels(4, 4093)}),
            ),
            (
                json!({"dirs": vec!["/a"; 64]}),
                json!({"dirs": vec!["/a"; 65]}),
            ),
            (
                json!({"dirs": ["/a"]}),
                json!({"dirs": [format!("/{long}")]}),
            ),
            (
                json!({"best_effort": ["network"]}),
                json!({"best_effort": [long]}),
            ),
            (
                json!({"main": {"argv": vec!["a"; 1024]}}),
                json!({"main": {"argv": vec!["a"; 1025]}}),
            ),
            (
                json!({"main": {"argv": ["a"]}}),
                json!({"main": {"argv": ["a".repeat(131_073)]}}),
            ),
            (
                json!({"defaults": {"env": {"A": "b".repeat(131_071)}}}),
                json!({"defaults": {"env": {"A": "b".repeat(131_072)}}}),
            ),
            (
                json!({"defaults": {"shell": "sh"}}),
                json!({"defaults": {"shell": long}}),
            ),
            (
                json!({"guest": {"name": "a", "home": "/a"}}),
                json!({"guest": {"name": long, "home": "/a"}}),
            ),
            (
                json!({"extra_mounts": mounts(64)}),
                json!({"extra_mounts": mounts(65)}),
            ),
            (json!({"image": "system"}), json!({"image": long})),
            (
                json!({"mount_path": "/a"}),
                json!({"mount_path": format!("/{long}")}),
            ),
            (
                json!({"host_path": "/a"}),
                json!({"host_path": format!("/{long}")}),
            ),
        ] {
            assert_eq!(refused(&fine), None);
            let field = too_much.as_object().unwrap().keys().next().cloned();
            assert_eq!(refused(&too_much), field);
        }
    }
}
