//! Socket files, and streams of Unix sockets.

use std::{os::unix::fs::PermissionsExt, path::Path};

use box_rpc::{Connection, Limits};
use tokio::net::UnixStream;

use super::*;

#[tokio::test]
async fn a_socket_file_is_private_and_removed_with_its_listener() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("box.sock");
    let at = Endpoint::Unix { path: path.clone() };
    let listener = at.listen(&ListenOptions::default()).await.unwrap();
    let mode = std::fs::symlink_metadata(&path)
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(matches!(
        at.listen(&ListenOptions::default()).await,
        Err(ListenError::InUse)
    ));
    assert_eq!(files(directory.path()), ["box.sock"]);
    drop(listener);
    assert_eq!(files(directory.path()), [""; 0]);
}

#[tokio::test]
async fn only_a_stale_socket_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("box.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let at = Endpoint::Unix { path: path.clone() };
    let mut listener = at.listen(&ListenOptions::default()).await.unwrap();
    greet(&mut listener, &ConnectOptions::default()).await;

    let file = directory.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let at = Endpoint::Unix { path: file.clone() };
    assert!(matches!(
        at.listen(&ListenOptions::default()).await,
        Err(ListenError::NotASocket)
    ));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");

    // The listener must not remove a file that another process put at its path.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "theirs").unwrap();
    drop(listener);
    assert!(path.exists());
}

#[tokio::test]
async fn a_failed_bind_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x".repeat(200));
    let outcome = Endpoint::Unix { path }
        .listen(&ListenOptions::default())
        .await;
    assert!(matches!(outcome, Err(ListenError::Io(_))), "{outcome:?}");
    assert_eq!(files(directory.path()), [""; 0]);
}

fn files(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[tokio::test]
async fn a_socket_pair_is_a_connection() {
    let (near, far) = UnixStream::pair().unwrap();
    let (mut send, _) = Box::new(crate::unix::over(near, &Limits::default())).split();
    let (_, mut receive) = Box::new(crate::unix::over(far, &Limits::default())).split();
    send.send("{}".to_owned()).await.unwrap();
    send.flush().await.unwrap();
    assert_eq!(receive.receive().await.unwrap().as_deref(), Some("{}"));
}
