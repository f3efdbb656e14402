//! A test server on standard input and output. Its one argument says what it serves, whether it
//! asks for a token, and within which limits, as JSON. It is the fork server of its own real boxes.

use std::error::Error;

use box_rpc::{Options, Session};
use box_tests::world::{Serves, TestLimits, gate};
use box_transports::stdio;

fn main() -> Result<(), Box<dyn Error>> {
    box_sys::serve_if_asked(box_agent::prepare);
    serve()
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn serve() -> Result<(), Box<dyn Error>> {
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
    let session = Session::start(
        connection,
        serves.router(&std::env::current_exe()?),
        options,
    );
    session.closed().await;
    Ok(())
}
