//! `boxd doctor` and the bare program: output and exit codes, as root and as an ordinary user.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use box_protocol::BoxProfile;
use serde_json::Value;
use tempfile::TempDir;

/// The ordinary user of tests that run as root.
const ORDINARY_USER: u32 = 65534;

const REQUIRED: [&str; 8] = [
    "namespace.user",
    "namespace.pid",
    "namespace.mount",
    "namespace.net",
    "namespace.uts",
    "namespace.ipc",
    "namespace.cgroup",
    "seccomp",
];
const OPTIONAL: [&str; 13] = [
    "landlock",
    "overlay",
    "overlay.workspace",
    "two_uids",
    "cgroup.memory",
    "cgroup.pids",
    "cgroup.cpu",
    "cgroup.cpu_usage",
    "cgroup.freeze",
    "cgroup.io",
    "disk.limit",
    "network",
    "network.connect_errors",
];

/// Copies the program to a directory that an ordinary user can read. A build directory may not be.
fn program() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("boxd");
    // Copied by another process, because a child of this one could keep the file open for writing.
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_boxd"))
        .arg(&program)
        .status();
    assert!(copied.unwrap().success());
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    (dir, program)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The users of these tests: their names in a report, and their ids if they differ from the current
/// user.
fn users() -> Vec<(&'static str, Option<u32>)> {
    if is_root() {
        vec![("root", None), ("an ordinary user", Some(ORDINARY_USER))]
    } else {
        vec![("an ordinary user", None)]
    }
}

fn as_user(program: &Path, user: Option<u32>) -> Command {
    let mut command = Command::new(program);
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    command.current_dir("/");
    command
}

fn output(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let stderr_text = String::from_utf8_lossy(&output.stderr);
    assert!(stderr_text.is_empty(), "{stderr_text}");
    output
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The names of the primitives that are present, or of those that are not.
fn primitives(report: &Value, present: bool) -> Vec<&str> {
    let all = report["primitives"].as_array().unwrap().iter();
    all.filter(|primitive| primitive["present"] == present)
        .map(|primitive| primitive["name"].as_str().unwrap())
        .collect()
}

#[test]
fn doctor_reports_primitives_and_profiles_as_json() {
    let (_dir, program) = program();
    for (name, user) in users() {
        let output = output(as_user(&program, user).args(["doctor", "--json"]));
        assert_eq!(output.status.code(), Some(0), "{name}");
        let report = json(&output);
        assert_eq!(
            (&report["boxes"], &report["user"]),
            (&true.into(), &name.into())
        );
        assert_eq!(
            (&report["rootfs"], report.get("error")),
            (&"host".into(), None)
        );

        let (there, absent) = (primitives(&report, true), primitives(&report, false));
        let mut all = [there.clone(), absent.clone()].concat();
        let mut known = [&REQUIRED[..], &OPTIONAL[..]].concat();
        all.sort_unstable();
        known.sort_unstable();
        assert_eq!(all, known);
        assert!(
            REQUIRED.iter().all(|name| there.contains(name)),
            "{absent:?}"
        );
        assert_eq!(there.contains(&"two_uids"), name == "root");
        assert_eq!(there.contains(&"disk.limit"), name == "root");
        let disk = report["disk"].as_str().unwrap();
        let kind = if name == "root" {
            "a file system in a file"
        } else {
            "a directory that the runtime measures"
        };
        assert!(disk.starts_with(kind), "{name}: {disk}");
        assert_eq!(there.contains(&"landlock"), report["landlock"] != 0);

        let profiles = report["profiles"].as_array().unwrap();
        let names: Vec<_> = profiles.iter().map(|profile| &profile["name"]).collect();
        assert_eq!(names, BoxProfile::BUILT_IN);
        for profile in profiles {
            let network = profile["network"] == "on";
            let mut missing: Vec<&str> = strings(&profile["missing"]);
            let mut expected = absent.clone();
            expected.retain(|name| network || *name != "network");
            expected.retain(|name| *name != "network.connect_errors");
            // No disk limit is configured.
            expected.retain(|name| *name != "cgroup.io");
            // No profile has a disk or an overlay workspace.
            expected.retain(|name| !["disk.limit", "overlay.workspace"].contains(name));
            missing.sort_unstable();
            expected.sort_unstable();
            assert_eq!(missing, expected, "{profile}");
            // No built-in profile is strict.
            let reaches = !network || there.contains(&"network");
            assert_eq!(profile["boxes"], reaches, "{profile}");
            assert!(profile["memory_mb"].as_u64() > Some(0), "{profile}");
        }
    }
}

fn strings(list: &Value) -> Vec<&str> {
    let list = list.as_array().unwrap().iter();
    list.map(|name| name.as_str().unwrap()).collect()
}

#[test]
fn doctor_reports_the_same_as_text() {
    let (_dir, program) = program();
    for (name, user) in users() {
        let report = json(&output(as_user(&program, user).args(["doctor", "--json"])));
        let output = output(as_user(&program, user).arg("doctor"));
        assert_eq!(output.status.code(), Some(0));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            text.starts_with(&format!("This machine can run boxes as {name}.")),
            "{text}"
        );
        for (present, mark) in [(true, "yes"), (false, "no")] {
            for primitive in primitives(&report, present) {
                let line = format!("  {mark:<8} {primitive} ");
                assert!(text.contains(&line), "{line}: {text}");
            }
        }
        let disk = format!("Disks (--disk-mb): {}.", report["disk"].as_str().unwrap());
        assert!(text.contains(&disk), "{text}");
        for profile in BoxProfile::BUILT_IN {
            assert!(
                text.contains(&format!("\n  {profile} ")),
                "{profile}: {text}"
            );
        }
    }
}

#[test]
fn doctor_fails_and_names_missing_features() {
    let (_dir, program) = program();
    let user = is_root().then_some(ORDINARY_USER);
    let doctor = |script: &str, json: &[&str]| {
        let mut command = as_user(Path::new("/usr/bin/unshare"), user);
        command.args(["--user", "--map-root-user", "/bin/sh", "-c"]);
        command.arg(format!("{script}; exec \"$0\" doctor \"$@\""));
        output(command.arg(&program).args(json))
    };
    let control = doctor("true", &["--json"]);
    assert_eq!(control.status.code(), Some(0));
    let none = "echo 0 > /proc/sys/user/max_net_namespaces";
    let output = doctor(none, &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = json(&output);
    assert_eq!(report["boxes"], false);
    let error = report["error"].as_str().unwrap();
    assert!(error.contains("namespace.net"), "{error}");
    assert!(primitives(&report, false).contains(&"namespace.net"));
    for profile in report["profiles"].as_array().unwrap() {
        assert_eq!(profile["boxes"], false, "{profile}");
        assert!(strings(&profile["missing"]).contains(&"namespace.net"));
    }
    let output = doctor(none, &[]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("This machine cannot run boxes"), "{text}");
    assert!(text.contains("  MISSING  namespace.net "), "{text}");
}

#[test]
fn version_names_the_program_and_the_contract() {
    let (_dir, program) = program();
    for (_, user) in users() {
        let output = output(as_user(&program, user).arg("version"));
        assert_eq!(output.status.code(), Some(0));
        let text = String::from_utf8(output.stdout).unwrap();
        let begins = format!("boxd {} (", env!("CARGO_PKG_VERSION"));
        assert!(text.starts_with(&begins), "{text}");
        let contract = format!("\nagent contract {}\n", box_agent::CONTRACT);
        assert!(text.ends_with(&contract), "{text}");
    }
}

#[test]
fn commands_that_print_exit_silently_on_a_closed_pipe() {
    let (_dir, program) = program();
    for arguments in [
        &["doctor"][..],
        &["doctor", "--json"],
        &["version"],
        &["config", "example"],
    ] {
        // The reader is closed first, so that the program cannot write in time.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(&program)
            .args(arguments)
            .stdout(writer)
            .output()
            .unwrap();
        let stderr_text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            (output.status.code(), &*stderr_text),
            (Some(141), ""),
            "{arguments:?}"
        );
    }
}

#[test]
fn unknown_arguments_end_with_the_exit_code_of_usage_errors() {
    let (_dir, program) = program();
    for arguments in [&["doctr"][..], &["doctor", "--jsn"], &[]] {
        let output = Command::new(&program).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
}

#[test]
fn doctor_recognises_an_unprivileged_container() {
    if !is_root() {
        // The boxes of this user do not need the primitive that is removed here.
        return;
    }
    let script = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec \"$0\" \"$@\"";
    let boxd = env!("CARGO_BIN_EXE_boxd");
    let mut command = Command::new("unshare");
    let command = command.args(["-m", "sh", "-c", script, boxd, "run", "true"]);
    let refused = command.output().unwrap();
    let stderr_text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(125), "{stderr_text}");
    assert!(
        stderr_text.contains("an unprivileged container"),
        "{stderr_text}"
    );
}
