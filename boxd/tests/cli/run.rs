//! `boxd run` alone: without a server and without a configuration.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use super::support::{BOXD, Server, boxd, err, feed, mark, out, running};

fn run(arguments: &[&str]) -> std::process::Output {
    feed(boxd().arg("run").args(arguments), b"")
}

#[test]
fn run_forwards_streams_and_the_exit_code() {
    let ran = run(&["echo out; echo err >&2; hostname; exit 7"]);
    assert_eq!(ran.status.code(), Some(7), "{ran:?}");
    assert!(
        out(&ran).starts_with("out\n") && err(&ran) == "err\n",
        "{ran:?}"
    );
    assert_ne!(
        out(&ran).lines().nth(1).unwrap(),
        out(&Command::new("hostname").output().unwrap()).trim()
    );
}

#[test]
fn an_argument_vector_runs_without_a_shell_and_reads_stdin() {
    let ran = run(&["--", "printf", "%s|", "a b", "$HOME"]);
    assert_eq!(out(&ran), "a b|$HOME|");
    let data: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    let ran = feed(boxd().args(["run", "--", "cat"]), &data);
    assert!(ran.status.success());
    assert!(ran.stdout == data, "every byte is returned");
    // A command that reads nothing ends all the same.
    assert!(feed(boxd().args(["run", "true"]), &data).status.success());
}

#[test]
fn timeouts_signals_and_failed_starts_have_specific_exit_codes() {
    let late = run(&["--timeout", "300ms", "sleep 100"]);
    assert_eq!(late.status.code(), Some(124));
    let stderr_text = "boxd: command timed out; raise --timeout\n";
    assert_eq!(err(&late), stderr_text);
    assert_eq!(run(&["kill -9 $$"]).status.code(), Some(137));
    assert_eq!(run(&["--", "/no/such/program"]).status.code(), Some(127));
    assert_eq!(run(&["--", "/etc/passwd"]).status.code(), Some(126));
}

#[test]
fn a_closed_output_pipe_ends_the_program_silently() {
    for json in [&[][..], &["--json"]] {
        let mut endless = boxd();
        endless.args(json).args(["run", "yes"]);
        let mut child = endless
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut some = [0; 1000];
        let mut reader = child.stdout.take().unwrap();
        reader.read_exact(&mut some).unwrap();
        drop(reader);
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(141), "{ended:?}");
        assert_eq!(err(&ended), "");
    }
}

#[test]
fn workspace_and_mounts_are_mounted() {
    let (workspace, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(workspace.path().join("in"), "from outside").unwrap();
    std::fs::write(other.path().join("data"), "more").unwrap();
    let mount = format!("{}:/data", other.path().display());
    let ran = run(&[
        "--workspace",
        workspace.path().to_str().unwrap(),
        "--mount",
        &mount,
        "cat in; echo made > out; cat /data/data; touch /data/x || echo kept",
    ]);
    assert_eq!(out(&ran), "from outsidemorekept\n", "{ran:?}");
    assert_eq!(
        std::fs::read_to_string(workspace.path().join("out")).unwrap(),
        "made\n"
    );
    let read_only = format!("{}:ro", workspace.path().display());
    assert_ne!(
        run(&["--workspace", &read_only, "touch x"]).status.code(),
        Some(0)
    );
}

#[test]
fn limits_variables_and_directories_apply() {
    let ran = feed(
        boxd().env("NOT_PASSED_ON", "1").args([
            "run",
            "-e",
            "A=b c",
            "-e",
            "PATH",
            "-w",
            "/tmp",
            "--memory-mb",
            "64",
            "--pids",
            "32",
            "echo $A; pwd; env | grep -c NOT_PASSED",
        ]),
        b"",
    );
    assert_eq!(out(&ran), "b c\n/tmp\n0\n", "{ran:?}");
    let allocation = run(&[
        "--memory-mb",
        "64",
        "--",
        "python3",
        "-c",
        "x = b'x' * (256 << 20)",
    ]);
    assert_ne!(allocation.status.code(), Some(0));
    // The cgroup kills it. Without a cgroup, the limit of the process itself refuses the memory.
    let stderr_text = err(&allocation);
    assert!(
        stderr_text.contains("raise --memory-mb") || stderr_text.contains("MemoryError"),
        "{stderr_text}"
    );
    assert_eq!(
        run(&[
            "--memory-mb",
            "512",
            "--",
            "python3",
            "-c",
            "x = b'x' * (256 << 20)"
        ])
        .status
        .code(),
        Some(0),
        "control"
    );
}

#[test]
fn invalid_options_name_the_remedy() {
    let refused = |arguments: &[&str]| {
        let ran = run(arguments);
        assert!(!ran.status.success(), "{ran:?}");
        err(&ran)
    };
    assert!(refused(&["--workspace", "/nowhere", "true"]).contains("/nowhere"));
    assert!(refused(&["--profile", "nope", "true"]).contains("nope"));
    assert!(refused(&["--cpus", "0", "true"]).contains("cpus: must be greater than 0"));
    assert!(
        refused(&["-e", "BOXD_NOT_SET_AT_ALL", "true"]).contains("not set in this environment")
    );
    assert!(refused(&[]).contains("Usage"));
    let words = refused(&["echo", "hi"]);
    assert!(words.contains("-- echo hi"), "{words}");
    assert!(refused(&["--timeout", "soon", "true"]).contains("unknown time unit"));
    let directory = tempfile::tempdir().unwrap();
    let empty_dir = feed(
        boxd()
            .env("XDG_STATE_HOME", directory.path())
            .env("BOXD_ENDPOINT", "unix:/nowhere/at/all")
            .args(["run", "--name", "s", "true"]),
        b"",
    );
    assert_eq!(empty_dir.status.code(), Some(125));
    let stderr_text = err(&empty_dir);
    assert!(
        stderr_text.contains("no server at unix:/nowhere/at/all: no such socket"),
        "{stderr_text}"
    );
    let mut usual = boxd();
    usual.env("BOXD_SERVER_STATE_DIR", directory.path());
    let empty_dir = feed(usual.args(["run", "--name", "s", "true"]), b"");
    assert!(
        err(&empty_dir).contains("start one with `boxd serve`"),
        "{}",
        err(&empty_dir)
    );
}

#[test]
fn json_output_has_one_object_per_line() {
    let ran = feed(
        boxd().args(["--json", "run", "echo out; sleep 0.2; echo err >&2; exit 3"]),
        b"",
    );
    assert_eq!(ran.status.code(), Some(3));
    assert_eq!(err(&ran), "");
    let lines: Vec<serde_json::Value> = out(&ran)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    for (line, stream, text) in [
        (&lines[0], "stdout", "out\n"),
        (&lines[1], "stderr", "err\n"),
    ] {
        assert_eq!(
            (&line["stream"], &line["text"]),
            (&stream.into(), &text.into())
        );
        assert_eq!(line["offset"], 0);
    }
    assert_eq!(lines[2]["exit"]["code"], 3);
    let refused = feed(
        boxd().args(["run", "--json", "--memory-mb", "1", "true"]),
        b"",
    );
    assert_eq!(
        (refused.status.code(), out(&refused).as_str()),
        (Some(125), "")
    );
    for arguments in [
        &["--json", "nonsense"][..],
        &["run", "--json", "--cpus", "x"],
    ] {
        let refused = feed(boxd().args(arguments), b"");
        assert_eq!(refused.status.code(), Some(2));
        let error: serde_json::Value = serde_json::from_str(&err(&refused)).unwrap();
        assert_eq!(error["error"]["code"], "validation", "{error}");
    }
    let empty_dir = feed(
        boxd().args(["--json", "--endpoint", "unix:/nowhere/at/all", "ps"]),
        b"",
    );
    let error: serde_json::Value = serde_json::from_str(&err(&empty_dir)).unwrap();
    assert_eq!(error["error"]["code"], "unavailable", "{error}");
    let error: serde_json::Value = serde_json::from_str(&err(&refused)).unwrap();
    assert_eq!(error["error"]["code"], "validation");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("is below the minimum of 32"), "{message}");
}

#[test]
fn a_run_without_a_server_is_configured_like_a_server() {
    let off = feed(
        boxd()
            .env("BOXD_POLICY_ENABLED", "false")
            .args(["run", "true"]),
        b"",
    );
    assert!(
        err(&off).contains("policy.enabled: boxes are disabled; set it to true"),
        "{off:?}"
    );
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("boxd.toml");
    std::fs::write(&file, "[policy]\nprofile = \"offline_readonly\"\n").unwrap();
    let small = feed(
        boxd()
            .args(["run", "--config"])
            .arg(&file)
            .arg("nproc; ulimit -u"),
        b"",
    );
    assert!(small.status.success(), "{small:?}");
    std::fs::write(&file, "[policy]\nprofil = \"x\"\n").unwrap();
    let wrong = feed(boxd().env("BOXD_CONFIG", &file).args(["run", "true"]), b"");
    assert!(
        err(&wrong).contains("did you mean policy.profile?"),
        "{wrong:?}"
    );
}

#[test]
fn variables_that_are_not_utf8_matter_only_if_used() {
    use std::os::unix::ffi::OsStrExt as _;
    let odd = std::ffi::OsStr::from_bytes(b"\xff");
    let ran = feed(boxd().env("ODD", odd).args(["run", "echo hi"]), b"");
    assert_eq!((out(&ran).as_str(), err(&ran).as_str()), ("hi\n", ""));
    let passed = feed(
        boxd().env("ODD", odd).args(["run", "-e", "ODD", "true"]),
        b"",
    );
    assert!(
        err(&passed).contains("--env ODD: the value is not UTF-8"),
        "{passed:?}"
    );
    for (name, command) in [
        ("BOXD_LOG_LEVEL", "run true"),
        ("BOXD_LOG_LEVEL", "config show"),
        ("BOXD_TOKENS", "serve --http 127.0.0.1:0"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut refused = boxd();
        refused
            .env(name, odd)
            .env("XDG_STATE_HOME", dir.path())
            .args(command.split(' '));
        if command.starts_with("serve") {
            refused.arg("--state-dir").arg(dir.path());
        }
        let refused = feed(&mut refused, b"");
        assert_eq!(refused.status.code(), Some(125), "{command}: {refused:?}");
        assert!(
            err(&refused).contains(&format!("{name}: not UTF-8")),
            "{command}: {refused:?}"
        );
    }
}

#[test]
fn a_named_box_is_kept_and_reused() {
    let server = Server::start();
    server.ok(&["run", "--name", "work", "echo kept > /tmp/f"]);
    assert_eq!(
        server.ok(&["run", "--name", "work", "cat /tmp/f"]),
        "kept\n"
    );
    let other = server.run(&["run", "--name", "work", "--memory-mb", "100", "true"]);
    assert!(err(&other).contains("memory_mb"), "{other:?}");
    // A box that was made with options is reused without them.
    let made = ["run", "--name", "small", "--memory-mb", "128"];
    server.ok(&[&made[..], &["--network", "on", "touch /tmp/f"]].concat());
    server.ok(&["run", "--name", "small", "test -e /tmp/f"]);
    server.ok(&[&made[..], &["test -e /tmp/f"]].concat());
    let other = server.run(&["run", "--name", "small", "--memory-mb", "129", "true"]);
    assert!(
        err(&other).contains("has 128, not 129; omit memory_mb"),
        "{other:?}"
    );
    server.ok(&["rm", "small"]);
    // Without a name, the box ends with its command.
    server.ok(&["run", "true"]);
    assert_eq!(server.ok(&["ps", "--quiet"]), "work\n");
}

#[test]
fn a_reused_box_keeps_its_workspace_and_mounts() {
    let shared = tempfile::tempdir().unwrap();
    let real = shared.path().canonicalize().unwrap();
    std::fs::write(real.join("f"), "shared\n").unwrap();
    let server = Server::with(tempfile::tempdir().unwrap(), |command| {
        command.env("BOXD_POLICY_ALLOWED_HOST_MOUNT_ROOTS", &real);
    });
    let real = real.to_str().unwrap();
    let mount = format!("{real}:/data");
    let made = ["run", "--name", "b", "--workspace", real];
    server.ok(&[&made[..], &["--mount", &mount, "true"]].concat());
    let both = "cat /workspace/f /data/f";
    assert_eq!(server.ok(&["run", "--name", "b", both]), "shared\nshared\n");
    assert_eq!(
        server.ok(&[&made[..], &[both]].concat()),
        "shared\nshared\n"
    );
    let other = server.run(&["run", "--name", "b", "--workspace", "/usr", "true"]);
    assert!(err(&other).contains("conflict"), "{other:?}");
}

#[test]
fn profile_is_refused_with_a_server() {
    let server = Server::start();
    for with in [&["--name", "b"][..], &[]] {
        let arguments = [
            &["run", "--profile", "offline_readonly"][..],
            with,
            &["true"],
        ]
        .concat();
        let refused = server.run(&arguments);
        assert_eq!(refused.status.code(), Some(125), "{refused:?}");
        assert!(err(&refused).contains("--profile"), "{refused:?}");
    }
    assert_eq!(server.ok(&["ps", "-q"]), "");
}

#[test]
fn a_missing_image_is_an_error() {
    let server = Server::start();
    let arguments = [
        "run",
        "--image",
        "ubuntu:24.04",
        "--pull",
        "never",
        "echo ran",
    ];
    // Without a server, and on a server.
    let embedded = boxd()
        .env("BOXD_SERVER_STATE_DIR", server.directory.path().join("own"))
        .args(arguments)
        .output();
    for refused in [embedded.unwrap(), server.run(&arguments)] {
        assert_eq!(
            (out(&refused).as_str(), refused.status.code()),
            ("", Some(125))
        );
        let message =
            "not_found: image: `ubuntu:24.04` is not on this machine; pull or import it first";
        assert!(err(&refused).contains(message), "{refused:?}");
    }
    assert_eq!(server.ok(&["ps", "-q"]), "");
}

#[test]
fn nothing_is_left_after_a_run_that_is_killed() {
    let sleeps = mark();
    let script = format!("exec sleep {sleeps}");
    let mut child = boxd().args(["run", &script]).spawn().unwrap();
    box_test_wait::blocking::eventually("it runs", || running(&sleeps) == 1);
    child.kill().unwrap();
    child.wait().unwrap();
    box_test_wait::blocking::eventually("it is gone", || running(&sleeps) == 0);
}

/// Runs the program as an ordinary user if the tests run as root. Otherwise every other test here
/// does that.
fn as_an_ordinary_user(arguments: &[&str]) -> Option<std::process::Output> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = directory.path().join("boxd");
    // Copied by another process, because the fork of a thread would keep the copy open for writing.
    assert!(
        Command::new("cp")
            .arg(BOXD)
            .arg(&program)
            .status()
            .unwrap()
            .success()
    );
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command
        .arg(&program)
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/bin:/bin");
    Some(command.output().unwrap())
}

#[test]
fn an_ordinary_user_needs_no_configuration() {
    let Some(ran) = as_an_ordinary_user(&["run", "id -un; exit 5"]) else {
        return;
    };
    assert_eq!(
        (out(&ran).as_str(), ran.status.code()),
        ("box\n", Some(5)),
        "{ran:?}"
    );
}

#[test]
fn limits_that_are_not_enforced_are_named_once_and_strict_refuses_them() {
    // Missing primitives differ between machines and users, and `doctor` reports them.
    for ordinary in [false, true] {
        let run = |arguments: &[&str]| {
            if ordinary {
                as_an_ordinary_user(arguments)
            } else {
                Some(feed(boxd().args(arguments), b""))
            }
        };
        let Some(doctor) = run(&["--json", "doctor"]) else {
            continue;
        };
        let doctor: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
        let missing: Vec<&str> = doctor["primitives"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|primitive| primitive["present"] == false)
            .map(|primitive| primitive["name"].as_str().unwrap())
            .collect();
        let not_kept: Vec<&str> = ["cgroup.cpu", "cgroup.memory"]
            .into_iter()
            .filter(|name| missing.contains(name))
            .collect();
        let ran = run(&["run", "--cpus", "0.5", "--", "echo", "ran"]).unwrap();
        assert_eq!(out(&ran), "ran\n", "{ran:?}");
        let stderr_text = err(&ran);
        assert_eq!(
            stderr_text.lines().count(),
            usize::from(!not_kept.is_empty())
        );
        for name in &not_kept {
            assert!(stderr_text.contains(name), "{stderr_text}");
        }
        let strict = run(&["run", "--strict", "--", "echo", "ran"]).unwrap();
        // A box has these primitives only on request.
        let asked_for = [
            "network",
            "network.connect_errors",
            "cgroup.io",
            "disk.limit",
            "overlay.workspace",
        ];
        let lacking = missing.iter().any(|name| !asked_for.contains(name));
        assert_eq!(strict.status.success(), !lacking, "{missing:?} {strict:?}");
        assert_eq!(out(&strict), if lacking { "" } else { "ran\n" });
        for name in &not_kept {
            assert!(err(&strict).contains(name), "{strict:?}");
        }
    }
}

#[test]
fn a_disk_without_a_limit_is_named_and_strict_refuses_it() {
    let plain = ["run", "--", "echo", "ran"];
    let disk = ["run", "--disk-mb", "1g", "--", "echo", "ran"];
    let Some(ran) = as_an_ordinary_user(&disk) else {
        return;
    };
    assert_eq!(out(&ran), "ran\n", "{ran:?}");
    assert!(err(&ran).contains("disk.limit"), "{ran:?}");
    let ran = as_an_ordinary_user(&plain).unwrap();
    assert!(!err(&ran).contains("disk.limit"), "control: {ran:?}");
    let strict = ["run", "--strict", "--disk-mb", "1g", "--", "echo", "ran"];
    let refused = as_an_ordinary_user(&strict).unwrap();
    assert_eq!(out(&refused), "", "{refused:?}");
    assert!(err(&refused).contains("disk.limit"), "{refused:?}");
    // Root's disks have a limit.
    let ran = feed(boxd().args(disk), b"");
    assert_eq!(out(&ran), "ran\n", "{ran:?}");
    assert!(!err(&ran).contains("disk.limit"), "{ran:?}");
}

#[test]
fn a_disk_is_as_large_as_asked_and_the_box_lives_when_it_is_full() {
    let text = "df --output=size -BM /tmp | tail -n 1; \
        head -c 800m /dev/zero > /tmp/big || rm /tmp/big; echo lives";
    let ran = feed(boxd().args(["run", "--disk-mb", "600m", text]), b"");
    if rustix::process::geteuid().is_root() {
        let text = out(&ran);
        let words: Vec<_> = text.split_whitespace().collect();
        let size = words[0].trim_end_matches('M').parse::<u64>().unwrap();
        assert!((570..=600).contains(&size), "{ran:?}");
        assert_eq!(words[1], "lives");
        assert!(err(&ran).contains("No space left"), "{ran:?}");
    } else {
        assert!(err(&ran).contains("disk_mb"), "{ran:?}");
    }
}
