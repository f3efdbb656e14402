//! Parsers of command line values.

use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use box_protocol::{BoxMountSpec, HostPathMode, VolumeMount};
use serde_json::json;

/// Parses a duration: a number of seconds, or a number with `ms`, `s`, `m`, `h` or `d`.
pub(crate) fn duration(text: &str) -> Result<Duration> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let seconds = match unit.trim() {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => bail!("unknown time unit {unit:?}; use ms, s, m, h or d"),
    };
    let number: f64 = number
        .parse()
        .with_context(|| format!("{text:?} is not a duration"))?;
    let duration = Duration::try_from_secs_f64(number * seconds)
        .with_context(|| format!("{text:?} is too long"))?;
    if duration.is_zero() {
        bail!("duration must be greater than zero");
    }
    Ok(duration)
}

/// Parses an environment variable: `NAME=VALUE`, or `NAME` to inherit its value.
pub(crate) fn variable(text: &str) -> Result<(String, String)> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        Some(_) => bail!("--env {text}: the name is missing; use NAME=VALUE"),
        None => {
            let value = std::env::var_os(text).with_context(|| {
                format!("--env {text}: not set in this environment; use {text}=VALUE")
            })?;
            let value = value.into_string();
            let value = value
                .map_err(|_| anyhow!("--env {text}: the value is not UTF-8; use {text}=VALUE"))?;
            Ok((text.to_owned(), value))
        }
    }
}

/// Parses a workspace, `DIR`, `DIR:ro` or `DIR:overlay`, and resolves its directory.
pub(crate) fn workspace(text: &str) -> Result<(String, HostPathMode)> {
    let (path, mode) = match text.rsplit_once(':') {
        Some((path, "ro")) => (path, HostPathMode::Ro),
        Some((path, "rw")) => (path, HostPathMode::Rw),
        Some((path, "overlay")) => (path, HostPathMode::Overlay),
        _ => (text, HostPathMode::Rw),
    };
    let directory = directory(path).with_context(|| format!("--workspace {path}"))?;
    Ok((directory, mode))
}

/// Parses a mount: `DIR:PATH`, read-only unless `:rw` follows.
pub(crate) fn mount(text: &str) -> Result<BoxMountSpec> {
    let (rest, mode) = match text.rsplit_once(':') {
        Some((rest, "rw")) => (rest, HostPathMode::Rw),
        Some((rest, "ro")) => (rest, HostPathMode::Ro),
        _ => (text, HostPathMode::Ro),
    };
    let Some((path, target)) = rest.rsplit_once(':') else {
        bail!("--mount {text}: the path in the box is missing; use DIR:PATH or DIR:PATH:rw");
    };
    let directory = directory(path).with_context(|| format!("--mount {path}"))?;
    BoxMountSpec::new(directory, target, mode).with_context(|| format!("--mount {text}"))
}

/// Whether the source of a volume is a directory of this machine, and not the name of a volume.
pub(crate) fn is_directory(text: &str) -> bool {
    let source = text.split_once(':').map_or(text, |(source, _)| source);
    source.contains('/') || matches!(source, "" | "." | ".." | "~")
}

/// Parses the mount of a named volume: `NAME:PATH[:OPTION,OPTION]`.
///
/// The options are `ro`, `rw` and `sub=DIR` for a directory of the volume.
pub(crate) fn volume(text: &str) -> Result<VolumeMount> {
    let expected = || anyhow!("-v {text}: expected NAME:PATH, with :ro or :sub=DIR at the end");
    let (name, rest) = text.split_once(':').ok_or_else(expected)?;
    let (path, options) = rest.split_once(':').unwrap_or((rest, "rw"));
    let mut mount = json!({"volume": name, "mount_path": path});
    for option in options.split(',') {
        match option.split_once('=') {
            Some(("sub", directory)) => mount["sub_path"] = json!(directory),
            None if option == "ro" => mount["ro"] = json!(true),
            None if option == "rw" => {}
            _ => return Err(expected()),
        }
    }
    serde_json::from_value(mount).with_context(|| format!("-v {text}"))
}

/// Parses a volume in the notation of container engines: `DIR:PATH`, writable unless `:ro` follows.
pub(crate) fn directory_volume(text: &str) -> Result<BoxMountSpec> {
    let (rest, mode) = match text.rsplit_once(':') {
        Some((rest, "rw")) => (rest, HostPathMode::Rw),
        Some((rest, "ro")) => (rest, HostPathMode::Ro),
        _ => (text, HostPathMode::Rw),
    };
    let Some((path, target)) = rest.rsplit_once(':') else {
        bail!("-v {text}: expected DIR:PATH or DIR:PATH:ro; anonymous volumes are not supported");
    };
    let directory = directory(path).with_context(|| format!("-v {path}"))?;
    BoxMountSpec::new(directory, target, mode).with_context(|| format!("-v {text}"))
}

/// Parses an amount of memory: a number of MiB, or a number with `k`, `m`, `g` or `t`.
pub(crate) fn mebibytes(text: &str) -> Result<u64> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let mebibytes = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "m" | "mb" | "mib" => 1.0,
        "k" | "kb" | "kib" => 1.0 / 1024.0,
        "g" | "gb" | "gib" => 1024.0,
        "t" | "tb" | "tib" => 1024.0 * 1024.0,
        _ => bail!("unknown memory unit {unit:?}; use k, m, g or t"),
    };
    let number: f64 = number
        .parse()
        .with_context(|| format!("{text:?} is not an amount of memory"))?;
    let all = (number * mebibytes).ceil();
    if !(1.0..=1e12).contains(&all) {
        bail!("{text:?} must be between 1 MiB and 1000000000000 MiB");
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a whole number within the bounds above"
    )]
    Ok(all as u64)
}

/// Resolves a directory of this machine. The caller names its option and the path.
pub(crate) fn directory(path: &str) -> Result<String> {
    let real = match std::fs::canonicalize(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("no such directory; create it or choose another")
        }
        real => real?,
    };
    if !real.is_dir() {
        bail!("not a directory; choose a directory");
    }
    let text = real.to_str();
    Ok(text.context("not UTF-8; choose another")?.to_owned())
}

/// Splits `BOX` or `BOX/COMMAND`. No id contains a slash.
pub(crate) fn target(text: &str) -> (&str, Option<&str>) {
    match text.split_once('/') {
        Some((name, command)) => (name, Some(command)),
        None => (text, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed() {
        for (text, millis) in [
            ("90", 90_000),
            ("1.5m", 90_000),
            ("250ms", 250),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
        ] {
            assert_eq!(
                duration(text).unwrap(),
                Duration::from_millis(millis),
                "{text}"
            );
        }
        for text in ["", "0", "x", "5 parsecs", "-1", "1e400"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn mounts_are_read_only_by_default() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap();
        let path = path.to_str().unwrap();
        assert_eq!(
            workspace(path).unwrap(),
            (path.to_owned(), HostPathMode::Rw)
        );
        assert_eq!(
            workspace(&format!("{path}:ro")).unwrap().1,
            HostPathMode::Ro
        );
        assert_eq!(
            workspace(&format!("{path}:overlay")).unwrap(),
            (path.to_owned(), HostPathMode::Overlay)
        );
        let plain = mount(&format!("{path}:/data")).unwrap();
        assert_eq!(
            (plain.mount_path.as_str(), plain.mode),
            ("/data", HostPathMode::Ro)
        );
        assert_eq!(
            mount(&format!("{path}:/data:rw")).unwrap().mode,
            HostPathMode::Rw
        );
        assert!(mount(path).is_err());
        let missing = workspace("/nowhere/at/all").unwrap_err();
        assert_eq!(
            format!("{missing:#}"),
            "--workspace /nowhere/at/all: no such directory; create it or choose another"
        );
    }

    #[test]
    fn volumes_are_writable_by_default() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap();
        let path = path.to_str().unwrap();
        for (rest, mode) in [
            ("", HostPathMode::Rw),
            (":rw", HostPathMode::Rw),
            (":ro", HostPathMode::Ro),
        ] {
            let mount = directory_volume(&format!("{path}:/data{rest}")).unwrap();
            assert_eq!((mount.mount_path.as_str(), mount.mode), ("/data", mode));
        }
        for (wrong, says) in [
            ("/data", "anonymous volumes"),
            (
                "/nowhere/at/all:/data",
                "-v /nowhere/at/all: no such directory; create it",
            ),
        ] {
            assert!(is_directory(wrong));
            let error = format!("{:#}", directory_volume(wrong).unwrap_err());
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_volume_without_a_slash_has_a_name() {
        for (text, path, ro) in [
            ("cache:/data", "/data", false),
            ("cache:/data:rw", "/data", false),
            ("cache:/data:ro", "/data", true),
        ] {
            assert!(!is_directory(text));
            let mount = volume(text).unwrap();
            assert_eq!(mount.volume.as_str(), "cache");
            assert_eq!((mount.mount_path.as_str(), mount.ro), (path, ro));
            assert_eq!(mount.sub_path, None);
        }
        for (text, ro) in [("v:/d:sub=a/b", false), ("v:/d:ro,sub=a/b", true)] {
            let mount = volume(text).unwrap();
            assert_eq!((mount.sub_path.as_deref(), mount.ro), (Some("a/b"), ro));
        }
        for wrong in [
            "cache",
            "cache:data",
            "cache:/data:x",
            "cache:/data/../b",
            "cache:/data:sub=",
            "cache:/data:sub=../b",
            "cache:/data:sub=/b",
            "cache:/data:ro:sub=b",
        ] {
            assert!(volume(wrong).is_err(), "{wrong}");
        }
        for directory in ["./cache:/data", ".:/data", "~/x:/data", "a/b:/data"] {
            assert!(is_directory(directory), "{directory}");
        }
    }

    #[test]
    fn memory_amounts_are_parsed() {
        for (text, amount) in [
            ("64", 64),
            ("512m", 512),
            ("2g", 2048),
            ("1.5G", 1536),
            ("512MB", 512),
            ("1GiB", 1024),
            ("65536k", 64),
        ] {
            assert_eq!(mebibytes(text).unwrap(), amount, "{text}");
        }
        for text in ["", "0", "m", "x", "5q", "-1", "1e400", "9999999999t"] {
            assert!(mebibytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_variable_has_a_value_or_inherits_it() {
        assert_eq!(variable("A=b=c").unwrap(), ("A".into(), "b=c".into()));
        assert_eq!(variable("PATH").unwrap().1, std::env::var("PATH").unwrap());
        assert!(variable("=x").is_err() && variable("BOXD_TEST_IS_NOT_SET").is_err());
    }

    #[test]
    fn a_target_is_a_box_or_a_command() {
        assert_eq!(target("b"), ("b", None));
        assert_eq!(target("b/c"), ("b", Some("c")));
    }
}
