//! A plugin host: starts a runtime as a child and speaks to it over the child's standard input and output.

use std::error::Error;
use std::time::Duration;

use box_client::{BoxClient, ClientOptions, Endpoint, SpecDraft};
use box_rpc::{Caller, Limits, Options, Session};
use box_transports::stdio;

fn main() -> Result<(), Box<dyn Error>> {
    box_sys::serve_if_asked(box_agent::prepare);
    match std::env::args().nth(1).as_deref() {
        None => host(),
        Some("runtime") => runtime(),
        Some(other) => Err(format!("no such word: {other}").into()),
    }
}

/// The child: a runtime, and a client of the parent.
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn runtime() -> Result<(), Box<dyn Error>> {
    let connection = stdio::serve(&Limits::default())?;
    let router = box_examples::runtime()?.router();
    let session = Session::start(connection, router, Options::new(Caller::Local));
    session.closed().await;
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn host() -> Result<(), Box<dyn Error>> {
    // A host of yours names the runtime it has installed.
    let program = std::env::current_exe()?.display().to_string();
    let command = vec![program, "runtime".to_owned()];
    let patient = ClientOptions::default().first_connection(Duration::from_secs(10));
    let client = BoxClient::connect(Endpoint::Stdio { command }, patient).await?;

    let work = client.get_or_create(SpecDraft::new("plugin-1")).await?;
    let shell = work.shell("main").open().await?;
    shell.run("cd /tmp && export GREETING=hello").await?;
    let greeting = shell.run("echo $GREETING from $PWD").await?;
    print!("{}", greeting.stdout_text());

    let python = work.shell("py").python().open().await?;
    python.run("x = 41").await?;
    print!("{}", python.run("print(x + 1)").await?.stdout_text());
    let failed = python.run("1 / 0").await?;
    println!(
        "{}",
        failed.error.map(|error| error.name).unwrap_or_default()
    );

    shell.close().await;
    work.delete().await?;
    Ok(())
}
