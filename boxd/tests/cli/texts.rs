//! One rule says which shell runs a text, where, and with which variables, however the text is started.

use box_client::{BoxClient, BoxHandle, ClientOptions, SpecDraft};
use box_protocol::actions::{BoxUpdate, BoxUpdateParams};
use box_protocol::{Defaults, DefaultsChange};

use super::support::Server;

/// Prints everything that the rule decides.
const TEXT: &str = r#"if [[ a == a* ]] 2>/dev/null; then echo double brackets; fi
echo "$0"; pwd; echo "$PATH"; echo "$OF_BOX $OF_FILE $BOTH"; case $- in *i*) echo interactive;; esac"#;

fn spec() -> SpecDraft {
    let mut spec = SpecDraft::new("same");
    let mut defaults = Defaults {
        env_file: Some("/tmp/variables".to_owned()),
        cwd: Some("/tmp".to_owned()),
        ..Defaults::default()
    };
    defaults.env.insert("OF_BOX", "box").unwrap();
    defaults.env.insert("BOTH", "box").unwrap();
    spec.defaults = Some(defaults);
    spec
}

/// What the text prints, by each way to run it.
async fn printed(
    server: &Server,
    client: &BoxClient,
    work: &BoxHandle,
) -> [(&'static str, String); 5] {
    let exec = client.exec(spec().cmd(TEXT)).await.unwrap();
    let run = work.run(TEXT).await.unwrap();
    let mut command = work.command(TEXT).start().await.unwrap();
    let command = command.result().await.unwrap();
    [
        ("client.exec", exec.stdout_text().into_owned()),
        ("work.run", run.stdout_text().into_owned()),
        ("work.command", command.stdout_text().into_owned()),
        ("boxd exec", server.ok(&["exec", "same", TEXT])),
        ("boxd run", server.ok(&["run", "--name", "same", TEXT])),
    ]
}

#[tokio::test]
async fn every_way_to_run_a_text_uses_the_same_shell() {
    let server = Server::start();
    let endpoint = server.endpoints[0].parse().unwrap();
    let client = BoxClient::connect(endpoint, ClientOptions::default()).await;
    let client = client.unwrap();
    let work = client.get_or_create(spec()).await.unwrap();
    let variables = "OF_FILE=file\nBOTH=file\n";
    work.files()
        .write("/tmp/variables", variables)
        .await
        .unwrap();

    let all = printed(&server, &client, &work).await;
    let lines: Vec<_> = all[0].1.lines().collect();
    assert_eq!(
        lines[..3],
        ["double brackets", "/bin/bash", "/tmp"],
        "{all:?}"
    );
    assert!(lines[3].contains("/.local/bin"), "{all:?}");
    assert_eq!(lines[4..], ["box file file"], "{all:?}");
    for (origin, text) in &all {
        assert_eq!(*text, all[0].1, "{origin}");
    }

    // The shell of the box wins over bash, for all of them.
    let update = BoxUpdateParams {
        defaults: Some(DefaultsChange {
            shell: Some(Some("/bin/sh".to_owned())),
            ..DefaultsChange::default()
        }),
        ..BoxUpdateParams::of(work.id().clone())
    };
    client.call::<BoxUpdate>(&update).await.unwrap();
    let all = printed(&server, &client, &work).await;
    assert!(all[0].1.contains("/bin/sh\n/tmp\n"), "{all:?}");
    for (origin, text) in &all {
        assert_eq!(*text, all[0].1, "{origin}");
    }
}
