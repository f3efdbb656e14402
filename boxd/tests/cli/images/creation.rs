//! Boxes whose image the server pulls when a caller creates them.

use box_client::{BoxClient, ClientError, ClientOptions, Code, PullPolicy, SpecDraft};
use box_protocol::error::Subject;
use box_test_wait::blocking::eventually;

use super::machine::Machine;
use super::registry::{Registry, ThrottledProxy, layout};
use super::settings;

/// The size of the large file, in bytes.
const LARGE: usize = 4 << 20;

/// A server with a password for the registry behind a proxy, and a client of it.
async fn started(
    machine: &Machine,
    registry: &Registry,
    proxy: &ThrottledProxy,
) -> (super::machine::Running, BoxClient) {
    machine.trust(registry);
    let server = machine.serve();
    let host = format!("localhost:{}", proxy.port);
    assert!(machine.login(&host, "secret").status.success());
    let endpoint = format!("unix:{}", machine.state().join("boxd.sock").display());
    let client = BoxClient::connect(endpoint.parse().unwrap(), ClientOptions::default());
    (server, client.await.unwrap())
}

#[track_caller]
fn assert_lacks_image(error: &ClientError) {
    assert_eq!(error.code(), Code::NotFound, "{error}");
    assert_eq!(error.detail().subject, Some(Subject::Image), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn several_boxes_of_one_missing_image_pull_it_once() {
    let registry = Registry::start();
    let folder = tempfile::tempdir().unwrap();
    registry.push(&layout(folder.path(), LARGE, &settings()), "app:1");
    let proxy = ThrottledProxy::start(&registry, u64::MAX);
    let machine = Machine::new("ordinary user");
    let (server, client) = started(&machine, &registry, &proxy).await;
    let name = format!("localhost:{}/app:1", proxy.port);
    let spec = |id: &str| SpecDraft::new(id).image(&name);
    let never = client.create(spec("never").pull(PullPolicy::Never)).await;
    assert_lacks_image(&never.unwrap_err());
    let before = proxy.passed();
    let ids = ["a", "b", "c", "d"];
    let created = ids.map(|id| client.create(spec(id)));
    for created in futures::future::join_all(created).await {
        let ran = created.unwrap().run("cat /etc/marker").await.unwrap();
        assert_eq!(ran.stdout_text(), "of the image\n");
    }
    let fetched = proxy.passed() - before;
    let size = 2 * LARGE as u64;
    assert!(
        fetched < size,
        "{fetched} bytes: the image was fetched twice"
    );
    let images = client.images().list().await.unwrap().items;
    assert_eq!((images.len(), images[0].uses), (1, 4));
    // An image that the server has needs no registry, unless the caller asks for it.
    drop((proxy, registry));
    client.create(spec("e")).await.unwrap();
    client
        .create(spec("f").pull(PullPolicy::Never))
        .await
        .unwrap();
    let ran = client.exec(spec("g").cmd("pwd")).await.unwrap();
    assert_eq!(ran.stdout_text(), "/app\n");
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_that_is_deleted_while_its_image_is_pulled_ends_the_pull() {
    let registry = Registry::start();
    let folder = tempfile::tempdir().unwrap();
    registry.push(&layout(folder.path(), LARGE, &settings()), "app:1");
    let proxy = ThrottledProxy::start(&registry, 2 << 20);
    let machine = Machine::new("root");
    let (server, client) = started(&machine, &registry, &proxy).await;
    let spec = SpecDraft::new("a").image(format!("localhost:{}/app:1", proxy.port));
    let creating = tokio::spawn({
        let client = client.clone();
        async move { client.create(spec).await }
    });
    eventually("a part of the layer has arrived", || {
        proxy.passed() >= 2 << 20
    });
    assert_eq!(machine.json(&["ps"])[0]["state"], "starting");
    machine.ok(&["rm", "--force", "a"]);
    let error = creating.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("deleted"), "{error}");
    eventually("the pull has ended", || {
        machine.stored("work").is_empty() && machine.stored("pulls").is_empty()
    });
    assert_eq!(machine.ok(&["ps", "-q"]), "");
    assert_eq!(machine.stored("images"), [""; 0]);
    let pruned = machine.json(&["image", "prune"]);
    assert!(pruned["freed_bytes"].as_u64() >= Some(1 << 20), "{pruned}");
    machine.assert_clean();
    drop(server);
}
