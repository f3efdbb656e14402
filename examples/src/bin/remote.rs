//! A runtime elsewhere, over TCP with a token. The connection is lost in the middle of a command, and nothing of its output is.

use std::error::Error;
use std::process::Stdio;
use std::time::Duration;

use box_client::{BoxClient, ClientOptions, SpecDraft};
use box_rpc::{Auth, Options, Tokens};
use box_transports::server::Server;
use box_transports::{Endpoint, ListenOptions};
use futures::StreamExt as _;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

/// Where both ends find the token: never among the arguments, which everybody on the machine can see.
const TOKEN: &str = "EXAMPLE_BOX_TOKEN";

fn main() -> Result<(), Box<dyn Error>> {
    box_sys::serve_if_asked(box_agent::prepare);
    match std::env::args().nth(1).as_deref() {
        None => host(),
        Some("serve") => serve(),
        Some(other) => Err(format!("no such word: {other}").into()),
    }
}

/// The other machine: listens, prints its address, and cuts every connection on request, as a network does.
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn serve() -> Result<(), Box<dyn Error>> {
    let auth = Auth::Tokens(Tokens::new([("host".to_owned(), std::env::var(TOKEN)?)]));
    let endpoint: Endpoint = "tcp://127.0.0.1:0".parse()?;
    let listener = endpoint.listen(&ListenOptions::default()).await?;
    let router = box_examples::runtime()?.router();
    let server = Server::start(listener, router, move |_| Options::new(auth.clone()));
    println!("{}", server.endpoint());
    let cutting = tokio::task::spawn_blocking(move || {
        for word in std::io::stdin().lines() {
            if word? == "cut" {
                server.cut();
            }
        }
        std::io::Result::Ok(())
    });
    cutting.await??;
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn host() -> Result<(), Box<dyn Error>> {
    let token = uuid::Uuid::new_v4().simple().to_string();
    let mut machine = Command::new(std::env::current_exe()?)
        .arg("serve")
        .env(TOKEN, &token)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let (Some(mut tell), Some(said)) = (machine.stdin.take(), machine.stdout.take()) else {
        return Err("the child has no streams".into());
    };
    let mut said = BufReader::new(said).lines();
    let endpoint: Endpoint = said
        .next_line()
        .await?
        .ok_or("it does not serve")?
        .parse()?;

    let client = BoxClient::connect(endpoint, ClientOptions::default().token(token)).await?;
    let work = client.create(SpecDraft::new("remote-1")).await?;
    let text = "for i in $(seq 1 100); do echo line $i; sleep 0.01; done";
    let mut command = work
        .command(text)
        .timeout(Duration::from_mins(1))
        .start()
        .await?;

    let mut lines = String::new();
    let mut lost = false;
    while let Some(chunk) = command.next().await.transpose()? {
        lines.push_str(&chunk.text());
        if !lost && lines.len() > 200 {
            lost = true;
            tell.write_all(b"cut\n").await?;
        }
    }
    println!(
        "{} lines, ended with {:?}, connection lost: {lost}",
        lines.lines().count(),
        command.exit().await?.code,
    );

    work.delete().await?;
    drop(tell);
    machine.wait().await?;
    Ok(())
}
