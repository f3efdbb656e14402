//! What this machine can do for boxes.

use std::fmt;
use std::process::ExitCode;

use anyhow::Context as _;
use box_protocol::actions::BoxExecParams;
use box_protocol::{BoxProfile, Network};
use box_runtime::native::{NativeBackend, NativeConfig, primitives};
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use serde::Serialize;

use crate::primitives::{DIFFERENCES, Difference, Primitive, all};

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Report {
    /// Whether a box was made and a command ran in it.
    boxes: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Whose boxes these would be.
    user: &'static str,
    /// What the system directories of a box are, until there are images.
    rootfs: &'static str,
    /// The version of Landlock.
    landlock: u32,
    primitives: Vec<Primitive>,
    differences: &'static [Difference],
    profiles: Vec<Gives>,
}

/// What a profile would give on this machine.
#[derive(Debug, Serialize)]
struct Gives {
    name: String,
    /// Whether its boxes would be made.
    boxes: bool,
    /// What for not, or what they would go without.
    missing: Vec<String>,
    cpus: f64,
    memory_mb: u64,
    pids_limit: u64,
    network: Network,
    read_only_rootfs: bool,
}

/// Looks, tries, and tells. Fails if no box can be made.
pub(crate) fn run(json: bool) -> anyhow::Result<ExitCode> {
    let found = primitives();
    let error = try_it()?;
    let missing = found.missing();
    let report = Report {
        boxes: error.is_none(),
        user: if found.privileged {
            "root"
        } else {
            "an ordinary user"
        },
        rootfs: "host",
        landlock: found.landlock,
        primitives: all(&missing),
        differences: &DIFFERENCES,
        profiles: profiles(error.is_none(), &missing),
        error,
    };
    let text = if json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        crate::output::wrapped(&report.to_string())
    };
    crate::output::say(&text)?;
    Ok(if report.boxes {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Makes a box and runs a command in it; why that did not work.
fn try_it() -> anyhow::Result<Option<String>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let backend = NativeBackend::new(NativeConfig::this_program()?);
        let boxes = BoxRuntime::start(RuntimeConfig::with(backend));
        let spec = box_protocol::SpecDraft::new("doctor").cmd("true");
        let asked: BoxExecParams = serde_json::from_value(serde_json::json!({ "spec": spec }))?;
        let ran = boxes.exec(&Caller::local(), asked).await;
        let all = serde_json::from_value(serde_json::json!({"exit": true}))?;
        boxes
            .shutdown(&Caller::local(), all)
            .await
            .context("deleting the test box")?;
        Ok(match ran {
            Ok(result) if result.exit_code == Some(0) => None,
            Ok(result) => Some(format!("the test command failed: {}", result.stderr)),
            Err(error) => Some(error.message().to_owned()),
        })
    })
}

fn profiles(boxes: bool, missing: &[String]) -> Vec<Gives> {
    let built_in = BoxProfile::BUILT_IN.iter();
    let profiles = built_in.filter_map(|name| BoxProfile::built_in(name));
    let gives = |profile: BoxProfile| {
        let mut missing = missing.to_vec();
        // Without a gate a box is as safe as with one, and disks are limited only where an operator asks for that.
        missing.retain(|name| name != "network.gate" && name != "cgroup.io");
        if profile.network == Network::Off {
            missing.retain(|name| name != "network");
        }
        let network = !missing.iter().any(|name| name == "network");
        Gives {
            boxes: boxes && network && (!profile.strict || missing.is_empty()),
            name: profile.name.to_string(),
            missing,
            cpus: profile.cpus,
            memory_mb: profile.memory_mb,
            pids_limit: profile.pids_limit,
            network: profile.network,
            read_only_rootfs: profile.read_only_rootfs,
        }
    };
    profiles.map(gives).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.error {
            None => writeln!(f, "This machine can run boxes as {}.", self.user)?,
            Some(error) => writeln!(f, "This machine cannot run boxes as {}: {error}", self.user)?,
        }
        writeln!(
            f,
            "Root filesystem: the system directories of this machine, read-only (rootfs: {}).",
            self.rootfs
        )?;
        writeln!(f, "\nKernel features (Landlock version {}):", self.landlock)?;
        for Primitive {
            name,
            required,
            about,
            present,
        } in &self.primitives
        {
            let mark = match (present, required) {
                (true, _) => "yes",
                (false, true) => "MISSING",
                (false, false) => "no",
            };
            writeln!(f, "  {mark:<8} {name:<18} {about}")?;
        }
        writeln!(f, "\nDifferences between users:")?;
        for Difference {
            what,
            as_root,
            as_ordinary_user,
        } in self.differences
        {
            writeln!(
                f,
                "  {what}\n    as root: {as_root}\n    as an ordinary user: {as_ordinary_user}"
            )?;
        }
        writeln!(f, "\nProfiles on this machine:")?;
        for profile in &self.profiles {
            writeln!(f, "  {profile}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Gives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.boxes {
            "available"
        } else {
            "unavailable"
        };
        let missing = if self.missing.is_empty() {
            "nothing missing".to_owned()
        } else {
            format!("missing: {}", self.missing.join(", "))
        };
        write!(
            f,
            "{:<18} {verdict}: {} CPUs, {} MiB, {} processes, network {}; {missing}",
            self.name,
            self.cpus,
            self.memory_mb,
            self.pids_limit,
            self.network.as_str(),
        )
    }
}
