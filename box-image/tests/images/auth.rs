//! Credentials: which peer gets them, and which never does.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

use box_image::{Credentials, Error, PullOptions, Registry, RegistryOptions, pull};
use box_rpc::Code;
use serde_json::json;

use super::support::{Request, Scripted, TestImage, TestStore, options, reply};

/// `box:secret` in base64.
const BASIC: &str = "Basic Ym94OnNlY3JldA==";

fn basic() -> Credentials {
    Credentials::Basic {
        username: "box".into(),
        password: "secret".into(),
    }
}

fn with(server: &Scripted, credentials: Credentials) -> RegistryOptions {
    let mut options = options();
    options.credentials = [(server.authority.clone(), credentials)].into();
    options
}

async fn attempt(server: &Scripted, options: RegistryOptions) -> Result<(), Error> {
    let at = TestStore::new();
    let client = Registry::new(options).unwrap();
    let done = pull(
        &at.store,
        &client,
        &server.name("1").parse().unwrap(),
        &PullOptions::default(),
    )
    .await;
    done.map(drop)
}

/// A registry that requires a token, and its token service.
fn token_server(
    image: &TestImage,
    check: impl Fn(&Request) -> bool + Send + Sync + 'static,
) -> (Scripted, Scripted) {
    let (server, service) = (Scripted::start(), Scripted::start());
    server.offer(image, "1");
    let challenge = format!(
        "Bearer realm=\"http://{}/token?x=1\",service=\"my service\",scope=\"repository:app:pull\"",
        service.authority
    );
    server.hook(move |request| {
        let right = request.header("authorization") == Some("Bearer t0ken");
        (!right).then(|| reply(401, &[("www-authenticate", &challenge)], ""))
    });
    service.hook(move |request| {
        Some(if check(request) {
            reply(200, &[], r#"{"token":"t0ken","expires_in":300}"#)
        } else {
            reply(401, &[], "secret")
        })
    });
    (server, service)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_anonymous_token_is_fetched_once_and_used_for_everything() {
    let image = TestImage::small();
    let (server, service) =
        token_server(&image, |request| request.header("authorization").is_none());
    attempt(&server, options()).await.unwrap();
    let asked: Vec<_> = service
        .requests()
        .iter()
        .map(|request| request.path.clone())
        .collect();
    assert_eq!(
        asked,
        ["/token?x=1&service=my%20service&scope=repository%3Aapp%3Apull"]
    );
    let unauthorized = server
        .requests()
        .iter()
        .filter(|r| r.header("authorization").is_none())
        .count();
    assert_eq!(unauthorized, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_exchanged_for_a_token() {
    let image = TestImage::small();
    let (server, service) = token_server(&image, |request| {
        request.header("authorization") == Some(BASIC)
    });
    attempt(&server, with(&server, basic())).await.unwrap();
    assert!(
        server
            .requests()
            .iter()
            .all(|request| request.header("authorization") != Some(BASIC))
    );
    assert_eq!(service.requests().len(), 1);
    let wrong = Credentials::Basic {
        username: "box".into(),
        password: "wrong".into(),
    };
    let error = attempt(&server, with(&server, wrong)).await.unwrap_err();
    assert_eq!(error.code(), Code::Denied);
    assert!(
        !error.to_string().contains("wrong") && !error.to_string().contains("secret"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_token_is_exchanged_by_a_form() {
    let image = TestImage::small();
    let (server, service) = token_server(&image, |request| {
        request.method == "POST"
            && request.body.contains("refresh_token=id%2Ftoken")
            && request.body.contains("grant_type=refresh_token")
    });
    attempt(
        &server,
        with(&server, Credentials::IdentityToken("id/token".into())),
    )
    .await
    .unwrap();
    assert!(
        !service.requests()[0].path.contains("token%"),
        "no secret in an address"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_sent_only_after_the_registry_asked() {
    let server = Scripted::start();
    server.offer(&TestImage::small(), "1");
    server.hook(|request| {
        let right = request.header("authorization") == Some(BASIC);
        (!right).then(|| reply(401, &[("www-authenticate", "Basic realm=\"x\"")], ""))
    });
    attempt(&server, with(&server, basic())).await.unwrap();
    assert_eq!(server.requests()[0].header("authorization"), None);
    let error = attempt(&server, options()).await.unwrap_err();
    assert_eq!(error.code(), Code::Denied, "{error}");
    let wrong = Credentials::Basic {
        username: "box".into(),
        password: "wrong".into(),
    };
    let before = server.requests().len();
    let error = attempt(&server, with(&server, wrong)).await.unwrap_err();
    assert_eq!(error.code(), Code::Denied);
    assert_eq!(
        server.requests().len() - before,
        2,
        "a refused password is not tried again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_do_not_follow_a_redirect_to_another_host() {
    let (server, elsewhere) = (Scripted::start(), Scripted::start());
    let image = TestImage::small();
    server.offer(&image, "1");
    elsewhere.offer(&image, "1");
    let target = format!("http://{}", elsewhere.authority);
    let layer = image.layer_path(0);
    server.hook(move |request| {
        if request.header("authorization") != Some(BASIC) {
            return Some(reply(401, &[("www-authenticate", "Basic realm=\"x\"")], ""));
        }
        let location = format!("{target}{}", request.path);
        // A redirect within the registry, then one to another host.
        let (here, there) = (
            format!("/same{}", request.path),
            location.replace("/same", ""),
        );
        match &request.path {
            path if *path == layer => Some(reply(307, &[("location", &here)], "")),
            path if path.starts_with("/same") => Some(reply(302, &[("location", &there)], "")),
            _ => None,
        }
    });
    // It asks for credentials, and must get none.
    attempt(&server, with(&server, basic())).await.unwrap();
    let seen = elsewhere.requests();
    assert_eq!(seen.len(), 1);
    assert!(
        !format!("{seen:?}").to_lowercase().contains("authorization"),
        "{seen:?}"
    );
    let within: Vec<_> = server
        .requests()
        .into_iter()
        .filter(|r| r.path.starts_with("/same"))
        .collect();
    assert_eq!(
        within[0].header("authorization"),
        Some(BASIC),
        "the registry itself keeps them"
    );
    // The other host asks for a password.
    elsewhere.hook(|_| Some(reply(401, &[("www-authenticate", "Basic realm=\"x\"")], "")));
    let error = attempt(&server, with(&server, basic())).await.unwrap_err();
    assert_eq!(error.code(), Code::Denied);
    assert!(
        !format!("{:?}", elsewhere.requests())
            .to_lowercase()
            .contains("authorization")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loop_of_redirects_ends() {
    let server = Scripted::start();
    server.hook(|request| Some(reply(307, &[("location", &request.path)], "")));
    let error = attempt(&server, options()).await.unwrap_err();
    assert!(error.to_string().contains("more than 5 times"), "{error}");
    assert_eq!(server.requests().len(), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_gets_its_own_credentials_only() {
    let (server, mirror) = (Scripted::start(), Scripted::start());
    let image = TestImage::small();
    server.offer(&image, "1");
    mirror.hook(|_| Some(reply(401, &[("www-authenticate", "Basic realm=\"x\"")], "")));
    let mut options = with(&server, basic());
    options.mirrors = [(server.authority.clone(), vec![mirror.authority.clone()])].into();
    attempt(&server, options.clone()).await.unwrap();
    assert!(!mirror.requests().is_empty());
    assert!(
        mirror
            .requests()
            .iter()
            .all(|request| request.header("authorization").is_none())
    );
    let own = Credentials::Basic {
        username: "m".into(),
        password: "m".into(),
    };
    options.credentials.insert(mirror.authority.clone(), own);
    attempt(&server, options).await.unwrap();
    let sent: Vec<_> = mirror
        .requests()
        .into_iter()
        .filter_map(|r| r.header("authorization").map(str::to_owned))
        .collect();
    assert!(
        !sent.is_empty() && sent.iter().all(|value| value == "Basic bTpt"),
        "{sent:?}"
    );
}

/// Runs a pull in a process whose Docker configuration and helpers are in a folder.
fn pull_with_config(server: &Scripted, folder: &Path, config: &serde_json::Value) -> Output {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    Command::new(env!("CARGO_BIN_EXE_box-image-run"))
        .arg(tempfile::tempdir().unwrap().path().join("store"))
        .args(["pull", &server.name("1")])
        .env("DOCKER_CONFIG", folder)
        .env("PATH", path)
        .output()
        .unwrap()
}

fn helper(folder: &Path, name: &str, script: &str) {
    let path = folder.join(format!("docker-credential-{name}"));
    // Written by another process, because the fork of a thread would keep the file open for writing.
    let script = format!("cat > {} <<'X'\n#!/bin/sh\n{script}\nX", path.display());
    assert!(
        Command::new("sh")
            .args(["-c", &script])
            .status()
            .unwrap()
            .success()
    );
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn passwords_come_from_dockers_configuration_and_helpers() {
    let server = Scripted::start();
    server.offer(&TestImage::small(), "1");
    server.hook(|request| {
        let right = request.header("authorization") == Some(BASIC);
        (!right).then(|| reply(401, &[("www-authenticate", "Basic realm=\"x\"")], ""))
    });
    let folder = tempfile::tempdir().unwrap();
    let name = server.authority.as_str();
    helper(
        folder.path(),
        "good",
        r#"read server; [ "$1" = get ] && echo "{\"ServerURL\":\"$server\",\"Username\":\"box\",\"Secret\":\"secret\"}""#,
    );
    helper(
        folder.path(),
        "none",
        "echo credentials not found in native keychain; exit 1",
    );
    helper(folder.path(), "bad", "echo hunter2 is broken; exit 1");
    helper(folder.path(), "odd", "echo hunter2");
    helper(
        folder.path(),
        "endless",
        "while :; do echo hunter2hunter2hunter2; done",
    );
    let auth = json!({"auth": "Ym94OnNlY3JldA=="});
    for config in [
        json!({"auths": {name: auth}}),
        json!({"auths": {format!("http://{name}/v2/"): auth}}),
        json!({"auths": {name: {"username": "box", "password": "secret"}}}),
        json!({"credHelpers": {name: "good"}, "auths": {name: {"auth": "eDp5"}}}),
        json!({"credsStore": "good", "auths": {name: {}}}),
        json!({"credsStore": "good"}),
    ] {
        let ran = pull_with_config(&server, folder.path(), &config);
        assert!(ran.status.success(), "{config} {ran:?}");
    }
    for (config, words) in [
        (json!({}), "denied"),
        (json!({"auths": {"elsewhere.example": auth}}), "denied"),
        (json!({"credsStore": "none"}), "denied"),
        (json!({"credsStore": "bad"}), "`bad`: it failed"),
        (json!({"credsStore": "odd"}), "`odd`: its answer"),
        (json!({"credsStore": "endless"}), "`endless`: its answer"),
        (
            json!({"credsStore": "missing"}),
            "`missing`: it cannot be started",
        ),
        (json!({"credsStore": "../good"}), "invalid name"),
        (json!({"auths": {name: {"auth": "hunter2!"}}}), "base64"),
        (json!({"auths": "hunter2"}), "not valid JSON"),
    ] {
        let ran = pull_with_config(&server, folder.path(), &config);
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(
            !ran.status.success() && said.contains(words),
            "{config} {said}"
        );
        assert!(!said.contains("hunter2"), "{said}");
    }
}
