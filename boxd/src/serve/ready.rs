//! The notification that the server is ready: one line, and the service manager.

use std::os::unix::net::UnixDatagram;

use rustix::net::{SendFlags, SocketAddrUnix, sendto};

/// Returns the line with every address that is actually bound.
pub(super) fn line(addresses: &[String]) -> String {
    format!("boxd ready {}\n", addresses.join(" "))
}

/// Notifies the service manager, if it started this process (`sd_notify`).
pub(super) fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    // A service manager that does not listen does not wait, so an error is only logged.
    if let Err(error) = send(path.as_encoded_bytes(), state) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

fn send(path: &[u8], state: &str) -> std::io::Result<()> {
    let address = match path {
        // A leading `@` marks an abstract socket name.
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        path => SocketAddrUnix::new(path)?,
    };
    let socket = UnixDatagram::unbound()?;
    sendto(&socket, state.as_bytes(), SendFlags::empty(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_manager_is_notified() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str().as_encoded_bytes(), "READY=1").unwrap();
        let mut buffer = [0; 16];
        let length = manager.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"READY=1");
        assert!(send(b"/nowhere/at/all", "READY=1").is_err());
    }
}
