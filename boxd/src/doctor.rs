//! `doctor`: checks whether this machine can run boxes.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use box_protocol::actions::BoxExecParams;
use box_protocol::{BoxProfile, Network};
use box_runtime::{Backend, BoxRuntime, Caller, Diagnosis, Difference, Feature, RuntimeConfig};
use serde::Serialize;

use crate::{backend, config};

/// The result of all checks.
#[derive(Debug, Serialize)]
struct Report {
    /// Whether a command ran in a test box.
    boxes: bool,
    /// The error of the test box.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(flatten)]
    machine: Diagnosis,
    profiles: Vec<ProfileReport>,
}

/// The limits and gaps of a profile on this machine.
#[derive(Debug, Serialize)]
struct ProfileReport {
    name: String,
    /// Whether the profile can be used.
    boxes: bool,
    /// The missing features.
    missing: Vec<&'static str>,
    cpus: f64,
    memory_mb: u64,
    pids_limit: u64,
    network: Network,
    read_only_rootfs: bool,
}

/// Runs all checks and prints the report. Fails if the machine cannot run boxes.
pub(crate) fn run(json: bool) -> anyhow::Result<ExitCode> {
    let (config, _) = config::load(None, config::variables()?, Vec::new())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (machine, error) = runtime.block_on(async {
        let backend = backend::from_config(&config, None)?;
        let machine = backend.diagnose().await;
        anyhow::Ok((machine, run_test_box(backend).await?))
    })?;
    let report = Report {
        boxes: error.is_none(),
        profiles: profiles(error.is_none(), &machine),
        machine,
        error,
    };
    let text = if json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        crate::output::wrapped(&report.to_string())
    };
    crate::output::print(&text)?;
    Ok(if report.boxes {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs a command in a test box; returns the error if it fails.
async fn run_test_box(backend: Arc<dyn Backend>) -> anyhow::Result<Option<String>> {
    let runtime = BoxRuntime::start(RuntimeConfig::new(vec![backend]));
    let spec = box_protocol::SpecDraft::new("doctor").cmd("true");
    let params: BoxExecParams = serde_json::from_value(serde_json::json!({ "spec": spec }))?;
    let ran = runtime.exec(&Caller::Local, params).await;
    let all = serde_json::from_value(serde_json::json!({"exit": true}))?;
    runtime
        .shutdown(&Caller::Local, all)
        .await
        .context("deleting the test box")?;
    Ok(match ran {
        Ok(result) if result.exit_code == Some(0) => None,
        Ok(result) => Some(format!("the test command failed: {}", result.stderr)),
        Err(error) => Some(error.message().to_owned()),
    })
}

fn profiles(boxes: bool, machine: &Diagnosis) -> Vec<ProfileReport> {
    let built_in = BoxProfile::BUILT_IN.iter();
    let profiles = built_in.filter_map(|name| BoxProfile::built_in(name));
    let report = |profile: BoxProfile| {
        let mut missing: Vec<_> = machine.missing_protections().collect();
        if profile.network == Network::Off {
            missing.retain(|name| *name != "network");
        }
        let network = !missing.contains(&"network");
        ProfileReport {
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
    profiles.map(report).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.error {
            None => writeln!(f, "This machine can run boxes as {}.", self.machine.user)?,
            Some(error) => writeln!(
                f,
                "This machine cannot run boxes as {}: {error}",
                self.machine.user
            )?,
        }
        writeln!(
            f,
            "Root file system: the system directories of this machine, read-only (rootfs: {}).",
            self.machine.rootfs
        )?;
        writeln!(f, "Disks (--disk-mb): {}.", self.machine.disk)?;
        writeln!(
            f,
            "\nKernel features (Landlock version {}):",
            self.machine.landlock
        )?;
        for Feature {
            name,
            required,
            about,
            present,
            ..
        } in &self.machine.features
        {
            let mark = match (present, required) {
                (true, _) => "yes",
                (false, true) => "MISSING",
                (false, false) => "no",
            };
            writeln!(f, "  {mark:<8} {name:<22} {about}")?;
        }
        writeln!(f, "\nDifferences between users:")?;
        for Difference {
            what,
            as_root,
            as_ordinary_user,
        } in self.machine.differences
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

impl fmt::Display for ProfileReport {
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
            "{:<18} {verdict}: {} CPU{}, {} MiB, {} processes, network {}; {missing}",
            self.name,
            self.cpus,
            if self.cpus > 1.0 { "s" } else { "" },
            self.memory_mb,
            self.pids_limit,
            self.network.as_str(),
        )
    }
}
