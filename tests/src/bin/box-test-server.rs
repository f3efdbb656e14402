//! A test server on standard input and output. Its one argument says what it serves, whether it
//! asks for a token, and within which limits, as JSON.

use std::error::Error;

use box_rpc::{Options, Session};
use box_tests::world::{Serves, TestLimits, gate};
use box_transports::stdio;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let (serves, guarded, limits): (Serves, bool, TestLimits) = match std::env::args().nth(1) {
        Some(argument) => serde_json::from_str(&argument)?,
        None => (Serves::Actions, false, TestLimits::default()),
    };
    let limits = limits.limits();
    let connection = stdio::serve(&limits)?;
    // A stray print must not reach the protocol.
    println!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{{\"text\":\"a stray print\"}}}}");
    let options = Options {
        limits,
        gate: gate(guarded),
        ..Options::default()
    };
    let session = Session::start(connection, serves.router(), options);
    session.closed().await;
    Ok(())
}
