//! Options of a new box, for `run` and `shell`.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use box_client::{Network, NetworkPolicy, NetworkRule, SpecDraft};
use box_protocol::{
    BoxMountSpec, DEFAULT_MOUNT_PATH, Defaults, HOST_IMAGE, HostPathMode, ItemRef, Lifetime,
    LifetimeAction, LifetimeChange, Prepare, Program as BoxProgram, PullPolicy, UnixMs,
    VolumeMount,
};
use clap::{Args, ValueEnum};

use super::{ConfigFile, ExecOptions};
use crate::{complete, toolchains, values};

/// An idle time that never ends: the largest integer that every JSON parser preserves.
pub(crate) const FOREVER_MS: u64 = (1 << 53) - 1;

const BOX: &str = "Box";
const FILES: &str = "Files";
const NETWORK: &str = "Network";
const LIMITS: &str = "Limits";

const RUN_EXAMPLES: &str = "\
Examples:
  boxd run 'echo $HOSTNAME; id'
  boxd run --workspace . -m 256m --timeout 2m 'make test'
  cat data.csv | boxd run -- python3 -c 'import sys; print(len(sys.stdin.read()))'
  boxd run --allow pypi.org --allow files.pythonhosted.org 'pip download requests'
  boxd run -it bash
  boxd run --image python:3.12 -- python3 -c 'print(1)'
  boxd run -d --name work --keep 'make all'     requires a server: boxd serve
Exit codes: the command's own, or 122 (quota exceeded), 124 (timeout), 125 (boxd failed),
126 (program not executable) and 127 (program not found).
With --json, each chunk of output is a line {\"stream\", \"offset\", \"at\", \"text\"}; {\"exit\"} is last.";

pub(super) const MCP_EXAMPLES: &str = "\
Examples:
  boxd mcp                                    a box with private files
  boxd mcp --workspace . --allow pypi.org     mount this directory and allow one host
  claude mcp add box -- boxd mcp              use it in Claude Code
  boxd mcp --box work                         the box `work` of a server, which is kept
The first call creates the box. Without --box, it is deleted with the connection. --ttl deletes a
box that is idle. See docs/mcp.md.";

pub(super) const CODEX_EXAMPLES: &str = "\
Examples:
  boxd codex-exec --workspace .               this directory, under its own path
  boxd codex-exec                             an empty directory under that path
  boxd codex-exec --box work                  the box `work` of a server, which is kept
Codex starts it: in $CODEX_HOME/environments.toml (~/.codex/environments.toml), write
  default = \"box\"
  [[environments]]
  id = \"box\"
  program = \"boxd\"
  args = [\"codex-exec\", \"--workspace\", \".\"]
The first request creates the box. Without --box, it is deleted with the connection.
See docs/codex.md.";

/// Describes `--workspace` for Codex, which names directories of this machine.
pub(super) fn codex_workspace(option: clap::Arg) -> clap::Arg {
    option.help("Mount a directory under its own path; with :overlay, keep changes in the box until boxd apply")
}

#[derive(Debug, Args)]
pub(crate) struct McpArgs {
    /// Use this box of a server, created if missing, and keep it
    #[arg(add = complete::boxes(), long = "box", value_name = "NAME", help_heading = BOX)]
    pub(crate) box_name: Option<String>,
    #[command(flatten)]
    pub(crate) options: BoxOptions,
}

#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// Shell script to run, as one argument [default: the command of the image]
    #[arg(
        value_name = "SCRIPT",
        required_unless_present_any = ["argv", "image"],
        conflicts_with = "argv"
    )]
    pub(crate) text: Option<String>,
    /// Program and arguments to run without a shell
    #[arg(last = true, value_name = "ARGV")]
    pub(crate) argv: Vec<String>,
    #[command(flatten)]
    pub(crate) exec_options: ExecOptions,
    /// Run in the background on a server and print BOX/COMMAND
    #[arg(short, long, conflicts_with_all = ["tty", "interactive"])]
    pub(crate) detach: bool,
    /// Name the box, keep it and reuse it; requires a server
    #[arg(add = complete::boxes(), long, value_name = "NAME", help_heading = BOX)]
    pub(crate) name: Option<String>,
    /// Delete the box after the command; the default without --name
    #[arg(long, help_heading = BOX, conflicts_with_all = ["keep", "ttl"])]
    pub(crate) rm: bool,
    #[command(flatten)]
    pub(crate) options: BoxOptions,
}

impl RunArgs {
    /// Moves the user of the command to the box, if the box has an image: a box has one user.
    ///
    /// With JSON on stdout, stderr has only JSON too.
    pub(crate) fn settle(&mut self, json: bool) {
        self.options.quiet |= json;
        if self.options.image.is_some() {
            self.options.user = self.exec_options.user.take();
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd shell                     open a shell in a new box; requires no server
  boxd shell --workspace .       mount this directory as /workspace
  boxd shell work                open a shell in the box `work` and keep the box")]
pub(crate) struct ShellArgs {
    /// Box on the server, created if missing [default: a box that ends with the shell]
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) name: Option<String>,
    /// Shell to run [default: the shell of the box, else bash, else sh]
    #[arg(long)]
    pub(crate) shell: Option<String>,
    #[command(flatten)]
    pub(crate) options: BoxOptions,
}

/// Options of the box: lifetime, files, network and limits.
#[derive(Debug, Args)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a flag of the command line"
)]
pub(crate) struct BoxOptions {
    /// Delete a named box after this idle time (90, 30m, 2d) [default: the server's]
    #[arg(long, value_name = "TIME", value_parser = values::duration, conflicts_with = "keep", help_heading = BOX)]
    pub(crate) ttl: Option<Duration>,
    /// Delete, stop or pause a named box that is idle [default: delete]
    #[arg(long, value_enum, value_name = "ACTION", help_heading = BOX)]
    pub(crate) on_idle: Option<Action>,
    /// Expire a named box after this time, even if it is in use
    #[arg(long, value_name = "TIME", value_parser = values::duration, help_heading = BOX)]
    pub(crate) expire: Option<Duration>,
    /// Delete, stop or pause a named box that has expired [default: delete]
    #[arg(long, value_enum, value_name = "ACTION", requires = "expire", help_heading = BOX)]
    pub(crate) on_expiry: Option<Action>,
    /// Start or resume a named box when it is used
    #[arg(long, help_heading = BOX)]
    pub(crate) wake: bool,
    /// Keep a named box until it is deleted
    #[arg(long, help_heading = BOX)]
    pub(crate) keep: bool,
    /// Use this image as the root file system; pull it if it is missing
    #[arg(add = complete::images(), long, value_name = "NAME", help_heading = BOX)]
    pub(crate) image: Option<String>,
    /// Begin with the files of this snapshot; requires a server
    #[arg(add = complete::snapshots(), long, value_name = "NAME", conflicts_with = "image", help_heading = BOX)]
    pub(crate) snapshot: Option<String>,
    /// Pull the image: missing, always or never [default: missing]
    #[arg(long, value_enum, value_name = "WHEN", hide_possible_values = true, requires = "image", help_heading = BOX)]
    pub(crate) pull: Option<Pull>,
    /// Print no progress of a pull
    #[arg(short, long, requires = "image", help_heading = BOX)]
    pub(crate) quiet: bool,
    /// The user of a new box on an image.
    #[arg(skip)]
    pub(crate) user: Option<String>,
    /// Fill unset options from this template of the server
    #[arg(add = complete::templates(), long, value_name = "NAME", help_heading = BOX)]
    pub(crate) template: Option<String>,
    /// Take the box from this pool of the server, and use its template
    #[arg(add = complete::pools(), long, value_name = "NAME", help_heading = BOX)]
    pub(crate) pool: Option<String>,
    /// Run this script before the box is ready; repeatable
    #[arg(long, value_name = "SCRIPT", help_heading = BOX)]
    pub(crate) prepare: Vec<String>,
    /// Limit the time of all --prepare scripts together [default: 5m]
    #[arg(long, value_name = "TIME", value_parser = values::duration, requires = "prepare", help_heading = BOX)]
    pub(crate) prepare_timeout: Option<Duration>,
    /// Use this profile; not allowed with a server
    #[arg(long, value_name = "NAME", help_heading = BOX)]
    pub(crate) profile: Option<String>,
    /// Fail if the machine cannot enforce every protection and limit
    #[arg(long, help_heading = BOX)]
    pub(crate) strict: bool,
    #[command(flatten)]
    pub(crate) config: ConfigFile,
    /// Mount a directory as /workspace; with :overlay, keep changes in the box until boxd apply
    #[arg(long, value_name = "DIR[:ro|:overlay]", help_heading = FILES)]
    pub(crate) workspace: Option<String>,
    /// Mount a directory, read-only unless :rw is given
    #[arg(long, value_name = "DIR:PATH[:rw]", help_heading = FILES)]
    pub(crate) mount: Vec<String>,
    /// Mount a volume, or a directory (with a slash), read-write; sub=DIR selects a directory of a volume
    #[arg(short, long, value_name = "NAME|DIR:PATH[:ro|:sub=DIR]", help_heading = FILES)]
    pub(crate) volume: Vec<String>,
    /// Mount toolchains of your home directory read-only: rustup, uv, nvm, pyenv, volta, bun, deno, go
    #[arg(long, help_heading = FILES)]
    pub(crate) with_toolchains: bool,
    /// Limit the workspace to this many MiB
    #[arg(long, value_name = "MIB", help_heading = FILES)]
    pub(crate) quota_mb: Option<u64>,
    /// Make the root file system writable [default with --image or --snapshot]
    #[arg(long, help_heading = FILES)]
    pub(crate) writable: bool,
    /// Make the root file system read-only [default without --image and --snapshot]
    #[arg(long, conflicts_with = "writable", help_heading = FILES)]
    pub(crate) read_only: bool,
    /// Enable or disable the network [default: off, unless the profile enables it]
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, help_heading = NETWORK)]
    pub(crate) network: Option<Switch>,
    /// Allow connections only to this host; repeatable (*.github.com:443, 10.1.2.0/24)
    #[arg(long, value_name = "HOST[:PORT]", help_heading = NETWORK)]
    pub(crate) allow: Vec<NetworkRule>,
    /// Use `boxd port` instead
    #[arg(short, long, hide = true, value_name = "PORT")]
    pub(crate) publish: Vec<String>,
    /// Limit CPU time, in CPUs: 2, 0.5
    #[arg(long, value_name = "N", help_heading = LIMITS)]
    pub(crate) cpus: Option<f64>,
    /// Limit memory, in MiB or with a unit: 512m, 2g
    #[arg(short, long, alias = "memory", value_name = "MIB", value_parser = values::mebibytes, help_heading = LIMITS)]
    pub(crate) memory_mb: Option<u64>,
    /// Limit private files, in MiB or with a unit: 10g; large limits use disk
    #[arg(long, alias = "disk", value_name = "MIB", value_parser = values::mebibytes, help_heading = LIMITS)]
    pub(crate) disk_mb: Option<u64>,
    /// Limit processes and threads
    #[arg(long, alias = "pids-limit", value_name = "N", help_heading = LIMITS)]
    pub(crate) pids: Option<u64>,
}

/// A directory of the host, and how it is mounted.
type Workspace = (String, HostPathMode);

impl BoxOptions {
    /// The spec of a box with this id.
    ///
    /// It names every field of a spec, so that a new field needs an option here, or `None`.
    pub(crate) fn spec(&self, box_id: String) -> Result<SpecDraft> {
        if let Some(port) = self.publish.first() {
            bail!(
                "-p {port}: boxes publish no ports on this machine; use -d --name NAME, then `boxd port NAME PORT`"
            );
        }
        ensure!(
            self.allow.is_empty() || self.network != Some(Switch::Off),
            "--allow: requires a network; omit --network off"
        );
        let (workspace, mut mounts, volumes) = self.mounts()?;
        let (host_path, host_path_mode) = workspace.unzip();
        let mut defaults = None;
        if self.with_toolchains {
            let found = toolchains::find()?;
            mounts.extend(found.mounts);
            let env = &mut defaults.insert(Defaults::default()).env;
            for (name, value) in found.variables {
                env.insert(name, value)?;
            }
        }
        let network_policy = (!self.allow.is_empty()).then(|| NetworkPolicy {
            allow: Some(self.allow.clone()),
            ..NetworkPolicy::default()
        });
        let network = match self.network {
            Some(Switch::On) => Some(Network::On),
            Some(Switch::Off) => Some(Network::Off),
            None => network_policy.is_some().then_some(Network::On),
        };
        let lifetime = self.has_lifetime().then(|| self.lifetime());
        Ok(SpecDraft {
            box_id: Some(box_id),
            network,
            network_policy: network_policy.map(Box::new),
            image: self.image.clone(),
            snapshot: self.snapshot.as_ref().map(ItemRef::new).transpose()?,
            pull: self.pull.map(Pull::policy),
            user: self.user.clone(),
            host_path,
            host_path_mode,
            extra_mounts: (!mounts.is_empty()).then_some(mounts),
            volumes: (!volumes.is_empty()).then_some(volumes),
            cpus: self.cpus,
            memory_mb: self.memory_mb,
            pids_limit: self.pids,
            read_only_rootfs: self.read_only_rootfs(),
            workspace_quota_mb: self.quota_mb,
            disk_mb: self.disk_mb,
            lifetime,
            defaults,
            cmd: None,
            workdir: None,
            timeout_sec: None,
            env: None,
            mount_path: None,
            persistent: None,
            name: None,
            labels: None,
            note: None,
            gateway: None,
            template: self.template.as_ref().map(ItemRef::new).transpose()?,
            pool: self.pool.as_ref().map(ItemRef::new).transpose()?,
            prepare: self.prepare()?,
            main: None,
            guest: None,
            dirs: None,
            best_effort: None,
        })
    }

    /// Whether the root is read-only; `None` leaves it to the profile.
    ///
    /// Users install packages into an image, and its files stay as they are.
    fn read_only_rootfs(&self) -> Option<bool> {
        let has_image = self
            .image
            .as_deref()
            .is_some_and(|image| image != HOST_IMAGE);
        let is_writable = self.writable || has_image || self.snapshot.is_some();
        match (self.read_only, is_writable) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        }
    }

    /// Whether the box needs items of a server.
    pub(crate) fn needs_server(&self) -> bool {
        let mut volumes = self.volume.iter();
        let names_item = self.template.is_some() || self.pool.is_some();
        let names_item = names_item || self.snapshot.is_some();
        names_item || volumes.any(|volume| !values::is_directory(volume))
    }

    /// The commands that run before the box is ready.
    fn prepare(&self) -> Result<Option<Prepare>> {
        let commands = self.prepare.iter().map(|text| Ok(BoxProgram::text(text)?));
        let mut prepare = Prepare::new(commands.collect::<Result<_>>()?);
        if let Some(timeout) = self.prepare_timeout {
            prepare.timeout_sec = timeout.as_secs().max(1);
        }
        Ok((!prepare.commands.is_empty()).then_some(prepare))
    }

    /// The workspace, the other mounts of directories, and the volumes.
    fn mounts(&self) -> Result<(Option<Workspace>, Vec<BoxMountSpec>, Vec<VolumeMount>)> {
        let workspace = self.workspace.as_deref().map(values::workspace);
        let mut workspace = workspace.transpose()?;
        let mounts = self.mount.iter().map(|mount| values::mount(mount));
        let mut mounts: Vec<_> = mounts.collect::<Result<_>>()?;
        let mut volumes = Vec::new();
        for volume in &self.volume {
            if !values::is_directory(volume) {
                volumes.push(values::volume(volume)?);
                continue;
            }
            let mount = values::directory_volume(volume)?;
            // The workspace has its own option.
            if mount.mount_path != DEFAULT_MOUNT_PATH {
                mounts.push(mount);
            } else if workspace.is_some() {
                bail!(
                    "-v {volume}: conflicts with --workspace, which also mounts {DEFAULT_MOUNT_PATH}; use one of them"
                );
            } else {
                workspace = Some((mount.host_path, mount.mode));
            }
        }
        Ok((workspace, mounts, volumes))
    }

    /// Whether to pull an image that the server does not have.
    pub(crate) fn pulls_missing(&self) -> bool {
        matches!(self.pull, None | Some(Pull::Missing))
    }

    /// Whether an option sets the lifetime of the box.
    pub(crate) fn has_lifetime(&self) -> bool {
        self.lifetime_option().is_some()
    }

    /// The first given option that sets the lifetime of the box.
    pub(crate) fn lifetime_option(&self) -> Option<&'static str> {
        let options = [
            ("--keep", self.keep),
            ("--ttl", self.ttl.is_some()),
            ("--expire", self.expire.is_some()),
            ("--on-idle", self.on_idle.is_some()),
            ("--on-expiry", self.on_expiry.is_some()),
            ("--wake", self.wake),
        ];
        let mut given = options.into_iter().filter(|(_, given)| *given);
        given.next().map(|(option, _)| option)
    }

    fn lifetime(&self) -> Lifetime {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(FOREVER_MS);
        let after = |time| UnixMs(UnixMs::now().0.saturating_add(millis(time)).min(FOREVER_MS));
        Lifetime {
            idle_ms: self.idle_ms(),
            on_idle: self.on_idle.unwrap_or_default().into(),
            expires_at: self.expire.map(after),
            on_expiry: self.on_expiry.unwrap_or_default().into(),
            wake: self.wake,
            ..Lifetime::default()
        }
    }

    /// The changes of the lifetime of an existing box: what the options set.
    pub(crate) fn lifetime_change(&self) -> LifetimeChange {
        let lifetime = self.lifetime();
        LifetimeChange {
            idle_ms: lifetime.idle_ms.map(Some),
            on_idle: self.on_idle.map(Into::into),
            expires_at: lifetime.expires_at.map(Some),
            on_expiry: self.on_expiry.map(Into::into),
            wake: self.wake.then_some(true),
            ..LifetimeChange::default()
        }
    }

    /// The idle time of the box, if an option sets it.
    fn idle_ms(&self) -> Option<u64> {
        let ttl = self.ttl.map(|ttl| u64::try_from(ttl.as_millis()));
        let ttl = ttl.map(|ttl| ttl.unwrap_or(FOREVER_MS).min(FOREVER_MS));
        ttl.or(self.keep.then_some(FOREVER_MS))
    }
}

/// When to pull an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pull {
    Missing,
    Always,
    Never,
}

impl Pull {
    pub(crate) fn policy(self) -> PullPolicy {
        match self {
            Self::Missing => PullPolicy::Missing,
            Self::Always => PullPolicy::Always,
            Self::Never => PullPolicy::Never,
        }
    }
}

/// What happens to a box that is idle or has expired.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Action {
    #[default]
    Delete,
    Stop,
    Pause,
}

impl From<Action> for LifetimeAction {
    fn from(action: Action) -> Self {
        match action {
            Action::Delete => Self::Delete,
            Action::Stop => Self::Stop,
            Action::Pause => Self::Pause,
        }
    }
}

/// A switch: on or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    #[value(alias = "bridge")]
    On,
    #[value(alias = "none")]
    Off,
}
