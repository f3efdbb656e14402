//! Managed processes: commands with the role `process`, several per box.
//!
//! A process outlives the connection that started it. The gateway watches each process until it ends. It can therefore
//! count running processes without asking every box, keep their boxes in use, and record the end.

mod model;
mod registry;

use std::sync::Arc;

use box_protocol::actions::{
    CommandAttachParams, CommandChunk, CommandInputParams, CommandKey, CommandKillParams,
    CommandListParams, CommandStartParams, FileMkdir, FileMkdirParams, ReadFrom, StreamName, Until,
    View,
};
use box_protocol::{
    BoxError, BoxId, Code, CommandId, CommandInfo, CommandState, DEFAULT_MOUNT_PATH, Invalid,
    PerStream, Role,
};
use box_runtime::{BoxRuntime, Caller};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

pub(super) use self::model::DEFAULT_PROCESS_ID;
use self::model::{BoxManagedProcessInfo, BoxManagedProcessSpec};
pub(super) use self::registry::{Attachment, Processes};
use self::registry::{Key, Process};
use super::Installation;
use super::actions::{Data, as_text, members, required, run_to_completion};
use super::context::Placement;
use super::errors::{admission, key_error, no_process};

/// The maximum characters of standard error in the description of a process.
const PREVIEW_CHARS: usize = 4000;

/// How long a process may take to end after `SIGTERM`.
const GRACE_MS: u64 = 5_000;

/// Records the end of a process, and keeps its box in use until then.
fn watch(
    processes: Arc<Processes>,
    runtime: BoxRuntime,
    caller: Caller,
    key: Key,
    process: Arc<Process>,
) {
    tokio::spawn(async move {
        let (sender, _none) = mpsc::channel(1);
        let until_exit = CommandAttachParams {
            view: View::None,
            ..CommandAttachParams::new(key.0.clone(), key.1.clone())
        };
        match runtime.attach_command(&caller, until_exit, sender).await {
            Ok(_) => process.ended(),
            // The box is deleted, and its processes with it.
            Err(_) => processes.forget(&key, &process),
        }
    });
}

pub(super) async fn start(
    installation: Arc<Installation>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let members = members(&data)?;
    let id = installation.physical(&placement, &required(&members, "session_id")?)?;
    let spec = members.get("spec").ok_or_else(|| key_error("spec"))?;
    let spec: BoxManagedProcessSpec =
        serde_json::from_value(spec.clone()).map_err(Invalid::from)?;
    if let Some(grant) = installation.require_grant(&placement).await?
        && grant.max_managed_processes == 0
    {
        return Err(admission(
            "Sandbox admission grant does not permit managed processes",
        ));
    }
    let info = {
        let installation = Arc::clone(&installation);
        run_to_completion(async move { installation.start_process(id, spec).await })
    };
    let info = info.await?;
    Ok(process_view(
        &installation,
        &placement,
        &info,
        String::new(),
    ))
}

pub(super) async fn get(
    installation: Arc<Installation>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let (key, info) = find_process(&installation, &placement, &data).await?;
    let preview = installation.preview(&key, &info).await;
    Ok(process_view(&installation, &placement, &info, preview))
}

pub(super) async fn stop(
    installation: Arc<Installation>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let (key, info) = find_process(&installation, &placement, &data).await?;
    let stopped = json!({"stopped": info.command_id});
    run_to_completion(async move { installation.stop_process(key).await }).await?;
    Ok(stopped)
}

/// Returns every process of a box, by its id.
pub(super) async fn all(
    installation: &Arc<Installation>,
    placement: &Placement,
    session: &BoxId,
) -> Result<Map<String, Value>, BoxError> {
    let mut processes_by_id = Map::new();
    for info in installation.processes_in(session).await? {
        let key = (session.clone(), info.command_id.clone());
        let preview = installation.preview(&key, &info).await;
        let view = process_view(installation, placement, &info, preview);
        processes_by_id.insert(info.command_id.as_str().to_owned(), view);
    }
    Ok(processes_by_id)
}

/// Returns the process that a call names.
async fn find_process(
    installation: &Installation,
    placement: &Placement,
    data: &Data,
) -> Result<(Key, CommandInfo), BoxError> {
    let members = members(data)?;
    let id = installation.physical(placement, &required(&members, "session_id")?)?;
    let process = members
        .get("process_id")
        .map_or_else(|| DEFAULT_PROCESS_ID.to_owned(), as_text);
    installation.session(&id).await?;
    let info = installation.process(&id, &process).await?;
    Ok(((id, info.command_id.clone()), info))
}

fn process_view(
    installation: &Installation,
    placement: &Placement,
    info: &CommandInfo,
    preview: String,
) -> Value {
    let mut view = BoxManagedProcessInfo::from_command(info, preview);
    let known = installation.processes.find(&info.box_id, &info.command_id);
    view.attached = known.is_some_and(|process| process.is_attached());
    let mut view = json!(view);
    view["session_id"] = placement.logical(info.box_id.as_str()).into();
    view
}

impl Installation {
    async fn start_process(
        &self,
        id: BoxId,
        spec: BoxManagedProcessSpec,
    ) -> Result<CommandInfo, BoxError> {
        self.session(&id).await?;
        let config = self.config();
        let key = (id.clone(), spec.process_id.clone());
        let process = self
            .processes
            .begin(key.clone(), config.limits.max_managed_processes)?;
        for old in self
            .processes
            .oldest_ended(config.limits.max_completed_processes)
        {
            let _ = self.stop_process(old).await;
        }
        let outcome = self
            .start_command(&id, &spec, config.limits.completed_process_retention_sec)
            .await;
        match outcome {
            Ok(info) => {
                watch(
                    Arc::clone(&self.processes),
                    self.runtime.clone(),
                    self.caller(),
                    key,
                    process,
                );
                Ok(info)
            }
            Err(error) => {
                self.processes.forget(&key, &process);
                self.in_langbot_terms(Err(error), &id).await
            }
        }
    }

    async fn start_command(
        &self,
        id: &BoxId,
        spec: &BoxManagedProcessSpec,
        retention_sec: usize,
    ) -> Result<CommandInfo, BoxError> {
        let caller = self.caller();
        if spec.cwd != DEFAULT_MOUNT_PATH {
            // LangBot's backends do the same; if this fails, the start reports the error.
            let _ = self
                .runtime
                .forward::<FileMkdir>(&caller, &FileMkdirParams::new(id.clone(), &*spec.cwd))
                .await;
        }
        let params = CommandStartParams {
            retain_ms: i64::try_from(retention_sec)
                .ok()
                .map(|seconds| seconds * 1000),
            ..spec.start(id.clone())?
        };
        Ok(self
            .runtime
            .start_command(&caller, params, None)
            .await?
            .info)
    }

    async fn stop_process(&self, key: Key) -> Result<(), BoxError> {
        let caller = self.caller();
        let (box_id, command_id) = key.clone();
        let close_input = CommandInputParams {
            close: true,
            ..CommandInputParams::new(box_id.clone(), command_id.clone())
        };
        // The process may have ended or closed its input.
        let _ = self.runtime.input_command(&caller, close_input).await;
        let kill = CommandKillParams {
            signal: "TERM".to_owned(),
            grace_ms: Some(GRACE_MS),
            forget: true,
            ..CommandKillParams::new(box_id, command_id)
        };
        let killed = self.runtime.kill_command(&caller, kill).await;
        if let Some(process) = self.processes.find(&key.0, &key.1) {
            self.processes.forget(&key, &process);
        }
        match killed {
            Ok(_) => Ok(()),
            Err(error) if error.code() == Code::NotFound => {
                Err(no_process(key.0.as_str(), key.1.as_str()))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns a process of an existing box.
    pub(super) async fn process(
        &self,
        session: &BoxId,
        process: &str,
    ) -> Result<CommandInfo, BoxError> {
        let missing = || no_process(session.as_str(), process);
        let key = CommandKey {
            box_id: session.clone(),
            command_id: CommandId::new(process).map_err(|_| missing())?,
        };
        match self.runtime.get_command(&self.caller(), key).await {
            Ok(info) if info.role == Role::Process => Ok(info),
            Ok(_) => Err(missing()),
            Err(error) if error.code() == Code::NotFound => Err(missing()),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn processes_in(&self, session: &BoxId) -> Result<Vec<CommandInfo>, BoxError> {
        let params = CommandListParams {
            role: Some(Role::Process),
            ..CommandListParams::new(session.clone())
        };
        let listed = self.runtime.list_commands(&self.caller(), params).await;
        Ok(self.in_langbot_terms(listed, session).await?.items)
    }

    /// Returns the last whole lines of standard error that fit the preview.
    async fn preview(&self, key: &Key, info: &CommandInfo) -> String {
        if info.size.stderr == 0 {
            return String::new();
        }
        // A character has at most four bytes.
        let from = info.size.stderr.saturating_sub(4 * PREVIEW_CHARS as u64);
        let from = PerStream {
            stdout: info.size.stdout,
            stderr: from.max(info.kept_from.stderr),
        };
        let (sender, mut chunks) = mpsc::channel(4);
        let params = CommandAttachParams {
            from: ReadFrom::Offsets(from),
            view: View::Bytes,
            until: Until {
                ms: Some(0),
                ..Until::default()
            },
            ..CommandAttachParams::new(key.0.clone(), key.1.clone())
        };
        let mut bytes = Vec::new();
        let caller = self.caller();
        let read = self.runtime.attach_command(&caller, params, sender);
        let collect = async {
            while let Some(chunk) = chunks.recv().await {
                if let CommandChunk::Bytes(chunk) = chunk
                    && chunk.stream == StreamName::Stderr
                {
                    bytes.extend_from_slice(&chunk.data);
                }
            }
        };
        let _ = tokio::join!(read, collect);
        last_lines(&String::from_utf8_lossy(&bytes), PREVIEW_CHARS)
    }

    /// Registers the processes of boxes that are older than this server.
    pub(super) fn register_existing_processes(self: &Arc<Self>) {
        let installation = Arc::clone(self);
        let register = async move {
            for session in installation.sessions().await.unwrap_or_default() {
                for info in installation
                    .processes_in(&session.box_id)
                    .await
                    .unwrap_or_default()
                {
                    let key = (session.box_id.clone(), info.command_id.clone());
                    let process = Process::new(info.size.stdout);
                    if !matches!(info.state, CommandState::Running | CommandState::Held) {
                        process.ended();
                    }
                    installation.processes.add(key.clone(), &process);
                    if process.is_running() {
                        let (runtime, caller) =
                            (installation.runtime.clone(), installation.caller());
                        watch(
                            Arc::clone(&installation.processes),
                            runtime,
                            caller,
                            key,
                            process,
                        );
                    }
                }
            }
        };
        tokio::spawn(register);
    }
}

/// Returns the last lines that fit, or the end of the last line if it does not fit.
fn last_lines(text: &str, limit: usize) -> String {
    let text = text.trim_end();
    let start = text
        .char_indices()
        .rev()
        .nth(limit.saturating_sub(1))
        .map_or(0, |(at, _)| at);
    let newest = &text[start..];
    if start == 0 || text[..start].ends_with('\n') {
        return newest.to_owned();
    }
    match newest.split_once('\n') {
        Some((_, whole)) if !whole.is_empty() => whole.to_owned(),
        _ => newest.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preview_has_whole_lines() {
        assert_eq!(last_lines("one\ntwo\nthree\n", 100), "one\ntwo\nthree");
        assert_eq!(last_lines("one\ntwo\nthree", 8), "three");
        assert_eq!(last_lines("one\ntwo\nthree", 9), "two\nthree");
        assert_eq!(last_lines("0123456789", 4), "6789");
        assert_eq!(last_lines("", 4), "");
        assert_eq!(last_lines("ääää", 2), "ää");
    }
}
