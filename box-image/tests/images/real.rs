//! Debian's registry with TLS and a password, and images made by umoci and skopeo.
//!
//! `cargo xtask test` installs `docker-registry`, `skopeo` and `umoci`; without them the tests fail.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use box_image::{Credentials, ExportOptions, ImportOptions, PullOptions, Registry, pull};
use box_rpc::Code;
use box_test_wait::blocking::eventually;

use super::support::{TestStore, noise, options};

/// The password `secret` of the user `box`, hashed by bcrypt.
const HTPASSWD: &str = "box:$2y$05$/N8FatQvLEXUWdid1XBR4.DqLBNr67XGPjr29qomlBg.rFlA7XnUy\n";

/// A registry that ends with the test.
struct RealRegistry {
    folder: tempfile::TempDir,
    process: Child,
    authority: String,
}

impl Drop for RealRegistry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let ran = Command::new(program).args(arguments).output();
    let ran = ran.unwrap_or_else(|error| panic!("{program}: {error}; install it"));
    assert!(
        ran.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&ran.stderr)
    );
    String::from_utf8(ran.stdout).unwrap()
}

fn certificates(folder: &Path) {
    let mut authority = rcgen::CertificateParams::default();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    authority
        .distinguished_name
        .push(rcgen::DnType::CommonName, "box test authority");
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = authority.self_signed(&key).unwrap();
    fs::write(folder.join("ca.crt"), certificate.pem()).unwrap();
    let issuer = rcgen::Issuer::new(authority, key);
    let leaf_key = rcgen::KeyPair::generate().unwrap();
    let leaf = rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap();
    let leaf = leaf.signed_by(&leaf_key, &issuer).unwrap();
    fs::write(folder.join("cert.pem"), leaf.pem()).unwrap();
    fs::write(folder.join("key.pem"), leaf_key.serialize_pem()).unwrap();
}

impl RealRegistry {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        certificates(folder.path());
        fs::write(folder.path().join("htpasswd"), HTPASSWD).unwrap();
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let config = format!(
            "version: 0.1\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp:\n  addr: 127.0.0.1:{port}\n  tls: {{certificate: {}, key: {}}}\nauth: {{htpasswd: {{realm: box, path: {}}}}}\nlog: {{level: error}}\n",
            at("data"),
            at("cert.pem"),
            at("key.pem"),
            at("htpasswd")
        );
        fs::write(folder.path().join("config.yml"), config).unwrap();
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let process = Command::new("docker-registry")
            .args(["serve", &at("config.yml")])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("docker-registry: install it");
        let mut registry = Self {
            folder,
            process,
            authority: format!("localhost:{port}"),
        };
        eventually("the registry listens", || {
            let ended = registry.process.try_wait().unwrap();
            assert!(
                ended.is_none(),
                "{}",
                fs::read_to_string(registry.path("log")).unwrap()
            );
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        registry
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn client(&self, password: &str) -> Registry {
        let mut options = options();
        options.ca_files = vec![self.path("ca.crt")];
        let credentials = Credentials::Basic {
            username: "box".into(),
            password: password.into(),
        };
        options.credentials = [(self.authority.clone(), credentials)].into();
        Registry::new(options).unwrap()
    }

    fn push(&self, layout: &str, tag: &str, arguments: &[&str]) {
        // A directory of certificates contains only those of the authority.
        let certificates = self.path("certs");
        fs::create_dir_all(&certificates).unwrap();
        fs::copy(self.path("ca.crt"), certificates.join("ca.crt")).unwrap();
        let certificates = format!("--dest-cert-dir={}", certificates.display());
        let target = format!("docker://{}/test/app:{tag}", self.authority);
        let mut all = vec![
            "--insecure-policy",
            "copy",
            "-q",
            &certificates,
            "--dest-creds=box:secret",
        ];
        all.extend(arguments);
        all.extend([layout, &target]);
        run("skopeo", &all);
    }
}

/// Makes an image of two layers with every oddity that umoci writes.
fn make_layout(folder: &Path) -> String {
    let at = |name: &str| folder.join(name).display().to_string();
    let (layout, bundle) = (at("layout"), at("bundle"));
    let image = format!("{layout}:v1");
    run("umoci", &["init", "--layout", &layout]);
    run("umoci", &["new", "--image", &image]);
    run("umoci", &["unpack", "--image", &image, &bundle]);
    let root = Path::new(&bundle).join("rootfs");
    fs::create_dir_all(root.join("etc/old")).unwrap();
    fs::create_dir(root.join("tmp")).unwrap();
    fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    for name in [
        "etc/kept",
        "etc/gone",
        "etc/old/file",
        "su",
        "owned",
        "capable",
    ] {
        fs::write(root.join(name), name).unwrap();
    }
    fs::write(root.join("big"), noise(2 << 20)).unwrap();
    fs::hard_link(root.join("etc/kept"), root.join("etc/same")).unwrap();
    symlink("etc/kept", root.join("link")).unwrap();
    chown(root.join("owned"), Some(1234), Some(5678)).unwrap();
    fs::set_permissions(root.join("su"), fs::Permissions::from_mode(0o4755)).unwrap();
    let attribute = |name: &str, attribute: &str, value: &[u8]| {
        rustix::fs::setxattr(
            root.join(name),
            attribute,
            value,
            rustix::fs::XattrFlags::empty(),
        )
        .unwrap();
    };
    attribute("etc/kept", "user.note", b"hello");
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    attribute("capable", "security.capability", &capability);
    rustix::fs::mknodat(
        fs::File::open(&root).unwrap(),
        "pipe",
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1);
    fs::File::options()
        .write(true)
        .open(root.join("su"))
        .unwrap()
        .set_modified(old)
        .unwrap();
    run(
        "umoci",
        &["repack", "--refresh-bundle", "--image", &image, &bundle],
    );
    // The second layer deletes.
    fs::remove_file(root.join("etc/gone")).unwrap();
    fs::remove_dir_all(root.join("etc/old")).unwrap();
    fs::write(root.join("etc/new"), "new").unwrap();
    run("umoci", &["repack", "--image", &image, &bundle]);
    run(
        "umoci",
        &[
            "config",
            "--image",
            &image,
            "--config.cmd",
            "/bin/sh",
            "--config.workingdir",
            "/tmp",
            "--config.user",
            "1234",
        ],
    );
    format!("oci:{image}")
}

fn assert_tree(root: &Path) {
    let found = |name: &str| fs::symlink_metadata(root.join(name)).unwrap();
    assert_eq!(fs::read_to_string(root.join("etc/new")).unwrap(), "new");
    assert_eq!(fs::read(root.join("big")).unwrap(), noise(2 << 20));
    assert!(!root.join("etc/gone").exists() && !root.join("etc/old").exists());
    assert_eq!(found("etc/kept").nlink(), 2);
    assert_eq!(
        fs::read_link(root.join("link")).unwrap(),
        Path::new("etc/kept")
    );
    assert_eq!(
        (found("su").mode() & 0o7777, found("su").mtime()),
        (0o4755, 1)
    );
    assert_eq!((found("owned").uid(), found("owned").gid()), (1234, 5678));
    assert_eq!(found("tmp").mode() & 0o7777, 0o1777);
    assert_eq!(found("pipe").mode() & 0o170_000, 0o010_000);
    let attribute = |name: &str, attribute: &str| {
        let mut value = [0; 64];
        rustix::fs::lgetxattr(root.join(name), attribute, &mut value[..]).ok()
    };
    assert_eq!(attribute("etc/kept", "user.note"), Some(5));
    assert_eq!(attribute("capable", "security.capability"), None);
}

/// umoci keeps owners only as root, and these tests compare them.
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_umoci_and_skopeo_are_pulled_from_debians_registry() {
    assert!(
        is_root(),
        "run this test as root: umoci keeps owners only as root"
    );
    let registry = RealRegistry::start();
    let layout = make_layout(registry.folder.path());
    registry.push(&layout, "oci", &[]);
    registry.push(&layout, "docker", &["--format", "v2s2"]);
    let client = registry.client("secret");
    client.check_login(&registry.authority).await.unwrap();
    // skopeo compresses only plain layers, and sends a blob that it has sent to this registry before.
    let plain = format!("dir:{}", registry.path("plain").display());
    run(
        "skopeo",
        &[
            "--insecure-policy",
            "copy",
            "-q",
            "--dest-decompress",
            &layout,
            &plain,
        ],
    );
    let other = RealRegistry::start();
    other.push(&plain, "zstd", &["--dest-compress-format=zstd"]);
    let mut trees = Vec::new();
    let mut layers = Vec::new();
    for (registry, tag) in [(&registry, "oci"), (&registry, "docker"), (&other, "zstd")] {
        let at = TestStore::new();
        let client = registry.client("secret");
        let reference = format!("{}/test/app:{tag}", registry.authority)
            .parse()
            .unwrap();
        let pulled = pull(&at.store, &client, &reference, &PullOptions::default())
            .await
            .unwrap();
        assert_tree(&at.store.rootfs(&pulled.digest));
        layers.push(pulled.layers);
        assert_eq!(
            (
                pulled.config.user.as_str(),
                pulled.config.working_dir.as_str()
            ),
            ("1234", "/tmp")
        );
        assert_eq!(pulled.config.cmd, ["/bin/sh"]);
        assert_eq!(
            (
                pulled.unpacked.attributes_dropped,
                pulled.unpacked.devices_skipped
            ),
            (1, 0)
        );
        let mut archive = Vec::new();
        at.store
            .export(
                &pulled.digest.to_string(),
                &mut archive,
                &ExportOptions::default(),
            )
            .unwrap();
        trees.push(archive);
        at.assert_clean();
    }
    assert_eq!(layers[0], layers[1]);
    assert_ne!(layers[0], layers[2], "the layers are compressed by zstd");
    assert!(
        trees.iter().all(|tree| tree.len() == trees[0].len()),
        "the files are the same"
    );
    // Neither a wrong password nor an unknown authority.
    let reference = format!("{}/test/app:oci", registry.authority)
        .parse()
        .unwrap();
    let at = TestStore::new();
    for (client, code) in [
        (registry.client("wrong"), Code::Denied),
        (super::support::registry(), Code::Unavailable),
    ] {
        let error = pull(&at.store, &client, &reference, &PullOptions::default())
            .await
            .unwrap_err();
        assert_eq!(error.code(), code, "{error}");
    }
    assert_eq!(
        registry
            .client("wrong")
            .check_login(&registry.authority)
            .await
            .unwrap_err()
            .code(),
        Code::Denied
    );
    let missing = format!("{}/test/none:1", registry.authority)
        .parse()
        .unwrap();
    let error = pull(&at.store, &client, &missing, &PullOptions::default())
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error}");
}

#[test]
fn files_of_other_tools_are_imported_and_they_read_ours() {
    assert!(
        is_root(),
        "run this test as root: umoci keeps owners only as root"
    );
    let folder = tempfile::tempdir().unwrap();
    let layout = make_layout(folder.path());
    let at = |name: &str| folder.path().join(name);
    let docker = format!("docker-archive:{}:evil:latest", at("docker.tar").display());
    run(
        "skopeo",
        &["--insecure-policy", "copy", "-q", &layout, &docker],
    );
    let oci = format!("oci-archive:{}", at("oci.tar").display());
    run(
        "skopeo",
        &["--insecure-policy", "copy", "-q", &layout, &oci],
    );
    let store = TestStore::new();
    for name in ["layout", "docker.tar", "oci.tar"] {
        let options = ImportOptions {
            name: Some(format!("mine:{name}").parse().unwrap()),
            ..ImportOptions::default()
        };
        let imported = store.store.import(&at(name), &options).unwrap();
        assert_tree(&store.store.rootfs(&imported.digest));
        assert_eq!(imported.config.cmd, ["/bin/sh"], "{name}");
    }
    assert!(store.store.get("evil").is_err());
    store.assert_clean();
    // Our export is one that skopeo and umoci accept.
    let file = fs::File::create(at("ours.tar")).unwrap();
    let name = ExportOptions {
        name: Some("ours:v1".parse().unwrap()),
        ..ExportOptions::default()
    };
    let digest = store.store.export("mine:layout", file, &name).unwrap();
    let ours = format!("oci-archive:{}", at("ours.tar").display());
    let copy = format!("oci:{}:v1", at("copy").display());
    run("skopeo", &["--insecure-policy", "copy", "-q", &ours, &copy]);
    let bundle = at("unpacked").display().to_string();
    run(
        "umoci",
        &[
            "unpack",
            "--image",
            &format!("{}:v1", at("copy").display()),
            &bundle,
        ],
    );
    assert_tree(&at("unpacked/rootfs"));
    assert!(run("skopeo", &["inspect", &ours]).contains(&digest.to_string()));
}
