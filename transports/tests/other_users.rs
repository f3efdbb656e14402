//! A Unix socket accepts its own user and root, whatever the mode of its file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use box_transports::{Endpoint, ListenOptions};
use tokio::process::Command;

/// Connects as another user and prints the received data: nothing if refused.
const STRANGER: &str = "
import os, socket, sys
if sys.argv[2] != 'self':
    os.setgid(65534)
    os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
s.settimeout(5)
s.connect(sys.argv[1])
try:
    print('end' if s.recv(1) == b'' else 'data')
except socket.timeout:
    print('open')
except ConnectionResetError:
    print('end')
";

#[tokio::test]
async fn another_user_is_refused_despite_the_mode_of_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let endpoint: Endpoint = format!("unix:{}", path.display()).parse().unwrap();
    let mut listener = endpoint.listen(&ListenOptions::default()).await.unwrap();
    set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    let refused = listener.refused();
    let connect = |who: &'static str| {
        let path = path.clone();
        async move {
            let output = Command::new("python3")
                .args(["-c", STRANGER])
                .arg(path)
                .arg(who)
                .output()
                .await
                .unwrap();
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        }
    };

    // Control: the listener accepts its own user, which receives nothing because no peer sends.
    let (accepted, _) = tokio::join!(
        listener.accept(),
        tokio::time::timeout(Duration::from_millis(500), connect("self"))
    );
    assert_eq!(
        accepted.unwrap().peer.uid,
        Some(rustix::process::geteuid().as_raw())
    );

    // Only root can switch to another user for this test.
    if rustix::process::geteuid().is_root() {
        let frames_received = tokio::select! {
            accepted = listener.accept() => panic!("a other_user was handed out: {accepted:?}"),
            frames_received = connect("other_user") => frames_received,
        };
        assert_eq!(frames_received, "end");
        assert_eq!(refused.other_user(), 1);
    }
}
