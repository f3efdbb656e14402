//! LangBot's managed processes: commands with the role `process`.

use box_protocol::actions::{CommandStartParams, OnDisconnect, Stdin};
use box_protocol::{
    BoxId, CommandId, CommandInfo, CommandState, DEFAULT_MOUNT_PATH, Env, Invalid, Program, Role,
    UnixMs, paths,
};
use serde::{Deserialize, Serialize, Serializer};

use crate::langbot::view::as_text;

/// The default process id.
pub(in crate::langbot) const DEFAULT_PROCESS_ID: &str = "default";

/// The specification of a managed process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Fields")]
pub(super) struct BoxManagedProcessSpec {
    /// The id of the process and of its command.
    pub(super) process_id: CommandId,
    /// The program, trimmed and not empty.
    pub(super) command: String,
    /// Its arguments.
    pub(super) args: Vec<String>,
    /// Its environment variables.
    pub(super) env: Env,
    /// Its working directory.
    pub(super) cwd: String,
    /// Its own memory limit; 0 applies only the limit of the box.
    pub(super) memory_mb: u64,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Fields {
    process_id: Option<String>,
    command: String,
    args: Vec<String>,
    env: Env,
    cwd: Option<String>,
    memory_mb: u64,
}

impl BoxManagedProcessSpec {
    /// Creates a process with the id `default` that runs this program in the workspace.
    #[cfg(test)]
    fn new<T: Into<String>>(
        command: impl Into<String>,
        args: impl IntoIterator<Item = T>,
    ) -> Result<Self, Invalid> {
        let args = args.into_iter().map(Into::into).collect();
        Self::try_from(Fields {
            command: command.into(),
            args,
            ..Fields::default()
        })
    }

    /// Returns the program and its arguments.
    fn program(&self) -> Result<Program, Invalid> {
        Program::argv(std::iter::once(&self.command).chain(&self.args))
    }

    /// Returns the parameters of the command that runs this process.
    pub(super) fn start(&self, box_id: BoxId) -> Result<CommandStartParams, Invalid> {
        Ok(CommandStartParams {
            command_id: Some(self.process_id.clone()),
            cwd: Some(self.cwd.clone()),
            env: self.env.clone(),
            stdin: Stdin::Open,
            on_disconnect: OnDisconnect::Keep,
            retain_ms: Some(300_000),
            role: Role::Process,
            replace: true,
            memory_mb: Some(self.memory_mb).filter(|limit| *limit > 0),
            ..CommandStartParams::new(box_id, self.program()?)
        })
    }
}

impl TryFrom<Fields> for BoxManagedProcessSpec {
    type Error = Invalid;

    fn try_from(f: Fields) -> Result<Self, Invalid> {
        let command = f.command.trim().to_owned();
        if command.is_empty() {
            return Err(Invalid::new("command", "must not be empty"));
        }
        if command.contains('\0') || f.args.iter().any(|word| word.contains('\0')) {
            return Err(Invalid::new("args", "must not contain NUL"));
        }
        let process_id = f
            .process_id
            .as_deref()
            .map_or(DEFAULT_PROCESS_ID, str::trim);
        let process_id = CommandId::new(process_id)
            .map_err(|invalid| Invalid::new("process_id", invalid.rule().to_owned()))?;
        let cwd = paths::inside("cwd", f.cwd.as_deref().unwrap_or(DEFAULT_MOUNT_PATH))?;
        Ok(Self {
            process_id,
            command,
            args: f.args,
            env: f.env,
            cwd,
            memory_mb: f.memory_mb,
        })
    }
}

/// Whether a managed process is running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ProcessStatus {
    /// The process is running or starting.
    Running,
    /// The process has ended.
    Exited,
}

#[allow(clippy::ref_option)] // serde's signature
fn as_optional_text<S: Serializer>(at: &Option<UnixMs>, to: S) -> Result<S::Ok, S::Error> {
    match at {
        Some(at) => as_text(at, to),
        None => to.serialize_none(),
    }
}

/// A managed process in LangBot's format, with times as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct BoxManagedProcessInfo {
    /// Its box.
    pub(super) session_id: BoxId,
    /// The id of the process.
    pub(super) process_id: CommandId,
    /// Whether the process is running.
    pub(super) status: ProcessStatus,
    /// The program.
    pub(super) command: String,
    /// Its arguments.
    pub(super) args: Vec<String>,
    /// Its working directory.
    pub(super) cwd: String,
    /// The names of its environment variables, sorted.
    pub(super) env_keys: Vec<String>,
    /// Whether a relay reads its output.
    pub(super) attached: bool,
    /// When the process started.
    #[serde(serialize_with = "as_text")]
    pub(super) started_at: UnixMs,
    /// When the process ended.
    #[serde(serialize_with = "as_optional_text")]
    pub(super) exited_at: Option<UnixMs>,
    /// Its exit code, or 128 plus the signal number.
    pub(super) exit_code: Option<i32>,
    /// The most recent text of its standard error.
    pub(super) stderr_preview: String,
}

impl BoxManagedProcessInfo {
    /// Converts a command; the caller reads `stderr_preview` from the command's log.
    pub(super) fn from_command(info: &CommandInfo, stderr_preview: impl Into<String>) -> Self {
        let (command, args) = match &info.program {
            Program::Text { 0: text, .. } => (text.clone(), Vec::new()),
            Program::Argv { 0: words, .. } => match words.split_first() {
                Some((command, args)) => (command.clone(), args.to_vec()),
                None => Default::default(),
            },
        };
        let mut env_keys = info.env_keys.clone();
        env_keys.sort_unstable();
        Self {
            session_id: info.box_id.clone(),
            process_id: info.command_id.clone(),
            status: match info.state {
                CommandState::Exited | CommandState::Lost => ProcessStatus::Exited,
                CommandState::Held | CommandState::Pending | CommandState::Running => {
                    ProcessStatus::Running
                }
            },
            command,
            args,
            cwd: info.cwd.clone(),
            env_keys,
            attached: info.attached,
            started_at: info.started_at.unwrap_or(info.created_at),
            exited_at: info.ended_at,
            exit_code: info.exit.and_then(|exit| exit.shell_code()),
            stderr_preview: stderr_preview.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use box_protocol::{Exit, ExitWhy, PerStream};
    use serde_json::{Value, json};

    use super::*;

    fn decode(value: Value) -> Result<BoxManagedProcessSpec, Invalid> {
        serde_json::from_value(value).map_err(Invalid::from)
    }

    #[test]
    fn defaults_and_trims() {
        let spec = decode(json!({"command": " npx "})).unwrap();
        assert_eq!(spec, BoxManagedProcessSpec::new("npx", [""; 0]).unwrap());
        assert_eq!(spec.process_id.as_str(), "default");
        assert_eq!((spec.cwd.as_str(), spec.memory_mb), ("/workspace", 0));
        let spec = BoxManagedProcessSpec::new("npx", ["-y", "x"]).unwrap();
        assert_eq!(
            spec.program().unwrap(),
            Program::argv(["npx", "-y", "x"]).unwrap()
        );
    }

    #[test]
    fn rules_hold_on_construction_and_on_decode() {
        let empty = "command: must not be empty";
        assert_eq!(
            BoxManagedProcessSpec::new(" ", [""; 0])
                .unwrap_err()
                .to_string(),
            empty
        );
        assert_eq!(
            decode(json!({"command": ""})).unwrap_err().to_string(),
            empty
        );
        assert_eq!(decode(json!({})).unwrap_err().to_string(), empty);
        assert_eq!(
            decode(json!({"command": "x", "cwd": "src"}))
                .unwrap_err()
                .to_string(),
            "cwd: must be an absolute path inside the sandbox"
        );
        let id = decode(json!({"command": "x", "process_id": "a/b"})).unwrap_err();
        assert_eq!(id.to_string(), "process_id: must not contain /");
        assert_eq!(
            decode(json!({"command": "x", "shell": true}))
                .unwrap_err()
                .field(),
            "shell"
        );
    }

    #[test]
    fn a_command_converts_to_langbots_process_info() {
        let mut info = CommandInfo {
            box_id: BoxId::new("mcp-shared").unwrap(),
            command_id: CommandId::new("default").unwrap(),
            role: Role::Process,
            state: CommandState::Running,
            pid: Some(7),
            program: Program::argv(["npx", "-y"]).unwrap(),
            cwd: "/workspace".into(),
            env_keys: vec!["B".into(), "A".into()],
            attached: true,
            created_at: UnixMs(0),
            started_at: Some(UnixMs(1_794_784_697_977)),
            ended_at: None,
            size: PerStream::default(),
            kept_from: PerStream::default(),
            exit: None,
            error: None,
            shell_id: None,
            shell_replaced: false,
            note: None,
        };
        let running =
            serde_json::to_value(BoxManagedProcessInfo::from_command(&info, "warn")).unwrap();
        assert_eq!(
            running,
            json!({"session_id": "mcp-shared", "process_id": "default", "status": "running",
                "command": "npx", "args": ["-y"], "cwd": "/workspace", "env_keys": ["A", "B"],
                "attached": true, "started_at": "2026-11-15T23:18:17.977000Z", "exited_at": null,
                "exit_code": null, "stderr_preview": "warn"})
        );
        info.state = CommandState::Exited;
        info.ended_at = Some(UnixMs(1_794_784_697_978));
        info.exit = Some(Exit::by_signal(15, ExitWhy::Killed));
        let exited = BoxManagedProcessInfo::from_command(&info, "");
        assert_eq!(
            (exited.status, exited.exit_code),
            (ProcessStatus::Exited, Some(143))
        );
        let json = serde_json::to_value(&exited).unwrap();
        assert_eq!(json["exited_at"], "2026-11-15T23:18:17.978000Z");
    }

    #[test]
    fn a_managed_process_outlives_its_connection() {
        let spec = decode(json!({
            "process_id": "mcp-1", "command": "npx", "args": ["-y"], "env": {"A": "1"}, "memory_mb": 64,
        }));
        let start = spec.unwrap().start(BoxId::new("s").unwrap()).unwrap();
        assert_eq!(start.command_id, Some(CommandId::new("mcp-1").unwrap()));
        assert_eq!(start.program, Program::argv(["npx", "-y"]).unwrap());
        assert_eq!(
            (start.stdin, start.on_disconnect),
            (Stdin::Open, OnDisconnect::Keep)
        );
        assert_eq!(
            (start.replace, start.retain_ms, start.memory_mb),
            (true, Some(300_000), Some(64))
        );
        assert_eq!(start.env.names(), ["A"]);
    }
}
