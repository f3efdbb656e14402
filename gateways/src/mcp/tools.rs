//! The list of tools.

use std::sync::LazyLock;

use box_protocol::{BoxError, Invalid};
use futures::future::BoxFuture;
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::answer::Answer;
use super::follow::Progress;
use super::schema::{answer_schema_of, schema_of};
use super::session::Session;
use super::{boxes, code, commands, files, search};

/// A tool, and what it does.
pub(super) struct Entry {
    pub(super) tool: Tool,
    pub(super) call: Call,
    /// Whether only a server with an HTTP port has it.
    needs_http: bool,
    /// Whether it acts inside a box, and not on boxes themselves.
    pub(super) acts_inside: bool,
}

/// Parses the arguments and calls the tool.
type Call = fn(Session, JsonObject, Progress) -> BoxFuture<'static, Result<Answer, BoxError>>;

/// What a tool does to its surroundings, for clients that ask their user.
#[derive(Clone, Copy)]
enum Effect {
    /// It changes nothing.
    Reads,
    /// It adds something.
    Adds,
    /// It may change or remove something.
    Changes,
    /// It runs what it is given, which may use the network.
    Runs,
}

impl Effect {
    fn annotations(self, title: &str) -> ToolAnnotations {
        let (reads, destroys, open) = match self {
            Self::Reads => (true, false, false),
            Self::Adds => (false, false, false),
            Self::Changes => (false, true, false),
            Self::Runs => (false, true, true),
        };
        let hints = ToolAnnotations::with_title(title).read_only(reads);
        hints.destructive(destroys).open_world(open)
    }
}

fn parse<T: DeserializeOwned>(arguments: JsonObject) -> Result<T, Invalid> {
    serde_path_to_error::deserialize(Value::Object(arguments)).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        match path.as_str() {
            "." => Invalid::new("arguments", inner.to_string()),
            _ => Invalid::new(path, inner.to_string()),
        }
    })
}

macro_rules! tools {
    ($($module:ident::$name:ident($args:ident) $(-> $answer:ty)?, $effect:ident, $title:literal, $description:literal;)*) => {
        vec![$({
            let call: Call = |session, arguments, progress| Box::pin(async move {
                $module::$name(session, parse::<$module::$args>(arguments)?, progress).await
            });
            let tool = Tool::new(stringify!($name), $description, schema_of::<$module::$args>())
                .with_title($title)
                $(.with_raw_output_schema(answer_schema_of::<$answer>()))?
                .with_annotations(Effect::$effect.annotations($title));
            let needs_http = stringify!($name) == "share_port";
            let acts_inside = stringify!($module) != "boxes";
            Entry { tool, call, needs_http, acts_inside }
        },)*]
    };
}

/// Returns the tools of a session.
pub(super) fn tools_of(session: &Session) -> impl Iterator<Item = &'static Entry> {
    let shares_ports = session.shares_ports();
    TOOLS
        .iter()
        .filter(move |entry| shares_ports || !entry.needs_http)
}

/// All tools.
///
/// A tool that may answer with an image has no output schema, because a schema makes the data mandatory.
static TOOLS: LazyLock<Vec<Entry>> = LazyLock::new(|| {
    tools! {
        commands::run(RunArgs) -> commands::CommandAnswer, Runs, "Run a command",
            "Run a shell script in a box and return its output and exit code. A command that takes longer than wait_s keeps running; read_output returns the rest. Long output is cut in the middle; the answer says how to read the rest.";
        commands::read_output(ReadOutputArgs) -> commands::CommandAnswer, Reads, "Read output",
            "Read more output of a command, from a byte offset that an earlier answer gave, or its tail. Also says whether the command still runs.";
        commands::send_input(SendInputArgs) -> commands::CommandAnswer, Runs, "Send input",
            "Write text to the stdin of a running command that was started with input, and return what it prints at once.";
        commands::stop(StopArgs) -> commands::CommandAnswer, Changes, "Stop a command",
            "Stop a running command with all its processes.";
        code::run_code(RunCodeArgs), Runs, "Run code",
            "Run Python or JavaScript in an interpreter that keeps its variables between calls. Returns output, the value of the last expression, and figures as images.";
        files::read_file(ReadFileArgs), Reads, "Read a file",
            "Read a text file as numbered lines, or an image.";
        files::write_file(WriteFileArgs) -> files::WrittenAnswer, Changes, "Write a file",
            "Create or replace a file.";
        files::edit_file(EditFileArgs) -> files::EditedAnswer, Changes, "Edit a file",
            "Replace a text in a file. Fails unless the text occurs exactly once, and says how often it occurs.";
        search::find_files(FindFilesArgs) -> search::FilesAnswer, Reads, "Find files",
            "Find files by a glob pattern.";
        search::search_files(SearchFilesArgs) -> search::LinesAnswer, Reads, "Search in files",
            "Find lines that match a regular expression.";
        search::list_files(ListFilesArgs) -> search::FilesAnswer, Reads, "List files",
            "List a directory and its subdirectories down to a depth.";
        boxes::create_box(CreateBoxArgs) -> boxes::BoxAnswer, Adds, "Create a box",
            "Create another box with files and processes of its own.";
        boxes::list_boxes(ListBoxesArgs) -> boxes::BoxesAnswer, Reads, "List boxes",
            "List all boxes, and name the default box.";
        boxes::delete_box(DeleteBoxArgs) -> boxes::DeletedAnswer, Changes, "Delete a box",
            "Delete a box with its files and processes.";
        boxes::fork(ForkArgs) -> boxes::ForkedAnswer, Adds, "Fork a box",
            "Create copies of a box with its files, to try several ways from one state. Processes are not copied.";
        boxes::checkpoint(CheckpointArgs) -> boxes::CheckpointAnswer, Adds, "Save a checkpoint",
            "Save the files of a box, so that rollback can restore them.";
        boxes::rollback(CheckpointArgs) -> boxes::BoxAnswer, Changes, "Roll back a box",
            "Restore the files of a box from a checkpoint. All its processes end, and later changes are lost.";
        boxes::share_port(SharePortArgs) -> boxes::PortAnswer, Adds, "Share a port",
            "Return an address that opens an HTTP server inside a box, without a token.";
    }
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_schema_is_plain() {
        for entry in TOOLS.iter() {
            let tool = &entry.tool;
            let output = tool.output_schema.iter();
            for schema in output.chain([&tool.input_schema]) {
                assert_eq!(schema["type"], "object", "{}", tool.name);
                let text = serde_json::to_string(schema).unwrap();
                for noise in ["\"null\"", "$ref", "$defs", "\"format\"", "anyOf", "oneOf"] {
                    assert!(!text.contains(noise), "{}: {noise} in {text}", tool.name);
                }
            }
            let members = tool.input_schema.get("properties");
            for (name, member) in members.and_then(Value::as_object).into_iter().flatten() {
                let described = member["description"].is_string() && member["type"].is_string();
                assert!(described, "{}.{name}: {member}", tool.name);
            }
        }
    }

    #[test]
    fn a_wrong_argument_is_named() {
        let refused = |arguments: Value| {
            let Value::Object(arguments) = arguments else {
                panic!("no object")
            };
            parse::<commands::RunArgs>(arguments)
                .unwrap_err()
                .to_string()
        };
        let text = refused(serde_json::json!({"command": "ls", "wait_s": "soon"}));
        assert!(text.starts_with("wait_s: "), "{text}");
        assert!(refused(serde_json::json!({})).contains("command"));
        let text = refused(serde_json::json!({"command": "ls", "cmd": "ls"}));
        assert!(text.contains("cmd"), "{text}");
    }
}
