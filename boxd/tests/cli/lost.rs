//! A foreground command whose server dies: it lives, and is read on from the next server.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::support::Server;

fn begun(server: &Server, text: &str) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = server
        .boxd(&["exec", "b", text])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "first\n");
    (child, out)
}

/// Kills the server and starts another in its place.
fn next(mut server: Server) -> Server {
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
    Server::with(directory, |_| {})
}

#[test]
fn a_command_is_read_on_and_told_what_is_typed_after_its_server_was_killed() {
    let server = Server::start();
    server.ok(&["run", "--session", "b", "true"]);
    let (mut child, mut out) = begun(&server, "echo first; read line; echo got $line; exit 7");
    let server = next(server);
    child.stdin.take().unwrap().write_all(b"typed\n").unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    let mut told = String::new();
    let mut err = child.stderr.take().unwrap();
    err.read_to_string(&mut told).unwrap();
    assert_eq!(
        (rest.as_str(), child.wait().unwrap().code()),
        ("got typed\n", Some(7)),
        "{told}"
    );
    let lost = told.find("lost the connection to the server");
    let back = told.find("reconnected to the server");
    assert!(lost.is_some() && lost < back, "{told}");
    drop(server);
}

#[test]
fn a_command_ends_with_the_program_that_waits_for_it() {
    let server = Server::start();
    server.ok(&["run", "--session", "b", "true"]);
    let (mut child, _out) = begun(&server, "echo first; sleep 1000");
    child.kill().unwrap();
    child.wait().unwrap();
    // A server may take a while to notice that a peer is gone.
    let begun = Instant::now();
    loop {
        let commands = server.json(&["ps", "b"]);
        let commands = commands.as_array().unwrap();
        if commands.iter().all(|info| info["state"] == "exited") {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(90), "{commands:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
