//! A foreground command whose server is killed: it survives, and the client resumes at the next
//! server.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use box_test_wait::blocking::eventually;

use super::support::Server;

fn start(server: &Server, text: &str) -> (Child, BufReader<std::process::ChildStdout>) {
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

/// Kills the server and starts its successor.
fn restart(server: Server) -> Server {
    Server::with(server.kill(), |_| {})
}

/// Returns the rest of standard output, and standard error.
fn read_all(child: &mut Child, out: &mut impl Read) -> (String, String) {
    let (mut rest, mut stderr_text) = (String::new(), String::new());
    out.read_to_string(&mut rest).unwrap();
    let mut err = child.stderr.take().unwrap();
    err.read_to_string(&mut stderr_text).unwrap();
    (rest, stderr_text)
}

#[test]
fn output_and_input_of_a_command_continue_after_its_server_was_killed() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let (mut child, mut out) = start(&server, "echo first; read line; echo got $line; exit 7");
    let server = restart(server);
    child.stdin.take().unwrap().write_all(b"typed\n").unwrap();
    let (rest, stderr_text) = read_all(&mut child, &mut out);
    assert_eq!(
        (rest.as_str(), child.wait().unwrap().code()),
        ("got typed\n", Some(7)),
        "{stderr_text}"
    );
    let lost = stderr_text.find("lost the connection to the server");
    let back = stderr_text.find("reconnected to the server");
    assert!(lost.is_some() && lost < back, "{stderr_text}");
    drop(server);
}

#[test]
fn a_command_ends_with_its_client() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let (mut child, _out) = start(&server, "echo first; sleep 1000");
    child.kill().unwrap();
    child.wait().unwrap();
    // A server may take a while to notice a lost peer.
    let started = Instant::now();
    loop {
        let commands = server.json(&["ps", "b"]);
        let commands = commands.as_array().unwrap();
        if commands.iter().all(|info| info["state"] == "exited") {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(90), "{commands:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_command_is_resumed_after_an_orderly_restart_of_its_server() {
    let keep = |directory| {
        Server::with(directory, |command| {
            command
                .env("BOXD_SERVER_KEEP_BOXES", "true")
                .env("BOXD_SERVER_DRAIN_SEC", "1");
        })
    };
    let mut server = keep(tempfile::tempdir().unwrap());
    server.ok(&["run", "--name", "b", "true"]);
    // The command writes all the time, also while the server ends. It polls with `-t 0`: a timed
    // read that ends between two bytes loses the first of them.
    let text = "echo first; while ! read -t 0; do echo -n .; sleep 0.01; done; \
                read line; echo got $line; exit 7";
    let (mut child, mut out) = start(&server, &format!("exec bash -c '{text}'"));
    server.signal(rustix::process::Signal::TERM);
    assert!(server.child.wait().unwrap().success());
    let directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
    let server = keep(directory);
    child.stdin.take().unwrap().write_all(b"typed\n").unwrap();
    let (rest, stderr_text) = read_all(&mut child, &mut out);
    let code = child.wait().unwrap().code();
    assert_eq!(code, Some(7), "{stderr_text}");
    assert!(rest.ends_with("got typed\n"), "{rest}{stderr_text}");
    drop(server);
}

#[test]
fn a_command_is_ended_with_a_message_if_its_server_dies_while_piped_input_is_sent() {
    let mut server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    // The command reads nothing, so input waits in the box, in the server and in the client.
    let (mut child, mut out) = start(&server, "echo first; sleep 1000");
    let mut input = child.stdin.take().unwrap();
    let written = Arc::new(AtomicUsize::new(0));
    let writing = std::thread::spawn({
        let written = Arc::clone(&written);
        move || {
            let piece = [b'x'; 4096];
            while let Ok(()) = input.write_all(&piece) {
                written.fetch_add(piece.len(), Ordering::Relaxed);
            }
        }
    });
    let stderr_text = Arc::new(Mutex::new(String::new()));
    let reporting = std::thread::spawn({
        let (stderr_text, mut err) = (Arc::clone(&stderr_text), child.stderr.take().unwrap());
        move || {
            let mut piece = [0; 1024];
            while let Ok(length @ 1..) = err.read(&mut piece) {
                let text = String::from_utf8_lossy(&piece[..length]).into_owned();
                stderr_text.lock().unwrap().push_str(&text);
            }
        }
    });
    let stderr_text = || stderr_text.lock().unwrap().clone();
    // More than the two pipes and the buffer of the client hold: the rest is in flight.
    eventually("input is in flight", || {
        written.load(Ordering::Relaxed) > 2 * 64 * 1024 + 2 * 32 * 1024
    });
    let lost = "boxd: lost the connection while sending input";
    for back in 1.. {
        server = restart(server);
        eventually("the client has noticed", || {
            stderr_text().contains(lost) || stderr_text().matches("reconnected").count() == back
        });
        if stderr_text().contains(lost) {
            break;
        }
        // The client was between two pieces.
    }
    let code = child.wait().unwrap().code();
    reporting.join().unwrap();
    writing.join().unwrap();
    assert_eq!(code, Some(137), "{}", stderr_text());
    assert_eq!(stderr_text().matches(lost).count(), 1, "{}", stderr_text());
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "");
    let commands = server.json(&["ps", "b"]);
    let commands = commands.as_array().unwrap();
    assert!(
        commands.iter().all(|info| info["state"] == "exited"),
        "{commands:?}"
    );
}
