//! Telling the world that it can begin: one line, and the service manager.

use std::os::unix::net::UnixDatagram;

use rustix::net::{SendFlags, SocketAddrUnix, sendto};

/// The one line, with every address that is really bound.
pub(super) fn line(addresses: &[String]) -> String {
    format!("boxd ready {}\n", addresses.join(" "))
}

/// Tells the service manager, if one started us and wants to know (`sd_notify`).
pub(super) fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    // One that does not listen is not waiting.
    if let Err(error) = send(path.as_encoded_bytes(), state) {
        tracing::warn!(%error, "the service manager could not be told");
    }
}

fn send(path: &[u8], state: &str) -> std::io::Result<()> {
    let address = match path {
        // An abstract name, written with an `@`.
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
    fn a_service_manager_is_told() {
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
