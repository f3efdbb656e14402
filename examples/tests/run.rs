//! Every example runs, and says what it should.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

fn prints(program: &str, expected: &str) {
    let ran = Command::new(program).output().unwrap();
    let said = String::from_utf8(ran.stdout).unwrap();
    let complained = String::from_utf8_lossy(&ran.stderr);
    assert!(
        ran.status.success(),
        "{program}: {:?}\n{said}\n{complained}",
        ran.status
    );
    assert_eq!(said, expected, "{program}: {complained}");
}

#[test]
fn in_process_reads_a_command_as_it_goes() {
    let expected =
        "Stdout at byte 0: 1\nStdout at byte 2: 2\nStdout at byte 4: 3\nended with Some(3)\n";
    prints(env!("CARGO_BIN_EXE_in_process"), expected);
}

#[test]
fn a_plugin_host_keeps_state_in_shells() {
    let expected = "hello from /tmp\n42\nZeroDivisionError\n";
    prints(env!("CARGO_BIN_EXE_plugin_host"), expected);
}

#[test]
fn a_remote_command_outlives_its_connection() {
    let expected = "100 lines, ended with Some(0), connection lost: true\n";
    prints(env!("CARGO_BIN_EXE_remote"), expected);
}
