//! Shells: their state between runs, and inputs that must neither hang nor confuse them.

mod bad_input;
mod languages;
mod notebook;
mod runs;
mod state;

use std::time::Instant;

use box_protocol::actions::{
    CommandChunk, CommandStartResult, Displayed, ShellCreateResult, ShellInfo, ShellRunParams,
    StreamName,
};
use box_protocol::{BoxError, CommandInfo, CommandState};
use box_runtime::Caller;
use box_test_wait::{LONG, eventually};
use box_tests::machine::{Machine, on_each_machine, printed};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// A run and its output up to its end.
#[derive(Debug)]
struct Ran {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// The displayed values.
    shown: Vec<Displayed>,
    info: CommandInfo,
}

impl Ran {
    fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap().trim_end()
    }

    fn code(&self) -> Option<i32> {
        self.info.exit.unwrap().code
    }
}

fn with(mut params: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        params[name] = value.clone();
    }
    params
}

async fn create(machine: &Machine, id: &str, more: Value) -> Result<ShellCreateResult, BoxError> {
    let params = with(json!({"box_id": "c", "shell_id": id, "cwd": "/tmp"}), more);
    let params = serde_json::from_value(params).unwrap();
    machine.runtime.create_shell(&Caller::Local, params).await
}

fn run_params(shell: &str, text: &str, more: Value) -> ShellRunParams {
    let params = json!({"box_id": "c", "shell_id": shell, "text": text});
    serde_json::from_value(with(params, more)).unwrap()
}

/// Starts a run without waiting for it.
async fn begin(machine: &Machine, shell: &str, text: &str, more: Value) -> CommandStartResult {
    let params = run_params(shell, text, more);
    let begun = machine
        .runtime
        .run_in_shell(&Caller::Local, params, None)
        .await;
    begun.unwrap_or_else(|error| panic!("{text}: {error:?}"))
}

/// Runs a text and reads the run to its end.
async fn try_run(machine: &Machine, shell: &str, text: &str, more: Value) -> Result<Ran, BoxError> {
    let mut params = run_params(shell, text, more);
    let attach = json!({"view": "bytes"});
    params.attach = Some(serde_json::from_value(attach).unwrap());
    let (sender, mut chunks) = mpsc::channel(4);
    let caller = Caller::Local;
    let running = machine.runtime.run_in_shell(&caller, params, Some(sender));
    let reading = async {
        let (mut stdout, mut stderr, mut shown) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(chunk) = chunks.recv().await {
            match chunk {
                CommandChunk::Bytes(piece) => match piece.stream {
                    StreamName::Stdout => stdout.extend_from_slice(&piece.data),
                    StreamName::Stderr => stderr.extend_from_slice(&piece.data),
                },
                CommandChunk::Display(one) => shown.push(one),
                _ => {}
            }
        }
        (stdout, stderr, shown)
    };
    let both = Box::pin(async { tokio::join!(running, reading) });
    let limit = LONG;
    let done = tokio::time::timeout(limit, both).await;
    let (result, (stdout, stderr, shown)) = done.unwrap_or_else(|_| panic!("{text}: hangs"));
    Ok(Ran {
        stdout,
        stderr,
        shown,
        info: result?.info,
    })
}

async fn run(machine: &Machine, shell: &str, text: &str) -> Ran {
    let ran = try_run(machine, shell, text, json!({})).await;
    ran.unwrap_or_else(|error| panic!("{text}: {error:?}"))
}

async fn list(machine: &Machine) -> Vec<ShellInfo> {
    let params = serde_json::from_value(json!({"box_id": "c"})).unwrap();
    let listed = machine.runtime.list_shells(&Caller::Local, params).await;
    listed.unwrap().items
}

async fn delete(machine: &Machine, id: &str) -> bool {
    let params = serde_json::from_value(json!({"box_id": "c", "shell_id": id})).unwrap();
    let deleted = machine.runtime.delete_shell(&Caller::Local, params).await;
    deleted.unwrap().deleted
}

async fn get(machine: &Machine, id: &str) -> CommandInfo {
    let key = serde_json::from_value(json!({"box_id": "c", "command_id": id})).unwrap();
    machine
        .runtime
        .get_command(&Caller::Local, key)
        .await
        .unwrap()
}

async fn ended(machine: &Machine, id: &str) -> CommandInfo {
    let begun = Instant::now();
    loop {
        let info = get(machine, id).await;
        if info.state == CommandState::Exited {
            return info;
        }
        assert!(begun.elapsed() < LONG, "{info:?}");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// The displays that a later reader of a run receives.
async fn read_again(machine: &Machine, id: &str, view: &str) -> Vec<Displayed> {
    let params = json!({"box_id": "c", "command_id": id, "view": view});
    let params = serde_json::from_value(params).unwrap();
    let (sender, mut chunks) = mpsc::channel(64);
    let caller = Caller::Local;
    let reading = machine.runtime.attach_command(&caller, params, sender);
    reading.await.unwrap();
    let mut shown = Vec::new();
    while let Some(chunk) = chunks.recv().await {
        if let CommandChunk::Display(one) = chunk {
            shown.push(one);
        }
    }
    shown
}

async fn running(machine: &Machine, id: &str) {
    eventually(&format!("{id} runs"), async || {
        get(machine, id).await.state == CommandState::Running
    })
    .await;
}

async fn kill(machine: &Machine, id: &str, more: Value) -> CommandInfo {
    let params = with(json!({"box_id": "c", "command_id": id}), more);
    let params = serde_json::from_value(params).unwrap();
    let killed = machine.runtime.kill_command(&Caller::Local, params).await;
    killed.unwrap().info
}

/// A box with a shell `s` of this language.
async fn with_shell(language: &str, test: impl AsyncFn(&Machine)) {
    on_each_machine(async |machine| {
        printed(&machine.exec("c", "true").await);
        create(machine, "s", json!({"language": language}))
            .await
            .unwrap();
        test(machine).await;
        // The test must not have left it unusable.
        let hello = match language {
            "python" => "print('hello')",
            "javascript" => "console.log('hello')",
            _ => "echo hello",
        };
        create(machine, "s", json!({"language": language}))
            .await
            .unwrap();
        assert_eq!(run(machine, "s", hello).await.text(), "hello");
    })
    .await;
}

async fn with_each_shell(test: impl AsyncFn(&Machine, &str)) {
    for language in ["bash", "sh"] {
        with_shell(language, async |machine| test(machine, language).await).await;
    }
}
