//! Registries that lie about sizes, digests and types, or never end.

use std::time::Duration;

use box_image::{Digest, Error, Image, Limits, PullOptions, Store, pull};
use box_rpc::Code;
use serde_json::json;

use super::support::{
    OCI_INDEX, OCI_MANIFEST, Packed, Reply, Scripted, TestImage, TestStore, registry, reply, tar,
};

async fn pulled(server: &Scripted, at: &TestStore) -> Result<Image, Error> {
    let reference = server.name("1").parse().unwrap();
    let (client, options) = (registry(), PullOptions::default());
    let done = pull(&at.store, &client, &reference, &options);
    tokio::time::timeout(Duration::from_mins(2), done)
        .await
        .expect("the pull hangs")
}

/// Asserts that the pull of an image fails, and leaves nothing.
async fn refused(server: &Scripted, code: Code, words: &str) {
    let at = TestStore::new();
    let error = pulled(server, &at).await.unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    assert!(error.to_string().contains(words), "{error}");
    at.assert_empty();
    at.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn content_with_another_digest_is_refused() {
    // Documents.
    let server = Scripted::start();
    let image = TestImage::small();
    server.offer(&image, "1");
    let other = TestImage::new(&[(tar(&[("evil", b"")]), Packed::Gzip)]);
    server.once(
        "/v2/app/manifests/1",
        vec![reply(
            200,
            &[
                ("content-type", OCI_MANIFEST),
                ("docker-content-digest", &image.digest().to_string()),
            ],
            other.manifest_bytes(),
        )],
    );
    refused(&server, Code::Validation, "instead of").await;
    let pinned = format!("/v2/app/manifests/{}", image.digest());
    server.once(
        &pinned,
        vec![reply(
            200,
            &[("content-type", OCI_MANIFEST)],
            other.manifest_bytes(),
        )],
    );
    let at = TestStore::new();
    let reference = format!("{}/app@{}", server.authority, image.digest())
        .parse()
        .unwrap();
    let error = pull(&at.store, &registry(), &reference, &PullOptions::default())
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Corrupt(_)), "{error:?}");
    let config = format!("/v2/app/blobs/{}", Digest::of(&image.config_bytes()));
    server.once(&config, vec![reply(200, &[], other.config_bytes())]);
    refused(&server, Code::Validation, "configuration").await;
    // A layer of the same size.
    let mut wrong = TestImage::new(&[(tar(&[("etc/hello", b"w0rld")]), Packed::Plain)])
        .layers
        .remove(0);
    let image = TestImage::new(&[(tar(&[("etc/hello", b"world")]), Packed::Plain)]);
    server.offer(&image, "1");
    assert_eq!(wrong.len(), image.layers[0].len());
    server.once(&image.layer_path(0), vec![reply(200, &[], wrong.clone())]);
    refused(&server, Code::Validation, "instead of").await;
    // The lie is in the bytes behind the end of the archive.
    let mut padded = tar(&[("etc/hello", b"world")]);
    padded.resize(padded.len() + 512, 0);
    let image = TestImage::new(&[(padded, Packed::Plain)]);
    server.offer(&image, "1");
    wrong.clone_from(&image.layers[0]);
    *wrong.last_mut().unwrap() = 1;
    server.once(&image.layer_path(0), vec![reply(200, &[], wrong)]);
    refused(&server, Code::Validation, "instead of").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_whose_archive_has_another_digest_is_refused() {
    let server = Scripted::start();
    let mut image = TestImage::small();
    image.config["rootfs"]["diff_ids"][0] = json!(Digest::of(b"another"));
    image.describe();
    server.offer(&image, "1");
    refused(&server, Code::Validation, "archive").await;
    // More or fewer layers than the configuration names.
    let mut image = TestImage::small();
    image.config["rootfs"]["diff_ids"] = json!([]);
    image.describe();
    server.offer(&image, "1");
    refused(&server, Code::Validation, "names 0 layers").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_of_another_size_is_refused() {
    let server = Scripted::start();
    for (change, words) in [(-1, "more"), (1, "less")] {
        let mut image = TestImage::small();
        let size = i64::try_from(image.layers[0].len()).unwrap();
        image.manifest["layers"][0]["size"] = json!(size + change);
        server.offer(&image, "1");
        refused(&server, Code::Validation, words).await;
    }
    let mut image = TestImage::small();
    for size in [json!(-1), json!(1.5), json!("1")] {
        image.manifest["layers"][0]["size"] = size;
        server.offer(&image, "1");
        refused(&server, Code::Validation, "invalid").await;
    }
    image.manifest["layers"][0]["size"] = json!(u64::MAX);
    server.offer(&image, "1");
    refused(&server, Code::TooLarge, "compressed_bytes").await;
    // Another part than the client asked for.
    let image = TestImage::large();
    server.offer(&image, "1");
    let cut = Reply {
        cut: Some(500_000),
        ..reply(200, &[], image.layers[0].clone())
    };
    let wrong = reply(206, &[("content-range", "bytes 0-9/10")], "0123456789");
    server.once(&image.layer_path(0), vec![cut, wrong]);
    refused(&server, Code::Validation, "another range").await;
}

/// CVE-2023-25153: bodies without an end.
#[tokio::test(flavor = "multi_thread")]
async fn an_endless_body_is_not_read_to_its_end() {
    let endless = || Reply {
        endless: true,
        ..reply(200, &[("content-type", OCI_MANIFEST)], vec![b' '; 1 << 16])
    };
    let server = Scripted::start();
    server.hook(move |request| (request.path == "/v2/app/manifests/1").then(endless));
    refused(&server, Code::TooLarge, "manifest").await;
    let image = TestImage::small();
    for path in [
        format!("/v2/app/blobs/{}", Digest::of(&image.config_bytes())),
        image.layer_path(0),
    ] {
        let server = Scripted::start();
        server.offer(&image, "1");
        let is_layer = path == image.layer_path(0);
        server.hook(move |request| (request.path == path).then(endless));
        if is_layer {
            refused(&server, Code::Validation, "more").await;
        } else {
            refused(&server, Code::TooLarge, "configuration").await;
        }
    }
    // A stated length beyond the limit is enough.
    let server = Scripted::start();
    let long = Reply {
        cut: Some(1),
        ..reply(200, &[("content-length", "99999999999")], "x")
    };
    server.hook(move |request| (request.path == "/v2/app/manifests/1").then(|| long.clone()));
    refused(&server, Code::TooLarge, "manifest").await;
    // A token service.
    let server = Scripted::start();
    let realm = format!("http://{}/token", server.authority);
    server.hook(move |request| {
        let challenge = format!("Bearer realm=\"{realm}\",service=\"s\"");
        Some(if request.path.starts_with("/token") {
            endless()
        } else {
            reply(401, &[("www-authenticate", &challenge)], "")
        })
    });
    refused(&server, Code::TooLarge, "token").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_arrives_byte_by_byte_ends_after_a_bounded_number_of_attempts() {
    let server = Scripted::start();
    let image = TestImage::large();
    server.offer(&image, "1");
    let (path, layer) = (image.layer_path(0), image.layers[0].clone());
    server.hook(move |request| {
        let start = request.header("range").map_or(0, |range| {
            range["bytes=".len()..]
                .trim_end_matches('-')
                .parse()
                .unwrap()
        });
        let range = format!("bytes {start}-{}/{}", layer.len() - 1, layer.len());
        let rest = reply(206, &[("content-range", &range)], &layer[start..]);
        (request.path == path).then_some(Reply {
            cut: Some(1),
            ..rest
        })
    });
    let at = TestStore::new();
    let error = pulled(&server, &at).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert_eq!(server.requests_of(&image.layer_path(0)).len(), 64);
    at.assert_empty();
}

/// CVE-2020-15157: credentials went to the addresses in a manifest.
#[tokio::test(flavor = "multi_thread")]
async fn addresses_in_a_manifest_are_never_used() {
    let (server, elsewhere) = (Scripted::start(), Scripted::start());
    let mut image = TestImage::small();
    let url = format!("http://{}/layer", elsewhere.authority);
    image.manifest["layers"][0]["urls"] = json!([url]);
    image.manifest["layers"][0]["mediaType"] =
        json!("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip");
    image.manifest["config"]["urls"] = json!([url]);
    server.offer(&image, "1");
    let at = TestStore::new();
    pulled(&server, &at).await.unwrap();
    assert!(elsewhere.requests().is_empty());
}

/// CVE-2024-3727: a digest became a path before it was checked.
#[tokio::test(flavor = "multi_thread")]
async fn a_digest_that_is_a_path_is_refused() {
    let server = Scripted::start();
    for digest in [
        "sha256:../../../../tmp/x",
        "../x",
        "sha512:00",
        "sha256:ABC",
    ] {
        let mut image = TestImage::small();
        image.manifest["layers"][0]["digest"] = json!(digest);
        server.put("/v2/app/manifests/1", OCI_MANIFEST, image.manifest_bytes());
        refused(&server, Code::Validation, "digest").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn images_that_box_cannot_run_are_refused_by_name() {
    let server = Scripted::start();
    let mut image = TestImage::small();
    image.config["architecture"] = json!("s390x");
    image.describe();
    server.offer(&image, "1");
    refused(&server, Code::Unsupported, "s390x").await;
    let one = br#"{"schemaVersion":1,"name":"app","tag":"1","fsLayers":[],"history":[]}"#;
    server.put(
        "/v2/app/manifests/1",
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
        one.to_vec(),
    );
    refused(&server, Code::Unsupported, "schema 1").await;
    // An index that contains itself, as far as a registry can make one.
    let inner = Digest::of(b"i");
    let index = |digest: Digest, size: usize| {
        let manifests = json!([{"mediaType": OCI_INDEX, "digest": digest, "size": size}]);
        serde_json::to_vec(
            &json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": manifests}),
        )
        .unwrap()
    };
    let mut last = index(inner, 1);
    for _ in 0..3 {
        server.put(
            &format!("/v2/app/manifests/{}", Digest::of(&last)),
            OCI_INDEX,
            last.clone(),
        );
        last = index(Digest::of(&last), last.len());
    }
    server.put("/v2/app/manifests/1", OCI_INDEX, last);
    refused(&server, Code::Validation, "index of an index").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bomb_ends_at_its_limit() {
    let server = Scripted::start();
    let zeros = vec![0; 80 << 20];
    let image = TestImage::new(&[(tar(&[("zeros", &zeros)]), Packed::Zstd)]);
    server.offer(&image, "1");
    refused(&server, Code::TooLarge, "ratio").await;
    let folder = tempfile::tempdir().unwrap();
    let mut limits = Limits::default();
    limits.ratio = u64::MAX;
    limits.decoded_bytes = 1 << 20;
    let store = Store::open(folder.path(), limits).unwrap();
    let reference = server.name("1").parse().unwrap();
    let error = pull(&store, &registry(), &reference, &PullOptions::default())
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("decoded_bytes exceeds its limit of 1048576"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_layer_leaves_nothing() {
    let server = Scripted::start();
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    header.set_mode(0o777);
    builder.append_link(&mut header, "link", "/etc").unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_size(0);
    header.set_mode(0o644);
    builder
        .append_data(&mut header, "link/box-image-test", &b""[..])
        .unwrap();
    let image = TestImage::new(&[(builder.into_inner().unwrap(), Packed::Gzip)]);
    server.offer(&image, "1");
    let at = TestStore::new();
    let error = pulled(&server, &at).await.unwrap_err();
    assert!(error.to_string().contains("behind a link"), "{error}");
    at.assert_empty();
    assert!(!std::path::Path::new("/etc/box-image-test").exists());
}
