//! `box_exec`, and the box spec that it shares with `box_create_session`.

use std::sync::Arc;

use box_protocol::actions::{
    BoxCreateParams, BoxExecParams, FileWrite, FileWriteParams, OnTimeout,
};
use box_protocol::{
    BoxError, BoxExecutionResult, BoxId, CommandId, ExecutionStatus, Guest, Invalid, Network,
    Program, PullPolicy, SpecDraft,
};
use box_service::draft_with_session_id;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::Installation;
use super::actions::{Data, DetachUnlessCancelled};
use super::audit;
use super::context::Placement;
use super::errors::stale;
use super::mounts::check_artifacts;
use super::sessions::backend_label;
use super::view::{GATEWAY, timeout_notice};

/// The members of LangBot's spec.
const MEMBERS: &str = "session_id cmd workdir timeout_sec network image env host_path host_path_mode mount_path extra_mounts \
    persistent cpus memory_mb pids_limit read_only_rootfs workspace_quota_mb";

/// The default image.
pub(super) const IMAGE: &str = "rockchin/langbot-sandbox:latest";

/// The maximum bytes of a stream that the gateway keeps.
const MAX_OUTPUT_BYTES: u64 = 1024 * 1024;

/// The maximum length of a command that is passed as an argument.
///
/// The kernel limits an argument to 128 KiB. The gateway passes longer commands through a file, such as those by which
/// LangBot transfers files.
const MAX_ARGUMENT_BYTES: usize = 100 * 1024;

/// The bytes of such a file in one write.
const WRITE_BYTES: usize = 1024 * 1024;

/// The default timeout of a command.
const TIMEOUT_SEC: u64 = 30;

/// The home directory inside a box.
const HOME: &str = "/home";

/// The result of a command in LangBot's format.
#[derive(Debug, Serialize)]
pub(super) struct ExecResult {
    session_id: String,
    backend_name: String,
    status: ExecutionStatus,
    exit_code: Option<i32>,
    stdout: String,
    stderr: String,
    duration_ms: u64,
}

pub(super) async fn exec(
    installation: Arc<Installation>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<ExecResult, BoxError> {
    let (mut spec, id) = installation.spec(&placement, &data).await?;
    if spec
        .cmd
        .as_deref()
        .is_none_or(|cmd| python_strip(cmd).is_empty())
    {
        return Err(Invalid::new("cmd", "must not be empty").into());
    }
    let (network, timeout_sec) = (spec.network, spec.timeout_sec.unwrap_or(TIMEOUT_SEC));
    if spec
        .cmd
        .as_ref()
        .is_some_and(|cmd| cmd.len() > MAX_ARGUMENT_BYTES)
    {
        installation.pass_by_file(&mut spec, &id).await?;
    }
    // LangBot's own backends run commands in a login shell.
    let cmd = spec.cmd.take().unwrap_or_default();
    let params = BoxExecParams {
        program: Some(Program::argv(["sh", "-lc", cmd.trim()])?),
        on_timeout: OnTimeout::DropBox,
        ..BoxExecParams::new(spec)
    };
    let outcome = {
        let (runtime, caller) = (installation.runtime_for_create(), installation.caller());
        // The lease also ends the command with its placement after the connection has closed.
        let lease = installation.enter(&placement).await?;
        let run = async move {
            tokio::select! {
                biased;
                outcome = runtime.exec(&caller, params) => outcome,
                () = lease.stale() => Err(stale()),
            }
        };
        DetachUnlessCancelled::new(data.cancellation, run).await
    };
    let result = match outcome {
        Ok(result) => result,
        Err(error) => return installation.in_langbot_terms(Err(error), &id).await,
    };
    audit::finished(&installation.owner.name(), &result);
    if result.status == ExecutionStatus::TimedOut {
        installation.processes.forget_session(&id);
    }
    let mut executed = ExecResult::new(result, timeout_sec);
    executed.session_id = placement.logical(id.as_str()).to_owned();
    if network == Some(Network::On)
        && let Ok(info) = installation.runtime.get(&installation.caller(), &id).await
    {
        executed.backend_name = backend_label(&executed.backend_name, &info.degraded);
    }
    Ok(executed)
}

impl ExecResult {
    fn new(result: BoxExecutionResult, timeout_sec: u64) -> Self {
        let timed_out = result.status == ExecutionStatus::TimedOut;
        let stdout = format_output(&result.stdout, result.stdout_dropped);
        let mut stderr = format_output(&result.stderr, result.stderr_dropped);
        if timed_out && stderr.is_empty() {
            stderr = timeout_notice(timeout_sec);
        }
        Self {
            session_id: String::new(),
            backend_name: result.backend_name,
            status: result.status,
            exit_code: result.exit_code,
            stdout,
            stderr,
            duration_ms: result.duration_ms,
        }
    }
}

/// Formats output as LangBot's backends do: trimmed, with a notice of truncation.
fn format_output(output: &str, dropped: u64) -> String {
    let mut text = python_strip(output).to_owned();
    if dropped > 0 {
        let notice = format!(
            "\n... [raw output clipped at {MAX_OUTPUT_BYTES} bytes, {dropped} bytes discarded]"
        );
        text.push_str(&notice);
    }
    text
}

/// Strips the characters that Python treats as whitespace from both ends.
fn python_strip(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || matches!(c, '\x1c'..='\x1f'))
}

impl Installation {
    /// Writes an overlong command to a file in its box, and runs the file instead.
    async fn pass_by_file(&self, spec: &mut SpecDraft, id: &BoxId) -> Result<(), BoxError> {
        let cmd = spec.cmd.take().unwrap_or_default();
        let created = BoxCreateParams::new(spec.clone());
        let caller = self.caller();
        let created = self.runtime_for_create().create(&caller, created).await;
        self.in_langbot_terms(created, id).await?;
        let path = format!("/tmp/.box-exec-{}", CommandId::fresh());
        for chunk in cmd.as_bytes().chunks(WRITE_BYTES) {
            let written = FileWriteParams {
                append: true,
                ..FileWriteParams::new(id.clone(), &*path, chunk.to_vec())
            };
            self.runtime.forward::<FileWrite>(&caller, &written).await?;
        }
        spec.cmd = Some(format!("eval \"$(cat {path} && rm -f {path})\""));
        Ok(())
    }

    /// Returns the spec of a call, with the gateway's additions, and the box id.
    ///
    /// The spec's host paths are resolved and may be mounted.
    pub(super) async fn spec(
        &self,
        placement: &Placement,
        data: &RawValue,
    ) -> Result<(SpecDraft, BoxId), BoxError> {
        self.refuse_if_closing()?;
        let members: Map<String, Value> =
            serde_json::from_str(data.get()).map_err(Invalid::from)?;
        let is_unknown = |name: &&String| !MEMBERS.split(' ').any(|member| member == *name);
        let unknown = members.keys().find(is_unknown).cloned();
        let mut draft = draft_with_session_id(members)?;
        check_artifacts(draft.extra_mounts.as_deref().unwrap_or_default())?;
        if let Some(unknown) = unknown {
            return Err(Invalid::new(unknown, "not a member of LangBot's spec").into());
        }
        let name = draft.box_id.as_deref().map(python_strip);
        if name.is_none_or(str::is_empty) {
            return Err(Invalid::new("session_id", "must not be empty").into());
        }
        let image = draft.image.get_or_insert_with(|| IMAGE.to_owned()).clone();
        if draft
            .host_path
            .as_deref()
            .is_some_and(|path| path.trim().is_empty())
        {
            return Err(Invalid::new("host_path", "must be an absolute host path").into());
        }
        self.admit_spec(placement, &mut draft).await?;
        let id = placement
            .physical(draft.box_id.as_deref().unwrap_or_default())
            .map_err(|error| BoxError::validation(error.message()))?;
        draft.box_id = Some(id.as_str().to_owned());
        // Validate the fields before the file system is accessed.
        draft.clone().build()?;
        if let Some(service) = &self.policy {
            draft = service.decide_spec(draft, &self.owner, &GATEWAY).await?;
        } else {
            self.resolve_mounts(&mut draft).await?;
            audit::allowed(&self.owner.name(), &draft);
        }
        draft.gateway = Some(GATEWAY);
        draft.guest = Some(Guest {
            name: "box".to_owned(),
            home: HOME.to_owned(),
        });
        relax(&mut draft, &image);
        Ok((draft, id))
    }
}

/// Marks what the box may lack. `image` is the one that LangBot asked for.
fn relax(draft: &mut SpecDraft, image: &str) {
    let mut best_effort = Vec::new();
    // LangBot names an image that this machine need not have. The image of a profile is required.
    if draft.image.as_deref().map(str::trim) == Some(image.trim()) {
        draft.pull = Some(PullPolicy::Never);
        best_effort.push("image".to_owned());
    }
    // The network is never wider than requested; without one, the box reports that it is offline.
    if draft.network == Some(Network::On) {
        best_effort.push("network".to_owned());
    }
    draft.best_effort = Some(best_effort);
}

#[cfg(test)]
mod tests {
    use box_protocol::{Exit, ExitWhy};

    use super::*;

    fn result(exit: Exit, stdout: &str, stderr: &str) -> BoxExecutionResult {
        let id = BoxId::new("s").unwrap();
        BoxExecutionResult::new(id, "fake", exit, 7)
            .unwrap()
            .with_output(stdout, stderr)
    }

    #[test]
    fn output_is_trimmed_as_python_does() {
        let executed =
            ExecResult::new(result(Exit::returned(0), "\x1c\u{a0} a b \x1f\n", "\n"), 30);
        assert_eq!(
            (executed.stdout.as_str(), executed.stderr.as_str()),
            ("a b", "")
        );
    }

    #[test]
    fn the_image_of_a_profile_is_required_and_that_of_langbot_is_not() {
        let relaxed = |image: Option<&str>| {
            let mut draft = SpecDraft::new("s");
            draft.image = image.map(str::to_owned);
            draft.network = Some(Network::On);
            relax(&mut draft, IMAGE);
            (draft.pull, draft.best_effort.unwrap())
        };
        let of_langbot = relaxed(Some(&format!(" {IMAGE} ")));
        let both = vec!["image".to_owned(), "network".to_owned()];
        assert_eq!(of_langbot, (Some(PullPolicy::Never), both));
        // The policy has replaced it, also by the directories of the host.
        for of_profile in [Some("internal/tools:1"), None] {
            assert_eq!(relaxed(of_profile), (None, vec!["network".to_owned()]));
        }
    }

    #[test]
    fn truncated_output_has_a_notice() {
        let mut cut = result(Exit::returned(0), "abc \n", "");
        cut.stdout_dropped = 12;
        let executed = ExecResult::new(cut, 30);
        assert_eq!(
            executed.stdout,
            "abc\n... [raw output clipped at 1048576 bytes, 12 bytes discarded]"
        );
    }

    #[test]
    fn a_timeout_without_stderr_has_a_notice() {
        let exit = Exit::by_signal(9, ExitWhy::Timeout);
        let executed = ExecResult::new(result(exit, "so far\n", " \n"), 3);
        assert_eq!(executed.stderr, "Command timed out after 3 seconds.");
        assert_eq!(
            (executed.exit_code, executed.stdout.as_str()),
            (None, "so far")
        );
        assert_eq!(ExecResult::new(result(exit, "", "why"), 3).stderr, "why");
    }
}
