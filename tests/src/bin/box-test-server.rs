//! A test server on standard input and output.
//!
//! Its one argument is JSON: the actions it serves, whether it requires a token, its limits and its
//! dialect. It is also the fork server of its real boxes.

use std::error::Error;

use box_gateways::langbot::ALL_CODECS;
use box_rpc::{Codecs, Options, Session};
use box_tests::fixture::{Dialect, Serves, TestLimits, auth};
use box_transports::stdio;

fn main() -> Result<(), Box<dyn Error>> {
    box_sys::serve_if_asked(box_agent::prepare);
    serve()
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn serve() -> Result<(), Box<dyn Error>> {
    let (serves, requires_token, limits, dialect): (Serves, bool, TestLimits, Dialect) =
        if let Some(argument) = std::env::args().nth(1) {
            serde_json::from_str(&argument)?
        } else {
            let limits = TestLimits::default();
            (Serves::Actions, false, limits, Dialect::JsonRpc)
        };
    let limits = limits.limits();
    let connection = dialect.over_stdio(Box::new(stdio::serve(&limits)?), &limits);
    // A stray print must not reach the protocol.
    println!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{{\"text\":\"a stray print\"}}}}");
    let options = Options {
        limits,
        codecs: Codecs::FirstOf(ALL_CODECS),
        ..Options::new(auth(requires_token))
    };
    let session = Session::start_boxed(
        connection,
        serves.router(&std::env::current_exe()?),
        options,
    );
    session.closed().await;
    Ok(())
}
