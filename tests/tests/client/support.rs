//! Real boxes behind a queue and behind a Unix socket.

use std::sync::atomic::{AtomicUsize, Ordering};

use box_client::{BoxClient, BoxHandle, ClientOptions, SpecDraft};
use box_rpc::{Caller, Options, Router};
use box_tests::machine::{Machine, on_each_machine};
use box_transports::server::Server;
use box_transports::{Endpoint, ListenOptions};

/// A server that the test can cut, and a client of it.
pub(crate) struct ServerAndClient {
    pub(crate) client: BoxClient,
    pub(crate) server: Server,
}

/// Serves at this endpoint.
pub(crate) async fn serve(endpoint: &Endpoint, router: Router) -> Server {
    let listener = endpoint.listen(&ListenOptions::default()).await.unwrap();
    Server::start(listener, router, |_| Options::new(Caller::Local))
}

/// Serves at this endpoint and connects a client.
pub(crate) async fn served(endpoint: &str, router: Router) -> ServerAndClient {
    let server = serve(&endpoint.parse().unwrap(), router).await;
    let endpoint = server.endpoint().clone();
    let client = BoxClient::connect(endpoint, ClientOptions::default()).await;
    ServerAndClient {
        client: client.unwrap(),
        server,
    }
}

/// Runs the test as every user, behind a queue and behind a Unix socket, each time with a new box.
pub(crate) async fn with_a_box(test: impl AsyncFn(&ServerAndClient, &BoxHandle)) {
    on_each_machine(async |machine| {
        each_way(machine, async |served| {
            let spec = SpecDraft::new(fresh("box"));
            let work = served.client.create(spec).await.unwrap();
            test(served, &work).await;
            work.delete().await.unwrap();
        })
        .await;
    })
    .await;
}

/// Runs the test behind a queue and behind a Unix socket.
pub(crate) async fn each_way(machine: &Machine, test: impl AsyncFn(&ServerAndClient)) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let queue = fresh("client");
    for endpoint in [
        format!("queue:{queue}"),
        format!("unix:{}", socket.display()),
    ] {
        test(&served(&endpoint, machine.runtime.router()).await).await;
    }
}

/// A unique name.
pub(crate) fn fresh(what: &str) -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    format!("{what}-{}", NUMBER.fetch_add(1, Ordering::Relaxed))
}
