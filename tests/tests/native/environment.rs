//! The environment of commands: empty, the box's defaults, a file of the guest, and variables of
//! the request.

use box_protocol::actions::{CommandChunk, CommandStartResult, FileRemove};
use box_protocol::{BoxError, Code};
use box_runtime::Caller;
use box_tests::machine::{Machine, on_each_machine, printed, spec};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// Prints the variables of these tests.
const PRINT: &str = "echo $A $B $C ${D-none}";

fn params<T: serde::de::DeserializeOwned>(mut more: Value) -> T {
    more["box_id"] = json!("e");
    serde_json::from_value(more).unwrap()
}

async fn exec(machine: &Machine, cmd: &str, env: Value) -> Result<String, BoxError> {
    let defaults =
        json!({"env": {"A": "box", "B": "box", "C": "box"}, "env_file": "/workspace/.env"});
    let asked = json!({"box_id": "e", "cmd": cmd, "env": env, "defaults": defaults});
    let ran = machine.exec_spec(spec(asked)).await?;
    Ok(printed(&ran).to_owned())
}

/// The output of a command that is started and read to its end.
async fn output(
    running: impl Future<Output = Result<CommandStartResult, BoxError>>,
    mut chunks: mpsc::Receiver<CommandChunk>,
) -> Result<String, BoxError> {
    let (result, text) = tokio::join!(running, async {
        let mut text = String::new();
        while let Some(chunk) = chunks.recv().await {
            if let CommandChunk::Text(piece) = chunk {
                text.push_str(&piece.data);
            }
        }
        text
    });
    result.map(|_| text.trim_end().to_owned())
}

async fn command(machine: &Machine) -> Result<String, BoxError> {
    let (to, chunks) = mpsc::channel(4);
    let asked = params(json!({"program": {"text": PRINT}, "env": {"C": "asked"}, "attach": {}}));
    let caller = Caller::Local;
    let running = machine.runtime.start_command(&caller, asked, Some(to));
    output(running, chunks).await
}

async fn shell(machine: &Machine, id: &str) -> Result<String, BoxError> {
    let (runtime, caller) = (&machine.runtime, Caller::Local);
    let asked = params(json!({"shell_id": id, "language": "sh", "env": {"C": "asked"}}));
    runtime.create_shell(&caller, asked).await?;
    let (to, chunks) = mpsc::channel(4);
    let asked = params(json!({"shell_id": id, "text": PRINT, "attach": {}}));
    output(runtime.run_in_shell(&caller, asked, Some(to)), chunks).await
}

#[tokio::test]
async fn the_environment_file_of_a_box_overrides_defaults_and_yields_to_the_request() {
    on_each_machine(async |machine| {
        let asked = || json!({"C": "asked"});
        assert_eq!(
            exec(machine, PRINT, asked()).await.unwrap(),
            "box box asked none"
        );
        assert_eq!(command(machine).await.unwrap(), "box box asked none");
        assert_eq!(shell(machine, "before").await.unwrap(), "box box asked none");
        let write = "printf '# mine\\nexport B=\"fi le\"\\nC=file\\nD=file\\nnonsense\\n' > /workspace/.env";
        exec(machine, write, json!({})).await.unwrap();
        let want = "box fi le asked file";
        assert_eq!(exec(machine, PRINT, asked()).await.unwrap(), want);
        assert_eq!(command(machine).await.unwrap(), want);
        assert_eq!(shell(machine, "after").await.unwrap(), want);
        // An existing shell keeps its environment.
        assert_eq!(shell(machine, "before").await.unwrap(), "box box asked none");
    })
    .await;
}

#[tokio::test]
async fn an_invalid_environment_file_starts_nothing() {
    on_each_machine(async |machine| {
        for (make, want) in [
            ("mkdir /workspace/.env", Code::Validation),
            ("mkfifo /workspace/.env", Code::Validation),
            ("ln -s /proc/1/environ /workspace/.env", Code::Denied),
            ("head -c 70000 /dev/zero > /workspace/.env", Code::TooLarge),
        ] {
            exec(machine, make, json!({})).await.unwrap();
            let error = exec(machine, "true", json!({})).await.unwrap_err();
            assert_eq!(error.code(), want, "{make}: {error:?}");
            assert!(
                error.message().starts_with("defaults.env_file: "),
                "{error:?}"
            );
            assert_eq!(command(machine).await.unwrap_err().code(), want, "{make}");
            assert_eq!(
                shell(machine, "s").await.unwrap_err().code(),
                want,
                "{make}"
            );
            let gone = params(json!({"paths": ["/workspace/.env"], "recursive": true}));
            let (runtime, caller) = (&machine.runtime, Caller::Local);
            runtime.forward::<FileRemove>(&caller, &gone).await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_repeated_start_ignores_changed_defaults_of_the_box() {
    on_each_machine(async |machine| {
        exec(machine, "true", json!({})).await.unwrap();
        let (runtime, caller) = (&machine.runtime, Caller::Local);
        let start = async |more: Value| {
            let mut asked =
                json!({"command_id": "c", "program": {"text": PRINT}, "env": {"C": "asked"}});
            asked
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            runtime.start_command(&caller, params(asked), None).await
        };
        assert!(!start(json!({})).await.unwrap().existed);
        exec(machine, "echo D=later > /workspace/.env", json!({}))
            .await
            .unwrap();
        assert!(
            start(json!({})).await.unwrap().existed,
            "the caller does not set the file"
        );
        let defaults =
            json!({"defaults": {"cwd": "/tmp", "shell": "/bin/bash", "env": {"A": "other"}}});
        runtime.update(&caller, params(defaults)).await.unwrap();
        assert!(
            start(json!({})).await.unwrap().existed,
            "nor are the defaults"
        );
        for other in [
            json!({"env": {"C": "another"}}),
            json!({"env": {"C": "asked", "D": "more"}}),
            json!({"cwd": "/"}),
            json!({"program": {"text": "true"}}),
        ] {
            let error = start(other.clone()).await.unwrap_err();
            assert_eq!(error.code(), Code::Conflict, "{other}: {error:?}");
        }
    })
    .await;
}
