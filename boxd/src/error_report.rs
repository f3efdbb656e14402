//! Errors of boxd: the message, and a hint for the next step.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io;

use anyhow::Error;
use box_client::{ClientError, Code};
use box_protocol::error::{Detail, Subject};
use box_rpc::CallError;
use clap::CommandFactory as _;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use serde_json::json;

use crate::args::{Cli, Command};
use crate::connect::ConnectError;
use crate::{EXIT_FAILED, EXIT_OVER_QUOTA, output, values};

/// Prints an error to stderr.
pub(crate) fn print(cli: &Cli, error: &Error) {
    let hint = hint(&cli.command, target(&cli.command), error);
    write(cli.json, None, error, hint);
}

/// Prints an error with a hint of its command.
pub(crate) fn print_with_hint(cli: &Cli, error: &Error, hint: String) {
    write(cli.json, None, error, Some(hint));
}

/// Prints the error of one of several targets.
pub(crate) fn print_for_target(cli: &Cli, about: &str, error: &Error) {
    let hint = hint(&cli.command, parse_target(about), error);
    write(cli.json, Some(about), error, hint);
}

fn write(json: bool, about: Option<&str>, error: &Error, hint: Option<String>) {
    let message = format!("{error:#}");
    if json {
        let mut report = json!({"code": code(error), "message": message, "next": hint});
        if let Some(about) = about {
            report["about"] = about.into();
        }
        return output::eprintln(&output::visible_json(&json!({"error": report}).to_string()));
    }
    let mut text = "boxd: ".to_owned();
    if let Some(about) = about {
        let _ = write!(text, "{}: ", output::visible(about));
    }
    // A message of a server is one line; an error of the configuration file may quote its lines.
    if code(error).is_some() {
        text.push_str(&output::visible(&message));
    } else {
        let lines: Vec<_> = message.lines().map(output::visible).collect();
        text.push_str(&lines.join("\n"));
    }
    for line in detail(error).output.unwrap_or_default().lines() {
        let _ = write!(text, "\n      {}", output::visible(line));
    }
    if let Some(hint) = hint {
        let _ = write!(text, "\n      {}", output::visible(&hint));
    }
    output::eprintln(&text);
}

/// The exit code for a failure.
///
/// As in shells, 127 is a missing program and 126 one that cannot run.
pub(crate) fn exit_code(error: &Error) -> u8 {
    let refused = error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(ClientError::Refused(refused)) => refused.detail::<Detail>(),
        _ => None,
    });
    match refused {
        Some(detail) if detail.field.as_deref() == Some("program") => {
            match detail.errno.as_deref() {
                Some("ENOENT") => 127,
                _ => 126,
            }
        }
        Some(detail)
            if matches!(
                detail.limit.as_deref(),
                Some("workspace_quota_mb" | "disk_mb" | "size_mb")
            ) =>
        {
            EXIT_OVER_QUOTA
        }
        _ => EXIT_FAILED,
    }
}

/// Whether the error is a closed stdout.
pub(crate) fn is_broken_pipe(error: &Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref());
    io.is_some_and(|error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// The error code, if the server or the connection to it failed.
fn code(error: &Error) -> Option<Code> {
    error.chain().find_map(|cause| {
        let client = cause.downcast_ref::<ClientError>().map(ClientError::code);
        client
            .or_else(|| cause.downcast_ref::<CallError>().map(CallError::code))
            .or_else(|| cause.downcast_ref::<ConnectError>().map(ConnectError::code))
    })
}

/// The hint for the next step, if the message has none.
fn hint(command: &Command, target: Target<'_>, error: &Error) -> Option<String> {
    let code = code(error)?;
    if error.is::<ConnectError>() {
        return None;
    }
    let client = error
        .chain()
        .find_map(|cause| cause.downcast_ref::<ClientError>());
    if let (Some(ClientError::Disconnected { .. }), (Some(name), _)) = (client, target) {
        return Some(format!(
            "the command may still run: find it with `boxd ps {name}`, read it with `boxd logs -f {name}/COMMAND`"
        ));
    }
    let detail = client.map(ClientError::detail).unwrap_or_default();
    if detail.subject.is_some_and(is_item) {
        return None;
    }
    match (code, detail.field.as_deref(), target) {
        (Code::Conflict, Some("command_id"), (Some(name), _)) => Some(format!(
            "read the existing command with `boxd logs {name}/{}`",
            given_id(command).unwrap_or("COMMAND")
        )),
        // The error is about a file, a user or a program, so the box exists.
        _ if detail.errno.is_some() || detail.field.is_some() && code != Code::Conflict => None,
        (Code::NotFound, _, (Some(name), Some(_))) => Some(format!(
            "list its commands with `boxd ps {name}`, or all boxes with `boxd ps`"
        )),
        (Code::NotFound, _, (Some(name), None)) => Some(format!(
            "list the boxes with `boxd ps`; create this one with `boxd run --name {name} …`"
        )),
        (Code::Conflict, _, (Some(name), _)) if matches!(command, Command::Run(_)) => {
            Some(format!(
                "omit that option, choose another --name, or delete the box first: boxd rm {name}"
            ))
        }
        (Code::Conflict, _, (Some(name), _)) if client.is_some_and(is_not_running) => {
            Some(format!(
                "see its state with `boxd ps`; `boxd resume {name}` resumes a paused box, `boxd start {name}` starts a stopped one"
            ))
        }
        _ => None,
    }
}

/// Whether an error is about an item of the catalog.
fn is_item(subject: Subject) -> bool {
    matches!(
        subject,
        Subject::Image | Subject::Volume | Subject::Template | Subject::Snapshot | Subject::Pool
    )
}

/// The details of an error of the server.
fn detail(error: &Error) -> Detail {
    let client = error.chain().find_map(|cause| cause.downcast_ref());
    client.map(ClientError::detail).unwrap_or_default()
}

/// Whether the call was refused because the box is paused or stopped.
fn is_not_running(error: &ClientError) -> bool {
    error.refusal().is_some_and(|refusal| {
        let message = refusal.message();
        message.ends_with(": is paused; resume it") || message.ends_with(": is stopped; start it")
    })
}

/// The name of a box and of a command.
type Target<'a> = (Option<&'a str>, Option<&'a str>);

/// The box and the command of the arguments.
fn target(command: &Command) -> Target<'_> {
    match command {
        Command::Run(args) => (args.name.as_deref(), None),
        Command::Exec(args) => (Some(&args.name), None),
        Command::Shell(args) => (args.name.as_deref(), None),
        Command::Port(args) => (Some(&args.name), None),
        Command::Diff(args) => (Some(&args.name), None),
        Command::Apply(args) => (Some(&args.name), None),
        Command::Discard(args) => (Some(&args.name), None),
        Command::Fork(args) => (Some(&args.name), None),
        Command::Checkpoint(args) => (Some(&args.name), None),
        Command::Rollback(args) => (Some(&args.name), None),
        Command::Ps(args) => (args.name.as_deref(), None),
        Command::Inspect(args) => parse_target(&args.target),
        Command::Logs(args) => parse_target(&args.target),
        Command::Wait(args) => parse_target(&args.target),
        _ => (None, None),
    }
}

/// The id that the arguments give to a new command.
fn given_id(command: &Command) -> Option<&str> {
    match command {
        Command::Exec(args) => args.id.as_deref(),
        _ => None,
    }
}

fn parse_target(text: &str) -> Target<'_> {
    let (name, command) = values::target(text);
    (Some(name), command)
}

/// Whether invalid arguments contain `--json`, before the arguments of a program.
fn wants_json(cli: impl Iterator<Item = OsString>) -> bool {
    cli.take_while(|word| word != "--")
        .any(|word| word == "--json")
}

/// The equivalent of a command of other tools.
fn equivalent_command(word: &str) -> Option<&'static str> {
    Some(match word {
        "create" | "new" | "up" => {
            "`boxd run --name NAME 'true'` creates a box; `boxd shell NAME` creates one and opens a shell"
        }
        "images" => "`boxd image ls`",
        "pull" => "`boxd image pull NAME`",
        "rmi" => "`boxd image rm NAME`",
        "load" | "import" => "`boxd image import FILE NAME`",
        "save" | "export" => "`boxd image export NAME FILE`",
        "commit" => {
            "`boxd snapshot NAME SNAPSHOT` keeps the files of a box; `boxd snapshot export` writes them to an archive"
        }
        "build" | "push" => {
            "boxd builds and pushes no images; import one from another tool with `boxd image import FILE NAME`"
        }
        "login" => {
            "`boxd image login REGISTRY` for a registry; `boxd shell NAME` opens a shell in a box"
        }
        "logout" => "`boxd image logout REGISTRY`",
        "restart" => "`boxd stop NAME` and `boxd start NAME`",
        "unpause" => "`boxd resume NAME`",
        "attach" => {
            "`boxd logs -f NAME/COMMAND` follows a command; `boxd shell NAME` opens a shell"
        }
        "top" => "`boxd ps NAME` lists the commands of a box; `boxd stats` shows resource usage",
        "delete" | "remove" | "destroy" | "down" => "`boxd rm NAME`",
        "list" => "`boxd ps`",
        "info" | "status" => "`boxd doctor` checks this machine; `boxd inspect NAME` shows a box",
        "ssh" | "enter" => "`boxd shell NAME`",
        _ => return None,
    })
}

/// The commands whose names are nearest to a mistyped one.
fn similar_commands(word: &str) -> Option<String> {
    let command = Cli::command();
    let visible = command
        .get_subcommands()
        .filter(|known| !known.is_hide_set());
    let known = visible.map(|known| (strsim::damerau_levenshtein(word, known.get_name()), known));
    let known: Vec<_> = known.collect();
    let nearest = known.iter().map(|(distance, _)| *distance).min()?;
    // Two of three letters make no other word.
    if nearest > (word.len() / 3).clamp(1, 2) {
        return None;
    }
    let near = known.iter().filter(|(distance, _)| *distance == nearest);
    let names: Vec<_> = near
        .map(|(_, known)| format!("`boxd {}`", known.get_name()))
        .collect();
    Some(names.join(" or "))
}

/// The word in the place of a command of boxd, if boxd has no such command.
fn unknown_command(error: &clap::Error) -> Option<&str> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let mut words = std::env::args().skip(1);
    let first = words.find(|word| !word.starts_with('-'));
    (first.as_ref() == Some(word)).then_some(word)
}

/// The tip for arguments that clap refuses, if clap has no better one.
fn tip(error: &clap::Error) -> Option<String> {
    if let Some(word) = unknown_command(error) {
        let equivalent = equivalent_command(word).map(str::to_owned);
        let known = equivalent.or_else(|| similar_commands(word));
        return known.or_else(|| Some("`boxd --help` lists all commands".to_owned()));
    }
    // An unknown option likely belongs to the program, unless clap suggests a similar one.
    let has_suggestion = error.get(ContextKind::SuggestedArg).is_some();
    let usage = error.get(ContextKind::Usage).map(ToString::to_string);
    let takes_program = usage.is_some_and(|usage| usage.contains("[-- <ARGV>...]"));
    if error.kind() != ErrorKind::UnknownArgument || !takes_program || has_suggestion {
        return None;
    }
    Some(
        "quote a shell script ('echo hi'), or put a program and its arguments after -- (-- echo hi); \
         --image NAME selects an image"
            .to_owned(),
    )
}

/// Prints an argument error with a tip and exits.
pub(crate) fn exit_with_usage(error: &clap::Error) -> ! {
    if !error.use_stderr() {
        error.exit();
    }
    let tip = tip(error);
    let text = match unknown_command(error) {
        Some(word) => format!("error: boxd has no command '{word}'\n"),
        None => error.render().to_string(),
    };
    if wants_json(std::env::args_os()) {
        let message = text.split("\n\n").next().unwrap_or_default();
        let message = message.trim_start_matches("error: ").trim_end();
        let next = tip.as_deref().unwrap_or("boxd --help");
        let report = json!({"code": Code::Validation, "message": message, "next": next});
        output::eprintln(&json!({"error": report}).to_string());
        std::process::exit(2);
    }
    let Some(tip) = tip else { error.exit() };
    output::eprintln(&format!("{text}\n  tip: {tip}"));
    std::process::exit(2)
}
