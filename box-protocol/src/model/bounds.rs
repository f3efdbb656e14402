//! Size limits of the parts of a spec, which the runtime keeps in memory and on disk for the life
//! of a box.

use super::command::Program;
use super::mount::BoxMountSpec;
use super::parts::{Defaults, Guest, Labels, Main, Prepare};
use crate::invalid::Invalid;
use crate::paths;

/// Maximum number of labels of a box.
pub const MAX_LABELS: usize = 64;

/// Maximum size of all labels of a box, names and values together, in bytes.
pub const MAX_LABEL_BYTES: usize = 16 * 1024;

/// Maximum number of mounts in one call, in addition to the workspace.
pub const MAX_MOUNTS: usize = 64;

/// Maximum number of entries in the other lists of a spec: `dirs`, `best_effort`.
pub const MAX_ENTRIES: usize = 64;

/// Maximum number of arguments of `main`.
pub const MAX_ARGUMENTS: usize = 1024;

/// Maximum size of the arguments of `main`, and of the variables of `defaults`, in bytes.
pub const MAX_TEXT_BYTES: usize = 128 * 1024;

/// Maximum length of a short text of a spec, such as a shell, user or image, in bytes.
pub const MAX_WORD_BYTES: usize = 4096;

/// Checks the number and size of labels.
pub fn check_labels(labels: &Labels) -> Result<(), Invalid> {
    let bytes: usize = labels
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    if labels.len() > MAX_LABELS || bytes > MAX_LABEL_BYTES {
        let rule =
            format!("must have at most {MAX_LABELS} entries and {MAX_LABEL_BYTES} bytes in total");
        return Err(Invalid::new("labels", rule));
    }
    Ok(())
}

/// Checks the number of mounts.
pub fn check_mounts(mounts: &[BoxMountSpec]) -> Result<(), Invalid> {
    few("extra_mounts", mounts.len(), MAX_MOUNTS)
}

/// Checks the size of defaults and that the working directory is an absolute path.
pub(crate) fn check_defaults(defaults: &Defaults) -> Result<(), Invalid> {
    let variables = defaults.env.iter();
    let bytes: usize = variables
        .map(|(name, value)| name.len() + value.len())
        .sum();
    if bytes > MAX_TEXT_BYTES {
        let rule = format!("variables must have at most {MAX_TEXT_BYTES} bytes in total");
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

/// Checks the name and the home directory of the guest user.
pub(super) fn check_guest(guest: &Guest) -> Result<(), Invalid> {
    short("guest", &guest.name)?;
    paths::inside("guest", &guest.home).map(drop)
}

/// Checks that `main` has a limited size.
pub(super) fn check_main(main: &Main) -> Result<(), Invalid> {
    few("main", main.argv.len(), MAX_ARGUMENTS)?;
    if main.argv.iter().map(String::len).sum::<usize>() > MAX_TEXT_BYTES {
        let rule = format!("argv must have at most {MAX_TEXT_BYTES} bytes");
        return Err(Invalid::new("main", rule));
    }
    Ok(())
}

/// Checks that `prepare` has commands of a limited size and a time limit.
pub(super) fn check_prepare(prepare: &Prepare) -> Result<(), Invalid> {
    let commands = &prepare.commands;
    if commands.is_empty() {
        return Err(Invalid::new("prepare", "commands must not be empty"));
    }
    few("prepare", commands.len(), MAX_ENTRIES)?;
    if commands.iter().map(Program::bytes).sum::<usize>() > MAX_TEXT_BYTES {
        let rule = format!("commands must have at most {MAX_TEXT_BYTES} bytes in total");
        return Err(Invalid::new("prepare", rule));
    }
    if prepare.timeout_sec == 0 {
        return Err(Invalid::new(
            "prepare",
            "timeout_sec must be greater than 0",
        ));
    }
    Ok(())
}

pub(crate) fn few(field: &'static str, entries: usize, most: usize) -> Result<(), Invalid> {
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
        let rule = format!("must not contain a text longer than {MAX_WORD_BYTES} bytes");
        return Err(Invalid::new(field, rule));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::model::BoxSpec;

    /// Returns the field that the decoder rejects.
    fn refused(members: &Value) -> Option<String> {
        let mut spec = json!({"box_id": "s"});
        spec.as_object_mut()
            .unwrap()
            .extend(members.as_object().unwrap().clone());
        BoxSpec::from_value(spec)
            .err()
            .map(|invalid| invalid.field().to_owned())
    }

    #[test]
    fn the_parts_of_a_spec_have_size_limits() {
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
            (
                json!({"prepare": {"commands": vec![json!({"text": "a"}); 64]}}),
                json!({"prepare": {"commands": vec![json!({"text": "a"}); 65]}}),
            ),
            (
                json!({"prepare": {"commands": [{"text": "a".repeat(131_072)}]}}),
                json!({"prepare": {"commands": [{"text": "a".repeat(131_073)}]}}),
            ),
            (
                json!({"prepare": {"commands": [{"text": "a"}], "timeout_sec": 1}}),
                json!({"prepare": {"commands": [{"text": "a"}], "timeout_sec": 0}}),
            ),
            (
                json!({"prepare": {"commands": [{"argv": ["a"]}]}}),
                json!({"prepare": {"commands": []}}),
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
