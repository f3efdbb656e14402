//! What a profile and an operator decide, and what the client reports about it.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};

use super::support::{BOXD, Server, boxd, err, feed, out};

const ANN: &str = "ann-0123456789abcdef0123456789abcdef";
const BOB: &str = "bob-0123456789abcdef0123456789abcdef";

/// A profile with a short timeout and a locked network.
const SMALL: &str =
    r#"[{ name = "small", timeout_sec = 1, max_timeout_sec = 1, locked = ["network"] }]"#;

fn small() -> Server {
    Server::with(tempfile::tempdir().unwrap(), |command| {
        command
            .env("BOXD_POLICY_PROFILES", SMALL)
            .env("BOXD_POLICY_PROFILE", "small");
    })
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn the_timeout_of_a_profile_limits_commands_and_shell_runs_and_is_printed_once() {
    let server = small();
    let request = ["run", "--name", "s", "--timeout", "1000s", "sleep 900"];
    let late = server.run(&request);
    assert_eq!(late.status.code(), Some(124), "{late:?}");
    let stderr_text = "timeout_ms: 1000 instead of 1000000";
    assert_eq!(count(&err(&late), stderr_text), 1, "{late:?}");
    // A command without a timeout gets the limit of the profile.
    let late = server.run(&["exec", "s", "sleep 900"]);
    assert_eq!(late.status.code(), Some(124), "{late:?}");
    assert!(!err(&late).contains("timeout_ms"), "{late:?}");
    // Runs in a shell have the same limit.
    let late = server.run(&["exec", "--shell", "one", "s", "sleep 900"]);
    assert_eq!(late.status.code(), Some(124), "{late:?}");
    let request = [
        "exec",
        "--shell",
        "two",
        "--timeout",
        "1000s",
        "s",
        "sleep 900",
    ];
    let late = server.run(&request);
    assert_eq!(late.status.code(), Some(124), "{late:?}");
    assert_eq!(count(&err(&late), stderr_text), 1, "{late:?}");
    // Within the limit, the client prints nothing about it.
    let soon = server.run(&["exec", "--timeout", "900ms", "s", "echo hi"]);
    assert_eq!((out(&soon).as_str(), err(&soon).as_str()), ("hi\n", ""));
}

#[test]
fn without_a_profile_limit_a_shell_run_gets_its_own_timeout() {
    let server = Server::start();
    server.ok(&["run", "--name", "s", "true"]);
    let request = [
        "exec",
        "--shell",
        "one",
        "--timeout",
        "900s",
        "s",
        "sleep 2; echo done",
    ];
    let ran = server.run(&request);
    assert_eq!((out(&ran).as_str(), err(&ran).as_str()), ("done\n", ""));
}

#[test]
fn a_locked_field_is_reported_on_standard_error_once() {
    let server = small();
    let ran = server.run(&["run", "--network", "on", "echo hi"]);
    assert_eq!(out(&ran), "hi\n", "{ran:?}");
    assert_eq!(
        count(&err(&ran), "network: off instead of on"),
        1,
        "{ran:?}"
    );
    assert_eq!(err(&server.run(&["run", "--network", "off", "true"])), "");
}

#[test]
fn the_servers_user_mounts_readable_directories_except_system_ones() {
    let server = Server::start();
    let workspace = tempfile::tempdir().unwrap();
    std::fs::write(workspace.path().join("file"), "here").unwrap();
    let path = workspace.path().to_str().unwrap();
    let named = ["run", "--name", "x", "--workspace", path, "cat file"];
    assert_eq!(out(&server.run(&named)), "here");
    let once = ["run", "--workspace", path, "cat file"];
    assert_eq!(out(&server.run(&once)), "here");
    for path in ["/etc", "/etc/ssl", "/boot", "/run", "/proc", "/"] {
        for name in [&["--name", "y"][..], &[]] {
            let refused = [&["run"], name, &["--workspace", path, "true"]].concat();
            let refused = server.run(&refused);
            assert_eq!(refused.status.code(), Some(125), "{path}: {refused:?}");
            let stderr_text = err(&refused);
            assert!(
                stderr_text.contains("blocked for security"),
                "{stderr_text}"
            );
        }
    }
}

#[test]
fn a_run_without_a_server_mounts_no_system_directory() {
    for path in ["/etc", "/run", "/boot", "/root"] {
        for option in [["--workspace", path], ["--mount", &format!("{path}:/mnt")]] {
            let refused = feed(boxd().arg("run").args(option).arg("true"), b"");
            assert_eq!(refused.status.code(), Some(125), "{option:?}: {refused:?}");
            assert!(
                err(&refused).contains("blocked for security"),
                "{refused:?}"
            );
        }
    }
}

#[test]
fn each_token_has_its_own_roots_and_the_error_names_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| {
        let path = directory.path().join(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("file"), name).unwrap();
        path
    };
    let (all, hers, other) = (at("all"), at("hers"), at("other"));
    let config = directory.path().join("boxd.toml");
    let tokens = format!(
        "[policy.tokens.ann]\nallowed_host_mount_roots = [{hers:?}]\ndefault_host_workspace = {hers:?}\n"
    );
    std::fs::write(&config, tokens).unwrap();
    let server = Server::with(directory, |command| {
        command
            .env("BOXD_TOKENS", format!("ann {ANN}\nbob {BOB}\n"))
            .args(["--listen", "tcp://127.0.0.1:0", "--config"])
            .arg(&config)
            .arg("--allow-mount")
            .arg(&all);
    });
    let run = |token: &str, more: &[&str]| -> Output {
        let mut command = server.boxd(&["--endpoint", &server.endpoints[0], "run"]);
        feed(
            command.env("BOXD_TOKEN", token).args(more).arg("cat file"),
            b"",
        )
    };
    let mount =
        |token: &str, path: &std::path::Path| run(token, &["--workspace", path.to_str().unwrap()]);
    assert_eq!(out(&mount(ANN, &hers)), "hers");
    assert_eq!(out(&mount(BOB, &all)), "all");
    assert_eq!(out(&run(ANN, &[])), "hers", "the default of this token");
    assert_ne!(out(&run(BOB, &[])), "hers");
    for (token, path) in [(ANN, &all), (ANN, &other), (BOB, &hers), (BOB, &other)] {
        let refused = mount(token, path);
        assert_eq!(refused.status.code(), Some(125), "{refused:?}");
        let remedy = if token == ANN {
            "policy.tokens.ann.allowed_host_mount_roots"
        } else {
            "--allow-mount"
        };
        assert!(err(&refused).contains(remedy), "{refused:?}");
    }
}

/// Connects to the given socket, and prints whether that worked and whether a call is answered.
const CALL: &str = r#"
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
print("connected", flush=True)
server.settimeout(20)
try:
    server.sendall(b'{"jsonrpc":"2.0","id":1,"method":"box.list","params":{}}\n')
    print("answered" if server.recv(1000) else "closed")
except OSError:
    print("closed")
"#;

#[test]
fn a_guest_with_the_id_of_the_servers_user_is_not_served_as_that_user() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("boxd");
    // Copied by another process, because a child of this one could keep the file open for writing.
    let copied = Command::new("cp").arg(BOXD).arg(&program).status();
    assert!(copied.unwrap().success());
    let root = rustix::process::geteuid().is_root();
    let shared = directory.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    if root {
        for path in [directory.path(), &shared] {
            std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
        }
    }
    let ordinary = |program: &OsStr| {
        let mut command = if root {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
            command.arg(program);
            command
        } else {
            Command::new(program)
        };
        command.env_clear().env("PATH", "/usr/bin:/bin");
        command
    };
    let mut serve = ordinary(program.as_os_str());
    serve.args(["serve", "--state-dir"]);
    serve.arg(directory.path().join("state"));
    let listen = format!("unix:{}", shared.join("boxd.sock").display());
    serve.args(["--listen", &listen]);
    let mut child = serve.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut ready = BufReader::new(child.stdout.take().unwrap());
    ready.read_line(&mut line).unwrap();
    let endpoint = line.trim().strip_prefix("boxd ready ").unwrap().to_owned();
    // The server ends with the test.
    let server = Server {
        child,
        endpoints: vec![endpoint],
        directory,
    };
    let socket = server.endpoints[0].strip_prefix("unix:").unwrap();
    let outside = feed(
        ordinary(OsStr::new("python3")).args(["-c", CALL, socket]),
        b"",
    );
    let answered = "connected\nanswered\n";
    assert_eq!(out(&outside), answered, "control: {outside:?}");
    let mut run = ordinary(program.as_os_str());
    run.args(["--endpoint", &server.endpoints[0], "run", "--name", "b"]);
    run.arg("--workspace").arg(&shared);
    run.args(["--", "python3", "-c", CALL, "boxd.sock"]);
    let inside = feed(&mut run, b"");
    assert_eq!(out(&inside), "connected\nclosed\n", "{inside:?}");
}

#[test]
fn a_table_for_an_unknown_token_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("boxd.toml");
    let check = |name: &str| {
        let table = format!("[policy.tokens.{name}]\nallowed_host_mount_roots = [\"/srv\"]\n");
        std::fs::write(&config, table).unwrap();
        let mut command = boxd();
        command.env("BOXD_TOKENS", format!("ann {ANN}\n"));
        feed(
            command.args(["config", "check", "--config"]).arg(&config),
            b"",
        )
    };
    let known = check("ann");
    assert!(known.status.success(), "control: {known:?}");
    let refused = check("anne");
    let expected = "policy.tokens.anne: unknown token name";
    assert!(!refused.status.success(), "{refused:?}");
    assert!(err(&refused).contains(expected), "{refused:?}");
    let mut serve = boxd();
    serve.env("BOXD_TOKENS", format!("ann {ANN}\n"));
    serve
        .args(["serve", "--state-dir"])
        .arg(directory.path().join("state"));
    let refused = feed(serve.arg("--config").arg(&config), b"");
    assert!(err(&refused).contains(expected), "{refused:?}");
}

#[test]
fn a_state_directory_or_a_token_file_of_another_user_is_refused() {
    use std::os::unix::fs::chown;
    if !rustix::process::geteuid().is_root() {
        // Only root can change the owner of a file.
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (state, tokens) = (
        directory.path().join("state"),
        directory.path().join("tokens"),
    );
    std::fs::create_dir(&state).unwrap();
    std::fs::write(&tokens, format!("ann {ANN}\n")).unwrap();
    let chmod = |mode| {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&tokens, mode).unwrap();
    };
    chmod(0o600);
    let serve = || {
        let mut command = boxd();
        command.arg("serve").arg("--state-dir").arg(&state);
        feed(command.arg("--token-file").arg(&tokens), b"")
    };
    chown(&tokens, Some(65534), None).unwrap();
    let refused = serve();
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    let stderr_text = err(&refused);
    assert!(
        stderr_text.contains("token file") && stderr_text.contains("owned by user 65534"),
        "{stderr_text}"
    );
    chown(&tokens, Some(0), None).unwrap();
    chown(&state, Some(65534), None).unwrap();
    let stderr_text = err(&serve());
    assert!(
        stderr_text.contains("state directory") && stderr_text.contains("owned by user 65534"),
        "{stderr_text}"
    );
    chown(&state, Some(0), None).unwrap();
    std::fs::write(state.join("url.key"), [7; 64]).unwrap();
    chown(state.join("url.key"), Some(65534), None).unwrap();
    let stderr_text = err(&serve());
    assert!(
        stderr_text.contains("url.key") && stderr_text.contains("owned by user 65534"),
        "{stderr_text}"
    );
}

#[test]
fn the_servers_private_paths_are_not_mounted() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    let beside = root.join("beside");
    std::fs::create_dir(&beside).unwrap();
    std::os::unix::fs::symlink(&root, beside.join("up")).unwrap();
    let server = Server::with(directory, |command| {
        // Refused even where the operator allows the path.
        command.arg("--allow-mount").arg(&root);
    });
    assert!(root.join("state/url.key").exists());
    let mount = |path: &std::path::Path| {
        let path = path.to_str().unwrap();
        let read = "cat state/url.key url.key";
        server.run(&["run", "--name", "b", "--workspace", path, read])
    };
    let boxes = root.join("state/boxes");
    std::fs::create_dir_all(&boxes).unwrap();
    for path in [&root, &root.join("state"), &beside.join("up"), &boxes] {
        let refused = mount(path);
        assert_eq!(refused.status.code(), Some(125), "{path:?}: {refused:?}");
        let stderr_text = err(&refused);
        assert!(
            stderr_text.contains("host_path: the directory contains private files of the server"),
            "{stderr_text}"
        );
        assert!(
            !stderr_text.contains(root.to_str().unwrap()),
            "no path of the host: {stderr_text}"
        );
    }
    let path = beside.to_str().unwrap();
    let allowed = server.run(&["run", "--workspace", path, "--name", "c", "ls"]);
    assert_eq!(out(&allowed), "up\n", "{allowed:?}");
}
