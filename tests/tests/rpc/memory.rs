//! Memory stays bounded whatever is sent.

use std::io::Write as _;
use std::process::{Command, Stdio};

/// Highest resident size of a process so far, in bytes.
fn peak(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a process");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .expect("a peak");
    let kib: u64 = line
        .split_whitespace()
        .nth(1)
        .expect("a number")
        .parse()
        .expect("a number");
    kib * 1024
}

/// A line without an end, far longer than any message may be. The process that reads it stays under
/// twice the message limit, and then answers the next call.
#[test]
fn an_endless_line_is_not_kept() {
    const LIMIT: u64 = 16 * 1024 * 1024;
    let mut server = Command::new(env!("CARGO_BIN_EXE_box-test-server"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = server.stdin.take().unwrap();
    input
        .write_all(b"{\"jsonrpc\":\"2.0\",\"id\":5,\"method\":\"echo\",\"params\":{\"text\":\"")
        .unwrap();
    let block = vec![b'x'; 1 << 20];
    for _ in 0..1024 {
        input.write_all(&block).unwrap();
    }
    let peak = peak(server.id());
    assert!(peak < 2 * LIMIT, "{peak} bytes for a line of 1 GiB");
    input.write_all(b"\"}}\n{\"jsonrpc\":\"2.0\",\"id\":6,\"method\":\"echo\",\"params\":{\"text\":\"on\"}}\n").unwrap();
    drop(input);
    let output = server.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("\"id\":5,\"error\"") && text.contains("message_bytes of 16777216"),
        "{text}"
    );
    assert!(text.contains("\"id\":6,\"result\""), "{text}");
}
