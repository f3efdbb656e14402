//! How the client finds a server, and what it reports without one.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;

use super::support::{Server, boxd, err, feed, out};

#[test]
fn the_client_finds_the_configured_server() {
    let dir = tempfile::tempdir().unwrap();
    let (state, file) = (dir.path().join("elsewhere"), dir.path().join("boxd.toml"));
    std::fs::write(&file, format!("[server]\nstate_dir = {state:?}\n")).unwrap();
    let mut command = boxd();
    command.env("BOXD_CONFIG", &file).arg("serve");
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    let mut ps = boxd();
    let listed = feed(ps.env("BOXD_CONFIG", &file).args(["ps", "-q"]), b"");
    let mut run = boxd();
    run.args(["run", "--name", "s", "--config"]).arg(&file);
    let ran = feed(run.arg("echo ran"), b"");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    child.wait().unwrap();
    assert!(listed.status.success(), "{listed:?}");
    assert_eq!(out(&ran), "ran\n", "{ran:?}");
}

#[test]
fn a_rejected_client_gets_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let tokens = directory.path().join("tokens");
    std::fs::write(&tokens, format!("ann {}\n", "a".repeat(32))).unwrap();
    std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(0o600)).unwrap();
    let server = Server::with(directory, |command| {
        command.args([
            "--http",
            "127.0.0.1:0",
            "--listen",
            "ws://127.0.0.1:0/rpc/ws",
        ]);
        command.args(["--listen", "ws://127.0.0.2:0/rpc/ws", "--token-file"]);
        command.arg(&tokens);
    });
    let at = |path: usize| {
        let endpoint = server.endpoints[path].clone();
        move |token: Option<&str>| {
            let mut command = boxd();
            if let Some(token) = token {
                command.env("BOXD_TOKEN", token);
            }
            feed(command.args(["--endpoint", &endpoint, "ps", "-q"]), b"")
        }
    };
    let (right, wrong) = ("a".repeat(32), "b".repeat(32));
    for path in 0..2 {
        let ps = at(path);
        // Also at a loopback address that is neither localhost nor 127.0.0.1.
        let listed = ps(Some(&right));
        assert!(listed.status.success(), "{listed:?}");
        for token in [None, Some(wrong.as_str())] {
            let stderr_text = err(&ps(token));
            assert!(
                stderr_text.contains("--token FILE or BOXD_TOKEN"),
                "{stderr_text}"
            );
        }
    }
    let http = server
        .endpoints
        .iter()
        .find(|text| text.starts_with("http"));
    let http = http.unwrap().replace("http://", "ws://");
    let endpoint = format!("{}/rpc/ws", http.trim_end_matches('/'));
    for (endpoint, token, why) in [
        (endpoint.clone(), &wrong, "--token FILE or BOXD_TOKEN"),
        (
            endpoint.replace("/rpc/ws", "/nowhere"),
            &right,
            "check the path",
        ),
        (
            "tcp://127.0.0.1:1".to_owned(),
            &right,
            "no listener at this address",
        ),
    ] {
        let mut command = boxd();
        command.env("BOXD_TOKEN", token);
        let stderr_text = err(&feed(command.args(["--endpoint", &endpoint, "ps"]), b""));
        assert!(stderr_text.contains(why), "{endpoint}: {stderr_text}");
    }
}
