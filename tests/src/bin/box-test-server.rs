//! A test server on standard input and output. Its one argument is its limits, as JSON.

use std::error::Error;
use std::sync::Arc;

use box_rpc::{Options, Session};
use box_tests::actions::Server;
use box_tests::world::TestLimits;
use box_transports::stdio;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let argument = std::env::args().nth(1).unwrap_or_else(|| "{}".to_owned());
    let limits: TestLimits = serde_json::from_str(&argument)?;
    let limits = limits.limits();
    let connection = stdio::serve(&limits)?;
    // A stray print must not reach the protocol.
    println!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{{\"text\":\"a stray print\"}}}}");
    let options = Options {
        limits,
        ..Options::default()
    };
    let session = Session::start(connection, Arc::new(Server::default()).router(), options);
    session.closed().await;
    Ok(())
}
