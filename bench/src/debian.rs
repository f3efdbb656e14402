//! A Debian image with Python, and a registry that serves it.
//!
//! The image is made once and stored beside this program. Root on Debian gets the tools installed.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

/// The tag of the image in its layout.
const TAG: &str = "v1";
/// How long the registry may take to start.
const PATIENCE: Duration = Duration::from_secs(30);
const TOOLS: &str = "install -y --no-install-recommends docker-registry skopeo umoci mmdebstrap";

/// Returns the OCI layout of the image, and makes it if it does not exist.
pub(crate) fn layout() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let folder = program.parent().and_then(Path::parent);
    let folder = folder
        .context("the program has no directory")?
        .join("bench-debian");
    let layout = folder.join("layout");
    if layout.exists() {
        return Ok(layout);
    }
    install();
    let making = tempfile::tempdir_in(folder.parent().context("no parent")?)?;
    let at = |name: &str| making.path().join(name).display().to_string();
    println!("making a Debian image with Python");
    run(&format!(
        "mmdebstrap --quiet --variant=minbase --include=python3 bookworm {} {}",
        at("rootfs.tar"),
        "/etc/apt/sources.list.d/debian.sources"
    ))?;
    let image = format!("{}:{TAG}", at("layout"));
    run(&format!("umoci init --layout {}", at("layout")))?;
    run(&format!("umoci new --image {image}"))?;
    run(&format!("umoci unpack --image {image} {}", at("bundle")))?;
    let root = Path::new(&at("bundle")).join("rootfs");
    run(&format!(
        "tar -xpf {} -C {}",
        at("rootfs.tar"),
        root.display()
    ))?;
    run(&format!("umoci repack --image {image} {}", at("bundle")))?;
    fs::remove_dir_all(at("bundle"))?;
    fs::remove_file(at("rootfs.tar"))?;
    fs::rename(making.keep(), &folder)?;
    Ok(layout)
}

/// Writes the image as an archive that `docker load` reads.
pub(crate) fn docker_archive(archive: &Path, name: &str) -> Result<()> {
    run(&format!(
        "skopeo --insecure-policy copy -q oci:{}:{TAG} docker-archive:{}:{name}",
        layout()?.display(),
        archive.display()
    ))
}

/// A registry on loopback that ends when it is dropped.
pub(crate) struct Registry {
    process: Child,
    _folder: tempfile::TempDir,
    /// The reference of the image.
    pub(crate) image: String,
}

impl Registry {
    /// Starts a registry with the image.
    pub(crate) fn start() -> Result<Self> {
        let layout = layout()?;
        install();
        let folder = tempfile::tempdir()?;
        let free = TcpListener::bind("127.0.0.1:0")?;
        let address = free.local_addr()?;
        drop(free);
        let config = json!({
            "version": "0.1",
            "storage": {"filesystem": {"rootdirectory": folder.path().join("data")}},
            "http": {"addr": address.to_string()},
            "log": {"level": "error"},
        });
        let file = folder.path().join("config.yml");
        fs::write(&file, config.to_string())?;
        let process = Command::new("docker-registry")
            .arg("serve")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("docker-registry")?;
        let registry = Self {
            process,
            _folder: folder,
            image: format!("{address}/debian:{TAG}"),
        };
        let begun = Instant::now();
        while TcpStream::connect(address).is_err() {
            ensure!(
                begun.elapsed() < PATIENCE,
                "docker-registry does not answer"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        run(&format!(
            "skopeo --insecure-policy copy -q --dest-tls-verify=false oci:{}:{TAG} docker://{}",
            layout.display(),
            registry.image
        ))?;
        Ok(registry)
    }

    /// Copies the image with skopeo and unpacks it with umoci, as its users do without a daemon.
    pub(crate) fn copy_and_unpack(&self, folder: &Path) -> Result<()> {
        let copy = folder.join("copy");
        run(&format!(
            "skopeo --insecure-policy copy -q --src-tls-verify=false docker://{} oci:{}:{TAG}",
            self.image,
            copy.display()
        ))?;
        run(&format!(
            "umoci unpack --image {}:{TAG} {}",
            copy.display(),
            folder.join("bundle").display()
        ))
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Installs missing tools, if this user is root on Debian.
fn install() {
    let there = |program: &str| Command::new(program).arg("--version").output().is_ok();
    let tools = ["docker-registry", "skopeo", "umoci", "mmdebstrap"];
    if tools.into_iter().all(there) {
        return;
    }
    for words in ["update", TOOLS] {
        // A tool that is still missing fails by its name.
        let _ = run(&format!("apt-get -q {words}"));
    }
}

/// Runs a command of words without spaces.
fn run(words: &str) -> Result<()> {
    let mut words = words.split(' ');
    let program = words.next().context("no program")?;
    let ran = Command::new(program)
        .args(words)
        .output()
        .with_context(|| format!("{program}: not installed"))?;
    ensure!(
        ran.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&ran.stderr)
    );
    Ok(())
}
