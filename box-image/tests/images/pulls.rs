//! Pulls that succeed, also after failures.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use box_image::{Digest, Event, Phase, Progress, PullOptions, pull};
use box_rpc::Code;
use serde_json::json;

use super::support::{
    OCI_INDEX, OCI_MANIFEST, Packed, Reply, Scripted, TestImage, TestStore, assert_clean_folder,
    noise, options, registry, reply, tar,
};

#[tokio::test(flavor = "multi_thread")]
async fn every_compression_is_pulled_and_flattened() {
    let server = Scripted::start();
    let image = TestImage::new(&[
        (
            tar(&[("a", b"one"), ("b", b"one"), ("d/e", b"one")]),
            Packed::Gzip,
        ),
        (
            tar(&[("b", b"two"), (".wh.a", b""), ("big", &noise(1 << 20))]),
            Packed::Zstd,
        ),
        (tar(&[("c", b"three")]), Packed::Plain),
    ]);
    server.offer(&image, "1");
    let at = TestStore::new();
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&events);
    let options = PullOptions {
        progress: Progress::new(move |event| seen.lock().unwrap().push(event)),
        ..PullOptions::default()
    };
    let reference = server.name("1").parse().unwrap();
    let pulled = pull(&at.store, &registry(), &reference, &options)
        .await
        .unwrap();
    assert_eq!(pulled.digest, image.digest());
    assert_eq!(pulled.names, [server.name("1")]);
    assert_eq!(pulled.source.as_deref(), Some(server.name("1").as_str()));
    assert_eq!(pulled.config.env, ["PATH=/bin", "A=1"]);
    assert_eq!(
        (
            pulled.config.user.as_str(),
            pulled.config.working_dir.as_str()
        ),
        ("1000:1000", "/srv")
    );
    assert_eq!(
        (pulled.config.entrypoint.len(), pulled.config.cmd.len()),
        (1, 0)
    );
    assert_eq!(pulled.config.exposed_ports, ["80/tcp"]);
    assert_eq!(pulled.config.labels["k"], "v");
    let root = at.store.rootfs(&pulled.digest);
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    assert_eq!(
        (read("b"), read("c"), read("d/e")),
        ("two".into(), "three".into(), "one".into())
    );
    assert!(!root.join("a").exists());
    at.assert_clean();
    let events = events.lock().unwrap();
    assert!(
        matches!(&events[0], Event::Resolved { digest, layers } if *digest == image.digest() && layers.len() == 3)
    );
    for (number, layer) in image.layers.iter().enumerate() {
        let (digest, size) = (Digest::of(layer), layer.len() as u64);
        for phase in [Phase::Download, Phase::Unpack, Phase::Done] {
            let end = Event::Layer {
                digest,
                phase,
                done: size,
                total: size,
            };
            assert!(events.contains(&end), "{number} {phase:?}");
        }
    }
    assert_eq!(events.last(), Some(&Event::Saving));
    let text = serde_json::to_string(&events[1]).unwrap();
    assert!(text.starts_with(r#"{"event":"layer","#), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_manifest_of_this_machine_is_chosen_from_an_index() {
    let server = Scripted::start();
    let mut image = TestImage::small();
    // As umoci writes it: the type is only in the header.
    image.manifest.as_object_mut().unwrap().remove("mediaType");
    server.offer(&image, "arch");
    let host = box_image::Platform::host();
    let manifest = image.manifest_bytes();
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [
        {"mediaType": OCI_MANIFEST, "digest": Digest::of(b"x"), "size": 1, "platform": {"os": "linux", "architecture": "other"}},
        {"mediaType": OCI_MANIFEST, "digest": Digest::of(&manifest), "size": manifest.len(), "platform": host},
    ]}))
    .unwrap();
    let digest = Digest::of(&index);
    server.put("/v2/app/manifests/multi", OCI_INDEX, index.clone());
    server.put(&format!("/v2/app/manifests/{digest}"), OCI_INDEX, index);
    let at = TestStore::new();
    let client = registry();
    let options = PullOptions::default();
    let pulled = pull(
        &at.store,
        &client,
        &server.name("multi").parse().unwrap(),
        &options,
    )
    .await
    .unwrap();
    assert_eq!(pulled.digest, image.digest());
    // The digest of the index finds the image too, and fixes the content of a pull.
    let fixed = format!("{}/app@{digest}", server.authority);
    assert_eq!(at.store.get(&fixed).unwrap().digest, image.digest());
    let again = pull(&at.store, &client, &fixed.parse().unwrap(), &options)
        .await
        .unwrap();
    assert_eq!(again.names.len(), 2);
    assert_eq!(
        server.requests_of(&image.layer_path(0)).len(),
        1,
        "a known image is not fetched again"
    );
    let missing = pull(
        &at.store,
        &client,
        &server.name("none").parse().unwrap(),
        &options,
    )
    .await
    .unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
    assert!(
        missing.to_string().contains(&server.name("none")),
        "{missing}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_moved_tag_moves_and_the_old_image_stays() {
    let server = Scripted::start();
    let (one, two) = (
        TestImage::small(),
        TestImage::new(&[(tar(&[("x", b"2")]), Packed::Zstd)]),
    );
    let at = TestStore::new();
    let client = registry();
    let reference = server.name("latest").parse().unwrap();
    for image in [&one, &two] {
        server.offer(image, "latest");
        let pulled = pull(&at.store, &client, &reference, &PullOptions::default())
            .await
            .unwrap();
        assert_eq!(pulled.digest, image.digest());
    }
    assert_eq!(
        at.store.get(&server.name("latest")).unwrap().digest,
        two.digest()
    );
    assert_eq!(at.store.list().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_layer_is_continued_where_it_ended() {
    let server = Scripted::start();
    let image = TestImage::large();
    server.offer(&image, "1");
    let layer = image.layers[0].clone();
    let cut = |bytes: usize| Reply {
        cut: Some(bytes),
        ..reply(200, &[], layer.clone())
    };
    let ignores_range = Reply {
        cut: Some(2 << 20),
        ..reply(200, &[], layer.clone())
    };
    server.once(
        &image.layer_path(0),
        vec![cut(700_000), cut(0), reply(503, &[], ""), ignores_range],
    );
    let at = TestStore::new();
    let reference = server.name("1").parse().unwrap();
    pull(&at.store, &registry(), &reference, &PullOptions::default())
        .await
        .unwrap();
    let ranges: Vec<_> = server
        .requests_of(&image.layer_path(0))
        .iter()
        .map(|r| r.header("range").map(str::to_owned))
        .collect();
    assert_eq!(ranges.len(), 5, "{ranges:?}");
    assert_eq!(ranges[0], None);
    assert_eq!(ranges[1].as_deref(), Some("bytes=700000-"));
    assert_eq!(ranges[3].as_deref(), Some("bytes=700000-"));
    assert_eq!(ranges[4].as_deref(), Some("bytes=2097152-"));
    at.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_pull_leaves_its_layers_for_the_next() {
    let server = Scripted::start();
    let image = TestImage::large();
    server.offer(&image, "1");
    let stalled = Reply {
        cut: Some(1 << 20),
        stall: true,
        ..reply(200, &[], image.layers[0].clone())
    };
    server.once(&image.layer_path(0), vec![stalled]);
    let at = TestStore::new();
    let (client, reference) = (registry(), server.name("1").parse().unwrap());
    let options = PullOptions::default();
    let size = || {
        let partial = std::fs::read_dir(at.path().join("partial")).unwrap();
        partial
            .map(|file| file.unwrap().metadata().unwrap().len())
            .sum::<u64>()
    };
    let pulling = pull(&at.store, &client, &reference, &options);
    tokio::select! {
        done = pulling => panic!("{done:?}"),
        () = async { while size() < 1 << 19 { tokio::time::sleep(Duration::from_millis(5)).await } } => {}
    }
    let kept = size();
    at.assert_empty();
    for folder in ["work", "pulls"] {
        assert_clean_folder(&at.path(), folder);
    }
    // A write that had begun may still arrive.
    let pulled = pull(&at.store, &client, &reference, &options)
        .await
        .unwrap();
    assert_eq!(pulled.digest, image.digest());
    let second = &server.requests_of(&image.layer_path(0))[1];
    let start: u64 = second.header("range").unwrap()["bytes=".len()..]
        .trim_end_matches('-')
        .parse()
        .unwrap();
    assert!(start >= kept && start <= 1 << 20, "{start} {kept}");
    at.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_earlier_download_is_fetched_again() {
    let server = Scripted::start();
    let image = TestImage::large();
    server.offer(&image, "1");
    let at = TestStore::new();
    let partial = at
        .path()
        .join("partial")
        .join(Digest::of(&image.layers[0]).hex());
    for wrong in [
        vec![7; 100_000],
        vec![7; image.layers[0].len()],
        vec![7; image.layers[0].len() + 1],
    ] {
        std::fs::write(&partial, wrong).unwrap();
        let pulled = pull(
            &at.store,
            &registry(),
            &server.name("1").parse().unwrap(),
            &PullOptions::default(),
        )
        .await;
        assert_eq!(pulled.unwrap().digest, image.digest());
        at.assert_clean();
        at.store
            .remove(&server.name("1"), &box_image::Uses::new())
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_pulls_of_one_image_fetch_it_once() {
    let server = Scripted::start();
    let image = TestImage::new(&[
        (tar(&[("a", &noise(1 << 20))]), Packed::Gzip),
        (tar(&[("a", &noise(1 << 20))]), Packed::Gzip),
    ]);
    server.offer(&image, "1");
    let at = TestStore::new();
    let mut pulls = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (store, reference) = (at.store.clone(), server.name("1").parse().unwrap());
        pulls.spawn(
            async move { pull(&store, &registry(), &reference, &PullOptions::default()).await },
        );
    }
    for pulled in pulls.join_all().await {
        assert_eq!(pulled.unwrap().digest, image.digest());
    }
    assert_eq!(
        server.requests_of(&image.layer_path(0)).len(),
        1,
        "both layers are the same blob"
    );
    at.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn images_that_share_a_layer_are_pulled_at_once() {
    let server = Scripted::start();
    let base = tar(&[("base", &noise(1 << 20))]);
    let images: Vec<_> = (0..4_u8)
        .map(|n| {
            TestImage::new(&[
                (base.clone(), Packed::Gzip),
                (tar(&[("own", &[n])]), Packed::Gzip),
            ])
        })
        .collect();
    let at = TestStore::new();
    let mut pulls = tokio::task::JoinSet::new();
    for (number, image) in images.iter().enumerate() {
        server.offer(image, &number.to_string());
        let (store, reference) = (
            at.store.clone(),
            server.name(&number.to_string()).parse().unwrap(),
        );
        pulls.spawn(
            async move { pull(&store, &registry(), &reference, &PullOptions::default()).await },
        );
    }
    for pulled in pulls.join_all().await {
        pulled.unwrap();
    }
    assert_eq!(at.store.list().unwrap().len(), 4);
    at.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_registry_is_asked_again_after_the_time_it_states() {
    let server = Scripted::start();
    let image = TestImage::small();
    server.offer(&image, "1");
    let busy = || reply(429, &[("retry-after", "0")], "");
    let date = reply(503, &[("retry-after", "Sun, 06 Nov 1994 08:49:37 GMT")], "");
    server.once(
        "/v2/app/manifests/1",
        vec![busy(), date, reply(502, &[], "")],
    );
    server.once(
        &image.layer_path(0),
        vec![reply(429, &[("retry-after", "1")], "")],
    );
    let at = TestStore::new();
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&events);
    let options = PullOptions {
        progress: Progress::new(move |event| {
            if let Event::Retry { wait_ms, .. } = event {
                seen.lock().unwrap().push(wait_ms);
            }
        }),
        ..PullOptions::default()
    };
    let reference = server.name("1").parse().unwrap();
    pull(&at.store, &registry(), &reference, &options)
        .await
        .unwrap();
    assert_eq!(*events.lock().unwrap(), [0, 0, 4, 1000]);
    // A registry that never recovers, and one that asks for too much.
    server.hook(|request| (request.path == "/v2/app/manifests/down").then(|| reply(503, &[], "")));
    server.hook(|request| {
        (request.path == "/v2/app/manifests/tomorrow")
            .then(|| reply(429, &[("retry-after", "86400")], ""))
    });
    for (tag, requests) in [("down", 6), ("tomorrow", 1)] {
        let error = pull(
            &at.store,
            &registry(),
            &server.name(tag).parse().unwrap(),
            &options,
        )
        .await
        .unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        assert_eq!(
            server
                .requests_of(&format!("/v2/app/manifests/{tag}"))
                .len(),
            requests
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_are_tried_in_order_before_the_registry() {
    let (server, mirror) = (Scripted::start(), Scripted::start());
    let image = TestImage::large();
    server.offer(&image, "1");
    mirror.offer(&image, "1");
    // The mirror loses the layer in the middle.
    let cut = Reply {
        cut: Some(600_000),
        ..reply(200, &[], image.layers[0].clone())
    };
    mirror.once(&image.layer_path(0), vec![cut, reply(404, &[], "")]);
    let mut options = options();
    let nowhere = "127.0.0.1:1".to_owned();
    options.mirrors = [(
        server.authority.clone(),
        vec![nowhere, mirror.authority.clone()],
    )]
    .into();
    let client = box_image::Registry::new(options).unwrap();
    let at = TestStore::new();
    let pulled = pull(
        &at.store,
        &client,
        &server.name("1").parse().unwrap(),
        &PullOptions::default(),
    )
    .await
    .unwrap();
    assert_eq!(
        pulled.names,
        [server.name("1")],
        "the name is that of the registry"
    );
    let requests: Vec<_> = server.requests().iter().map(|r| r.path.clone()).collect();
    assert_eq!(requests, [image.layer_path(0)]);
    assert_eq!(server.requests()[0].header("range"), Some("bytes=600000-"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_on_another_machine_needs_tls() {
    // The kernel connects this address to this machine, but it is no loopback address.
    let server = Scripted::on("0.0.0.0:0");
    server.offer(&TestImage::small(), "1");
    let at = TestStore::new();
    let reference = server.name("1").parse().unwrap();
    let error = pull(&at.store, &registry(), &reference, &PullOptions::default())
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(server.requests().is_empty());
    let mut options = options();
    options.plain_http = vec![server.authority.clone()];
    let client = box_image::Registry::new(options).unwrap();
    pull(&at.store, &client, &reference, &PullOptions::default())
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_registry_is_named() {
    let at = TestStore::new();
    let reference = "127.0.0.1:1/app".parse().unwrap();
    let error = pull(&at.store, &registry(), &reference, &PullOptions::default())
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
}
