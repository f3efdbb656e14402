//! A command reports at once why its box has ended.

use std::process::{Output, Stdio};

use box_test_wait::blocking::eventually;

use super::support::{Server, boxd, err, feed};

/// Fills a workspace with files of 1 MiB, and then waits.
const FILL: &str = "for i in $(seq 200); do head -c 1M /dev/urandom > f$i; done; sleep 1000";

/// Asserts that the box was ended for its quota, and that the client says so and stops reading.
fn is_over_quota(ran: &Output) {
    assert_eq!(ran.status.code(), Some(122), "{ran:?}");
    let stderr_text = err(ran);
    assert!(
        stderr_text.contains("workspace_quota_mb: the workspace exceeds 8 MiB"),
        "{stderr_text}"
    );
    assert!(!stderr_text.contains("connection"), "{stderr_text}");
}

#[test]
fn a_full_quota_has_a_specific_message_and_exit_code() {
    let workspace = tempfile::tempdir().unwrap();
    let mut run = boxd();
    run.args(["run", "--quota-mb", "8", "--workspace"])
        .arg(workspace.path())
        .arg(FILL);
    is_over_quota(&feed(&mut run, b""));
}

#[test]
fn a_file_as_large_as_the_quota_refuses_writes_and_the_command_continues() {
    let workspace = tempfile::tempdir().unwrap();
    let mut run = boxd();
    run.args(["run", "--quota-mb", "8", "--workspace"])
        .arg(workspace.path())
        .arg("head -c 20M /dev/zero > one; rm one; exit 7");
    let ran = feed(&mut run, b"");
    assert_eq!(ran.status.code(), Some(7), "{ran:?}");
    assert!(err(&ran).contains("File too large"), "{ran:?}");
}

#[test]
fn a_full_quota_is_in_inspect_and_in_the_log_and_later_calls_get_it() {
    let directory = tempfile::tempdir().unwrap();
    let workspace = directory.path().join("workspace");
    std::fs::create_dir(&workspace).unwrap();
    let log = directory.path().join("log");
    let to = std::fs::File::create(&log).unwrap();
    let server = Server::with(directory, |command| {
        command
            .env("BOXD_POLICY_ALLOWED_HOST_MOUNT_ROOTS", &workspace)
            .stderr(to);
    });
    let workspace = workspace.to_str().unwrap();
    let full = ["run", "--name", "full", "--quota-mb", "8", "--workspace"];
    is_over_quota(&server.run(&[&full[..], &[workspace, FILL]].concat()));
    let inspected = server.json(&["inspect", "full"]);
    assert_eq!(inspected["box"]["state"], "failed", "{inspected}");
    let reason = inspected["box"]["reason"].as_str().unwrap();
    assert!(
        reason.starts_with("workspace_quota_mb: the workspace exceeds 8 MiB"),
        "{reason}"
    );
    is_over_quota(&server.run(&["exec", "full", "true"]));
    server.ok(&["run", "--name", "other", "true"]);
    let usage = server.json(&["stats"]);
    assert_ne!(usage["other"], usage["full"], "a failed box has no numbers");
    let log = std::fs::read_to_string(log).unwrap();
    assert!(
        log.contains("workspace_quota_mb: the workspace exceeds 8 MiB"),
        "{log}"
    );
    let failed = log.lines().find(|line| line.contains("box failed"));
    let failed = failed.unwrap_or_else(|| panic!("{log}"));
    assert!(failed.contains("owner=local box_id=full"), "{failed}");
}

#[test]
fn a_command_reports_that_its_box_was_deleted() {
    let server = Server::start();
    server.ok(&["run", "--name", "short", "true"]);
    let running = server
        .boxd(&["exec", "--id", "job", "short", "sleep 1000"])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("the command runs", || {
        server.ok(&["ps", "short"]).contains("short/job")
    });
    server.ok(&["rm", "--force", "short"]);
    let ran = running.wait_with_output().unwrap();
    assert_eq!(ran.status.code(), Some(125), "{ran:?}");
    let stderr_text = err(&ran);
    assert!(
        stderr_text.contains("box short was deleted"),
        "{stderr_text}"
    );
}
