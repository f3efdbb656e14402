//! A runtime linked into its host and joined to it by queues: no server, no socket, no configuration.

use std::error::Error;

use box_client::{BoxClient, Chunk, SpecDraft};
use box_rpc::{Caller, Limits, Options, Router, Session};
use box_transports::queue;
use futures::StreamExt as _;

fn main() -> Result<(), Box<dyn Error>> {
    // Boxes are made by this program, started again: it must see that first, before there is a thread.
    box_sys::serve_if_asked(box_agent::prepare);
    run()
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn run() -> Result<(), Box<dyn Error>> {
    let runtime = box_examples::runtime()?;
    let (near, far) = queue::pair(1024);
    let options = || Options {
        limits: Limits::in_process(),
        ..Options::new(Caller::Local)
    };
    let _server = Session::start(far, runtime.router(), options());
    let host = Session::start(near, Router::empty(), options());
    let client = BoxClient::from_peer(host.peer());

    // Deleted when the handle is dropped, whatever happens below.
    let work = client.create(SpecDraft::new("job-1")).await?.ephemeral();

    let files = work.files();
    files.write("/workspace/numbers", "3\n1\n2\n").await?;
    let sorted = work.run("sort -n numbers | tee sorted").await?;
    assert!(sorted.success());
    assert_eq!(sorted.stdout_text(), "1\n2\n3\n");
    assert_eq!(
        files.read_to_string("/workspace/sorted").await?,
        "1\n2\n3\n"
    );

    let mut count = work
        .command("for i in 1 2 3; do echo $i; sleep 0.05; done; exit 3")
        .start()
        .await?;
    while let Some(chunk) = count.next().await.transpose()? {
        if let Chunk::Output { stream, offset, .. } = &chunk {
            print!("{stream:?} at byte {offset}: {}", chunk.text());
        }
    }
    println!("ended with {:?}", count.exit().await?.code);

    work.delete().await?;
    Ok(())
}
