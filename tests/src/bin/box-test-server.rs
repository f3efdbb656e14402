//! A test server on standard input and output. Its one argument says what it serves and within which
//! limits, as JSON.

use std::error::Error;

use box_rpc::{Options, Session};
use box_tests::world::{Serves, TestLimits};
use box_transports::stdio;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let (serves, limits): (Serves, TestLimits) = match std::env::args().nth(1) {
        Some(argument) => serde_json::from_str(&argument)?,
        None => (Serves::Actions, TestLimits::default()),
    };
    let limits = limits.limits();
    let connection = stdio::serve(&limits)?;
    // A stray print must not reach the protocol.
    println!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{{\"text\":\"a stray print\"}}}}");
    let options = Options {
        limits,
        ..Options::default()
    };
    let session = Session::start(connection, serves.router(), options);
    session.closed().await;
    Ok(())
}
