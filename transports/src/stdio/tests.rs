use std::{collections::VecDeque, path::Path, time::Duration};

use box_rpc::{Connection, ConnectionError, Limits, ReceiveHalf, SendHalf};
use tokio::{net::UnixStream, process::Command};

use super::*;
use crate::line::Line;

fn halves(connection: impl Connection) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
    Box::new(connection).split()
}

fn over(stream: UnixStream, limits: &Limits) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
    let (read, write) = stream.into_split();
    let mut lines = Line::new(read, write, limits);
    lines.skip_non_messages();
    halves(lines)
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

/// Whether the process is gone, or a zombie that another process must reap.
fn is_dead(pid: &str) -> bool {
    let Ok(stat) = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")) else {
        return true;
    };
    stat.rsplit_once(") ")
        .is_none_or(|(_, rest)| rest.starts_with('Z'))
}

async fn dies(pid: &str) -> bool {
    for _ in 0..12_000 {
        if is_dead(pid) {
            return true;
        }
        tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(10)))
            .await
            .unwrap();
    }
    false
}

/// Starts a command that ignores `SIGTERM` and the end of its input.
/// Its child does the same. Returns the process ids of both.
async fn ignoring_signals() -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>, String, String) {
    let script = r#"trap "" TERM; (trap "" TERM; while :; do sleep 1000; done) & echo "[$$,$!]"; while :; do sleep 1000; done"#;
    let child = spawn(shell(script), &Limits::default()).unwrap();
    let leader = child.id().unwrap().to_string();
    let (send, mut receive) = halves(child);
    let pids = receive.receive().await.unwrap().unwrap();
    let (first, second) = pids.trim_matches(['[', ']']).split_once(',').unwrap();
    assert_eq!(first, leader);
    assert!(!is_dead(second));
    (send, receive, leader, second.to_owned())
}

#[tokio::test]
async fn a_command_is_a_connection_and_its_other_output_is_skipped() {
    let child = spawn(shell("echo hello; cat; echo bye"), &Limits::default()).unwrap();
    let skipped_lines = child.skipped_lines();
    let (mut send, mut receive) = halves(child);
    let mut batch = VecDeque::from(["{\"a\":1}".to_owned(), "[2]".to_owned()]);
    send.send_all(&mut batch).await.unwrap();
    assert_eq!(
        receive.receive().await.unwrap().as_deref(),
        Some("{\"a\":1}")
    );
    assert_eq!(receive.receive().await.unwrap().as_deref(), Some("[2]"));
    send.close().await.unwrap();
    assert_eq!(receive.receive().await.unwrap(), None);
    assert_eq!(skipped_lines.get(), 2);
}

#[tokio::test]
async fn dropping_both_halves_kills_the_group() {
    let (send, receive, leader, grandchild) = ignoring_signals().await;
    drop(send);
    assert!(!is_dead(&grandchild), "one half is left");
    drop(receive);
    assert!(dies(&grandchild).await && dies(&leader).await);
}

#[tokio::test(start_paused = true)]
async fn closing_kills_the_group() {
    let (mut send, _receive, leader, grandchild) = ignoring_signals().await;
    send.close().await.unwrap();
    assert!(dies(&grandchild).await && dies(&leader).await);
}

#[tokio::test]
async fn the_end_of_a_command_kills_its_group_and_leaves_no_zombie() {
    let child = spawn(shell("sleep 1000 & echo [$!]"), &Limits::default()).unwrap();
    let leader = child.id().unwrap().to_string();
    let (_send, mut receive) = halves(child);
    let pid = receive.receive().await.unwrap().unwrap();
    assert!(dies(pid.trim_matches(['[', ']'])).await);
    assert_eq!(receive.receive().await.unwrap(), None);
    for _ in 0..12_000 {
        if !Path::new("/proc").join(&leader).exists() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the command was not reaped");
}

#[tokio::test]
async fn a_command_that_does_not_exist_is_an_error() {
    let outcome = spawn(Command::new("no-such-command-here"), &Limits::default());
    assert!(matches!(outcome, Err(ConnectionError::Io(_))));
}

/// Set in the process that acts as the child in the tests below.
const CHILD: &str = "BOX_TRANSPORTS_TEST_CHILD";

/// Code of the child process of a test below.
async fn run_as_child() {
    let (mut send, mut receive) = halves(serve(&Limits::default()).unwrap());
    // Simulates a careless library.
    println!("{{\"stray\":\"print\"}}");
    let mut left = String::new();
    std::io::stdin().read_line(&mut left).unwrap();
    assert_eq!(left, "", "the protocol is out of reach");
    assert!(serve(&Limits::default()).is_err());
    while let Some(message) = receive.receive().await.unwrap() {
        send.send(message).await.unwrap();
        send.flush().await.unwrap();
    }
    send.close().await.unwrap();
    std::process::exit(0);
}

/// Command that runs the named test of this file again, as the child.
fn child_of(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", &format!("stdio::tests::{test}")])
        .args(["--nocapture", "--quiet"])
        .env(CHILD, "1")
        .stderr(std::process::Stdio::null());
    command
}

#[tokio::test]
async fn the_child_side_works_over_pipes_despite_stray_prints() {
    if std::env::var_os(CHILD).is_some() {
        return run_as_child().await;
    }
    let (mut send, mut receive) = halves(
        spawn(
            child_of("the_child_side_works_over_pipes_despite_stray_prints"),
            &Limits::default(),
        )
        .unwrap(),
    );
    for size in [1, 1000, 300_000] {
        let message = format!("[\"{}\"]", "x".repeat(size));
        send.send(message.clone()).await.unwrap();
        send.flush().await.unwrap();
        assert_eq!(receive.receive().await.unwrap(), Some(message));
    }
    send.close().await.unwrap();
    assert_eq!(receive.receive().await.unwrap(), None);
}

#[tokio::test]
async fn the_child_side_works_over_a_socket_pair() {
    if std::env::var_os(CHILD).is_some() {
        return run_as_child().await;
    }
    let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut command = child_of("the_child_side_works_over_a_socket_pair");
    command
        .stdin(std::os::fd::OwnedFd::from(far.try_clone().unwrap()))
        .stdout(std::os::fd::OwnedFd::from(far));
    let mut child = command.spawn().unwrap();
    drop(command);
    near.set_nonblocking(true).unwrap();
    let (mut send, mut receive) = over(UnixStream::from_std(near).unwrap(), &Limits::default());
    send.send("{\"over\":\"sockets\"}".to_owned())
        .await
        .unwrap();
    send.flush().await.unwrap();
    let answer = receive.receive().await.unwrap();
    assert_eq!(answer.as_deref(), Some("{\"over\":\"sockets\"}"));
    send.close().await.unwrap();
    assert_eq!(receive.receive().await.unwrap(), None);
    assert!(child.wait().await.unwrap().success());
}

#[tokio::test]
async fn the_child_side_works_over_files() {
    if std::env::var_os(CHILD).is_some() {
        return run_as_child().await;
    }
    let directory = tempfile::tempdir().unwrap();
    let (input, output) = (directory.path().join("in"), directory.path().join("out"));
    let message = format!("[\"{}\"]", "x".repeat(200_000));
    std::fs::write(&input, format!("{{}}\n{message}\n{{\"last\":1}}")).unwrap();
    let mut command = child_of("the_child_side_works_over_files");
    command
        .stdin(std::fs::File::open(&input).unwrap())
        .stdout(std::fs::File::create(&output).unwrap());
    assert!(command.status().await.unwrap().success());
    let written = std::fs::read_to_string(&output).unwrap();
    let messages: Vec<&str> = written
        .lines()
        .filter(|line| line.starts_with(['{', '[']))
        .collect();
    assert_eq!(messages, ["{}", message.as_str(), "{\"last\":1}"]);
}
