//! Code that the tests share.
//!
//! - [`actions`]: the actions of a test server, and its state.
//! - [`boxes`]: a runtime with a scripted backend, and the actions to inspect it.
//! - [`fixture`]: a client and a server connected by any transport, in any dialect.
//! - [`image`]: a small image made of programs of the host.
//! - [`machine`]: a runtime with real boxes, as every available user.
//! - [`process`]: the memory of processes.
//! - [`raw`]: an end of a connection that sends any text.
//! - [`every_transport!`]: runs one test body over all of them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "test code"
)]

pub mod actions;
pub mod boxes;
pub mod fixture;
pub mod image;
pub mod machine;
pub mod process;
pub mod raw;

/// Runs each named body (an `async fn(Setup)`) over every transport and in both dialects.
///
/// Bodies after `two_clients:` need two clients of one server. They run over every transport except
/// stdio, where a server has one client, which started it.
#[macro_export]
macro_rules! every_transport {
    (two_clients: $($body:ident),+ $(,)?) => {
        $(mod $body {
            $crate::every_transport!(@names $body);
            $crate::every_transport!(@listening);
        })+
    };
    ($($body:ident),+ $(,)?) => {
        $(mod $body {
            $crate::every_transport!(@names $body);
            $crate::every_transport!(@one stdio_json_rpc, Stdio, JsonRpc);
            $crate::every_transport!(@one stdio_langbot, Stdio, LangBot);
            $crate::every_transport!(@listening);
        })+
    };
    (@names $body:ident) => {
        use super::$body as body;
        use $crate::fixture::Dialect::{JsonRpc, LangBot};
        use $crate::fixture::{Setup, Transport};
    };
    (@listening) => {
        $crate::every_transport!(@one queue_json_rpc, Queue, JsonRpc);
        $crate::every_transport!(@one queue_langbot, Queue, LangBot);
        $crate::every_transport!(@one tcp_json_rpc, Tcp, JsonRpc);
        $crate::every_transport!(@one tcp_langbot, Tcp, LangBot);
        $crate::every_transport!(@one tls_json_rpc, Tls, JsonRpc);
        $crate::every_transport!(@one tls_langbot, Tls, LangBot);
        $crate::every_transport!(@one unix_json_rpc, Unix, JsonRpc);
        $crate::every_transport!(@one unix_langbot, Unix, LangBot);
        $crate::every_transport!(@one websocket_json_rpc, WebSocket, JsonRpc);
        $crate::every_transport!(@one websocket_langbot, WebSocket, LangBot);
    };
    (@one $name:ident, $transport:ident, $dialect:ident) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let setup = Setup::new(Transport::$transport, $dialect, env!("CARGO_BIN_EXE_box-test-server"));
            let test = tokio::time::timeout(std::time::Duration::from_mins(5), body(setup));
            test.await.expect("the test hangs");
        }
    };
}

/// Runs the code of the README.
#[doc = include_str!("../../README.md")]
#[cfg(doctest)]
#[derive(Debug)]
pub struct Readme;
