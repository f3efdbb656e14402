//! Debian's registry with TLS and a password, and the images in it.
//!
//! `cargo xtask test` installs `docker-registry`, `skopeo` and `busybox-static`; without them the tests
//! fail.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use box_test_wait::blocking::eventually;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// The password `secret` of the user `box`, hashed by bcrypt.
const HTPASSWD: &str = "box:$2y$05$/N8FatQvLEXUWdid1XBR4.DqLBNr67XGPjr29qomlBg.rFlA7XnUy\n";

/// Another name of the registries, which has no address.
pub(super) const REMOTE: &str = "registry.test";

/// A registry that ends with the test.
pub(super) struct Registry {
    folder: tempfile::TempDir,
    process: Child,
    port: u16,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Registry {
    pub(super) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        certificates(folder.path());
        fs::write(folder.path().join("htpasswd"), HTPASSWD).unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let config = json!({
            "version": "0.1",
            "storage": {"filesystem": {"rootdirectory": at("data")}},
            "http": {"addr": format!("127.0.0.1:{port}"), "tls": {"certificate": at("cert.pem"), "key": at("key.pem")}},
            "auth": {"htpasswd": {"realm": "box", "path": at("htpasswd")}},
            "log": {"level": "error"},
        });
        fs::write(folder.path().join("config.yml"), config.to_string()).unwrap();
        let process = Command::new("docker-registry")
            .args(["serve", &at("config.yml")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("docker-registry: install it");
        let mut registry = Self {
            folder,
            process,
            port,
        };
        eventually("the registry listens", || {
            assert!(registry.process.try_wait().unwrap().is_none(), "it ended");
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        registry
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// The file of its certificate authority.
    pub(super) fn authority(&self) -> PathBuf {
        self.folder.path().join("ca.crt")
    }

    pub(super) fn reference(&self, name: &str) -> String {
        format!("localhost:{}/{name}", self.port)
    }

    /// Pushes the image of a layout.
    pub(super) fn push(&self, layout: &Path, name: &str) {
        // A directory of certificates contains only those of the authority.
        let certificates = self.folder.path().join("certs");
        fs::create_dir_all(&certificates).unwrap();
        fs::copy(self.authority(), certificates.join("ca.crt")).unwrap();
        let pushed = Command::new("skopeo")
            .args(["--insecure-policy", "copy", "-q", "--dest-creds=box:secret"])
            .arg(format!("--dest-cert-dir={}", certificates.display()))
            .arg(format!("oci:{}:v1", layout.display()))
            .arg(format!("docker://{}", self.reference(name)))
            .output()
            .expect("skopeo: install it");
        assert!(pushed.status.success(), "{pushed:?}");
    }
}

fn certificates(folder: &Path) {
    let mut authority = rcgen::CertificateParams::default();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let name = rcgen::DnType::CommonName;
    authority
        .distinguished_name
        .push(name, "box test authority");
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = authority.self_signed(&key).unwrap();
    fs::write(folder.join("ca.crt"), certificate.pem()).unwrap();
    let issuer = rcgen::Issuer::new(authority, key);
    let leaf_key = rcgen::KeyPair::generate().unwrap();
    let leaf = rcgen::CertificateParams::new(["localhost", REMOTE].map(str::to_owned)).unwrap();
    let leaf = leaf.signed_by(&leaf_key, &issuer).unwrap();
    fs::write(folder.join("cert.pem"), leaf.pem()).unwrap();
    fs::write(folder.join("key.pem"), leaf_key.serialize_pem()).unwrap();
}

/// A port in front of a registry, which can hold answers back.
pub(super) struct ThrottledProxy {
    pub(super) port: u16,
    passed: Arc<AtomicU64>,
    open: Arc<(Mutex<bool>, Condvar)>,
    ended: Arc<AtomicBool>,
}

impl ThrottledProxy {
    /// Lets this many bytes of each answer pass, and the rest after [`open`](Self::open).
    pub(super) fn start(registry: &Registry, bytes: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self {
            port: listener.local_addr().unwrap().port(),
            passed: Arc::default(),
            open: Arc::default(),
            ended: Arc::default(),
        };
        let (to, passed) = (registry.port, Arc::clone(&proxy.passed));
        let (open, ended) = (Arc::clone(&proxy.open), Arc::clone(&proxy.ended));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
                let asked = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || {
                    let (mut client, mut server) = asked;
                    let _ = io::copy(&mut client, &mut server);
                    let _ = server.shutdown(Shutdown::Write);
                });
                let (open, passed) = (Arc::clone(&open), Arc::clone(&passed));
                std::thread::spawn(move || pass(server, client, bytes, &passed, &open));
            }
        });
        proxy
    }

    /// The bytes that have passed, of all answers.
    pub(super) fn passed(&self) -> u64 {
        self.passed.load(Ordering::Relaxed)
    }

    pub(super) fn open(&self) {
        *self.open.0.lock().unwrap() = true;
        self.open.1.notify_all();
    }
}

impl Drop for ThrottledProxy {
    fn drop(&mut self) {
        self.open();
        self.ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn pass(
    mut from: TcpStream,
    mut to: TcpStream,
    bytes: u64,
    passed: &AtomicU64,
    open: &(Mutex<bool>, Condvar),
) {
    let (mut buffer, mut own) = (vec![0; 16 << 10], 0);
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if own >= bytes {
            let closed = open.0.lock().unwrap();
            drop(open.1.wait_while(closed, |open| !*open).unwrap());
        }
        if to.write_all(&buffer[..length]).is_err() {
            return;
        }
        own += length as u64;
        passed.fetch_add(length as u64, Ordering::Relaxed);
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// Bytes that do not compress.
pub(super) fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    };
    (0..length).map(|_| next()).collect()
}

/// Writes an OCI layout with one image: busybox, a working directory, a user and a large file.
pub(super) fn layout(folder: &Path, large: usize, config: &Value) -> PathBuf {
    let layout = folder.join("layout");
    fs::create_dir_all(layout.join("blobs/sha256")).unwrap();
    let blob = |content: &[u8]| {
        let hex = format!("{:x}", Sha256::digest(content));
        fs::write(layout.join("blobs/sha256").join(&hex), content).unwrap();
        format!("sha256:{hex}")
    };
    let layer = layer(large);
    let layer_digest = blob(&layer);
    let config = json!({"architecture": "amd64", "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer_digest]}})
    .to_string();
    let config_digest = blob(config.as_bytes());
    let manifest = json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config_digest, "size": config.len()},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer_digest, "size": layer.len()}]})
    .to_string();
    let digest = blob(manifest.as_bytes());
    let index = json!({"schemaVersion": 2, "manifests": [{
        "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": manifest.len(),
        "annotations": {"org.opencontainers.image.ref.name": "v1"}}]});
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
    let version = json!({"imageLayoutVersion": "1.0.0"}).to_string();
    fs::write(layout.join("oci-layout"), version).unwrap();
    layout
}

fn layer(large: usize) -> Vec<u8> {
    use tar::EntryType::{Directory, Regular, Symlink};
    let mut archive = tar::Builder::new(Vec::new());
    let mut add = |kind, path: &str, mode, content: &[u8], link: Option<&str>| {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        if let Some(link) = link {
            header.set_link_name(link).unwrap();
        }
        archive.append_data(&mut header, path, content).unwrap();
    };
    for directory in ["app", "bin", "etc", "root", "tmp"] {
        add(Directory, directory, 0o755, b"", None);
    }
    let busybox = ["/bin/busybox", "/usr/bin/busybox"];
    let busybox = busybox.iter().find_map(|path| fs::read(path).ok());
    let busybox = busybox.expect("busybox: install busybox-static");
    add(Regular, "bin/busybox", 0o755, &busybox, None);
    for tool in [
        "cat", "echo", "env", "id", "ls", "pwd", "sh", "sleep", "touch",
    ] {
        add(Symlink, &format!("bin/{tool}"), 0o777, b"", Some("busybox"));
    }
    let users = "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/app:/bin/sh\n";
    add(Regular, "etc/passwd", 0o644, users.as_bytes(), None);
    add(Regular, "etc/marker", 0o644, b"of the image\n", None);
    add(Regular, "large", 0o644, &noise(large), None);
    archive.into_inner().unwrap()
}
