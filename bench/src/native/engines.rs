//! Other isolation tools: bubblewrap, runc and Docker.
//!
//! Each is configured as close to a box as it comes without a custom profile. Root on Debian gets them installed. If a
//! tool is missing, the benchmark omits its bars and prints the reason.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::spawn;
use crate::debian;

/// How long Docker's daemon may take to start.
const PATIENCE: Duration = Duration::from_secs(30);

/// All tools, with their working directory.
pub(super) struct Engines {
    folder: PathBuf,
    daemon: Option<Child>,
    /// Whether each tool works on this machine.
    pub(super) bubblewrap: bool,
    pub(super) runc: bool,
    pub(super) docker: bool,
}

impl Engines {
    /// Starts the available tools, and prints which are unavailable.
    pub(super) fn start() -> Result<Self> {
        install();
        let folder = std::env::temp_dir().join(format!("box-bench-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let mut this = Self {
            folder,
            daemon: None,
            bubblewrap: false,
            runc: false,
            docker: false,
        };
        this.bubblewrap = works("bubblewrap", &spawn(&mut bubblewrap()));
        let ready = this.root().and_then(|()| this.bundle());
        this.runc = works("runc", &ready.and_then(|()| spawn(&mut this.runc())));
        let ready = this.root().and_then(|()| this.begin_docker());
        this.docker = works("docker", &ready);
        Ok(this)
    }

    /// Returns `runc run` of `/bin/true` with its default specification.
    ///
    /// The specification has every namespace except the user namespace.
    pub(super) fn runc(&self) -> Command {
        let mut command = Command::new("runc");
        command.arg("--root").arg(self.folder.join("runc"));
        command.args(["run", "box-bench"]);
        command.current_dir(&self.folder);
        command
    }

    /// Returns `docker run` of `/bin/true`.
    pub(super) fn docker_run(&self) -> Command {
        self.docker("run --rm --network none box-bench /bin/true")
    }

    /// Returns `docker exec` of `/bin/true` in a running container.
    pub(super) fn docker_exec(&self) -> Command {
        self.docker("exec warm /bin/true")
    }

    /// Gives Docker the Debian image.
    pub(super) fn load_debian(&self) -> Result<()> {
        let archive = self.folder.join("debian.tar");
        debian::docker_archive(&archive, "debian:v1")?;
        spawn(self.docker("load -i").arg(&archive))?;
        spawn(&mut self.docker_run_debian())
    }

    /// Returns `docker run` of `/bin/true` in the Debian image.
    pub(super) fn docker_run_debian(&self) -> Command {
        self.docker("run --rm --network none debian:v1 /bin/true")
    }

    fn docker(&self, words: &str) -> Command {
        let mut command = Command::new("docker");
        let socket = self.folder.join("docker.sock");
        command
            .arg("-H")
            .arg(format!("unix://{}", socket.display()));
        command.args(words.split(' '));
        command
    }

    /// Creates a root directory with one program, so that no image registry is needed.
    fn root(&self) -> Result<()> {
        let root = self.folder.join("rootfs");
        if root.exists() {
            return Ok(());
        }
        for dir in ["bin", "proc", "tmp", "dev", "sys"] {
            fs::create_dir_all(root.join(dir))?;
        }
        fs::copy("/bin/busybox", root.join("bin/busybox")).context("no static busybox")?;
        for name in ["true", "sleep"] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name))?;
        }
        Ok(())
    }

    fn bundle(&self) -> Result<()> {
        spawn(Command::new("runc").arg("spec").current_dir(&self.folder))?;
        let path = self.folder.join("config.json");
        let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
        spec["process"]["terminal"] = json!(false);
        spec["process"]["args"] = json!(["/bin/true"]);
        fs::write(&path, spec.to_string())?;
        Ok(())
    }

    /// Starts a separate Docker daemon with all its state in our directory.
    fn begin_docker(&mut self) -> Result<()> {
        let at = |name: &str| self.folder.join(name);
        let log = fs::File::create(at("log"))?;
        let mut command = Command::new("dockerd");
        command.arg("--data-root").arg(at("data"));
        command.arg("--exec-root").arg(at("exec"));
        command.arg("--pidfile").arg(at("pid"));
        command
            .arg("-H")
            .arg(format!("unix://{}", at("docker.sock").display()));
        command.args(["--bridge", "none", "--iptables=false", "--ip6tables=false"]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let mut daemon = command.spawn().context("no dockerd")?;
        let begun = Instant::now();
        while spawn(&mut self.docker("version")).is_err() {
            if daemon.try_wait()?.is_some() || begun.elapsed() > PATIENCE {
                let _ = end(&mut daemon);
                bail!("dockerd: {}", last_line(&at("log")));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        self.daemon = Some(daemon);
        let tar = self.folder.join("rootfs.tar");
        let mut pack = Command::new("tar");
        spawn(
            pack.arg("-cf")
                .arg(&tar)
                .arg("-C")
                .arg(self.folder.join("rootfs"))
                .arg("."),
        )?;
        spawn(self.docker("import").arg(&tar).arg("box-bench"))?;
        spawn(&mut self.docker("run -d --network none --name warm box-bench /bin/sleep 86400"))?;
        spawn(&mut self.docker_run())
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = spawn(&mut self.docker("rm -f warm"));
            let _ = end(&mut daemon);
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn end(daemon: &mut Child) -> Result<()> {
    let pid = rustix::process::Pid::from_child(daemon);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
    daemon.wait()?;
    Ok(())
}

fn works(name: &str, tried: &Result<()>) -> bool {
    if let Err(error) = tried {
        println!("{name} is not measured: {error:#}");
    }
    tried.is_ok()
}

fn last_line(log: &Path) -> String {
    let log = fs::read_to_string(log).unwrap_or_default();
    log.lines()
        .last()
        .unwrap_or("it does not answer")
        .to_owned()
}

/// Installs missing tools, if this user is root on Debian.
fn install() {
    let there = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if ["bwrap", "runc", "dockerd", "busybox"]
        .into_iter()
        .all(there)
    {
        return;
    }
    let packages = "install -y --no-install-recommends bubblewrap runc docker.io busybox-static";
    for words in ["update", packages] {
        // If the installation fails, the benchmark omits their bars.
        let _ = spawn(Command::new("apt-get").args(words.split(' ')));
    }
}

/// Returns the bubblewrap command that comes closest to a box.
///
/// It has every namespace, a read-only system and a private `/tmp`, but no seccomp, cgroups or Landlock.
pub(super) fn bubblewrap() -> Command {
    let mut command = Command::new("bwrap");
    for dir in ["/usr", "/bin", "/lib", "/lib64", "/sbin"] {
        command.args(["--ro-bind-try", dir, dir]);
    }
    command.args(
        "--unshare-all --new-session --proc /proc --dev /dev --tmpfs /tmp --chdir /tmp /bin/true"
            .split(' '),
    );
    command
}
