//! Identifies the process at the other end of a Unix socket.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::raw;
use crate::record::pid_of;

/// Pidfd of the process that listens at, or connected from, the other end.
pub fn peer_pidfd(stream: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    raw::peer_pidfd(stream)
}

/// Whether the peer process is in the user namespace of this process.
///
/// A process that cannot be examined counts as outside.
///
/// Kernels since 6.5 identify the peer by a descriptor. Older kernels give only a pid, and the
/// kernel may have reused it.
pub fn peer_is_in_our_user_namespace(stream: BorrowedFd<'_>) -> bool {
    match peer_pidfd(stream) {
        Ok(pidfd) => {
            let Some(pid) = pid_of(&pidfd) else {
                return false;
            };
            // The pid is the same before and after, so it was not reused in between.
            is_in_our_user_namespace(pid) && pid_of(&pidfd) == Some(pid)
        }
        Err(error) if error.raw_os_error() == Some(Errno::NOPROTOOPT.raw_os_error()) => {
            let peer = rustix::net::sockopt::socket_peercred(stream);
            peer.is_ok_and(|peer| is_in_our_user_namespace(peer.pid.as_raw_pid()))
        }
        Err(_) => false,
    }
}

fn is_in_our_user_namespace(pid: i32) -> bool {
    let namespace = |process: &str| {
        let stat = rustix::fs::stat(format!("/proc/{process}/ns/user"))?;
        Ok::<_, Errno>((stat.st_dev, stat.st_ino))
    };
    match (namespace("self"), namespace(&pid.to_string())) {
        (Ok(ours), Ok(theirs)) => ours == theirs,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Command, Stdio};

    use rustix::process::{Pid, Signal, WaitOptions};

    use super::*;

    #[test]
    fn a_process_that_cannot_be_examined_counts_as_outside() {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        assert!(is_in_our_user_namespace(own), "control: this process");
        // 0: the pid of a process in an invisible namespace. The others are invalid.
        for pid in [0, -1, i32::MAX] {
            assert!(!is_in_our_user_namespace(pid), "{pid}");
        }
    }

    const CONNECT: &str = "import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
sys.stdin.read()
";

    #[test]
    fn a_reused_pid_is_not_trusted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        // Another process may take the pid first.
        for _ in 0..100 {
            let mut client = Command::new("python3")
                .args(["-c", CONNECT])
                .arg(&path)
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            let (stream, _) = listener.accept().unwrap();
            assert!(peer_is_in_our_user_namespace(stream.as_fd()), "control");
            let pid = i32::try_from(client.id()).unwrap();
            // `wait` closes standard input, so the client exits.
            client.wait().unwrap();
            assert!(!peer_is_in_our_user_namespace(stream.as_fd()), "it ended");
            match raw::pause_as(pid) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => continue,
                // Only root can choose a pid.
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
                    return;
                }
            }
            let believed = peer_is_in_our_user_namespace(stream.as_fd());
            let by_number = is_in_our_user_namespace(pid);
            let has_descriptors = has_descriptors(&stream);
            let later = Pid::from_raw(pid).unwrap();
            rustix::process::kill_process(later, Signal::KILL).unwrap();
            rustix::process::waitpid(Some(later), WaitOptions::empty()).unwrap();
            assert!(
                by_number,
                "control: the number is of a process like this one"
            );
            assert_eq!(believed, !has_descriptors);
            return;
        }
        panic!("the number was always taken");
    }

    /// Whether the kernel supports `SO_PEERPIDFD`.
    ///
    /// It then returns another error for an ended peer.
    fn has_descriptors(stream: &UnixStream) -> bool {
        let error = peer_pidfd(stream.as_fd()).map(drop).err();
        error.and_then(|error| error.raw_os_error()) != Some(libc::ENOPROTOOPT)
    }
}
