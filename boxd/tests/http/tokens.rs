//! Authentication with tokens, in either header.

use std::io::BufRead as _;

use serde_json::{Value, json};

use crate::support::{ANN, BOB, Client, Setup, bearer};

/// The number of wrong tokens that are tried.
const WRONG: usize = 10_000;

/// Wrong tokens, many of them nearly right.
fn wrong(number: usize) -> String {
    let index = number % ANN.len();
    match number % 5 {
        // One byte differs.
        0 => {
            let mut bytes = ANN.as_bytes().to_vec();
            bytes[index] = b'A' + u8::try_from(number / 5 % 26).unwrap();
            String::from_utf8(bytes).unwrap()
        }
        // A prefix of a token.
        1 => ANN[..index].to_owned(),
        // A token and more.
        2 => format!("{ANN}{number}"),
        // Parts of two tokens.
        3 => format!("{}{}", &ANN[..index], &BOB[index..])
            .replace(ANN, "x")
            .replace(BOB, "x"),
        _ => format!("{number:036}"),
    }
}

#[test]
fn ten_thousand_wrong_tokens_are_refused_over_http() {
    let server = Setup::new().with_tokens().start();
    let mut client = server.client();
    let routes = [
        ("/rpc/ws", "X-LangBot-Box-Control-Token"),
        ("/boxes/b/port/80/", "X-Api-Key"),
    ];
    for number in 0..WRONG {
        let token = wrong(number);
        let (path, own) = routes[number % routes.len()];
        let (name, value) = if number % 2 == 0 {
            bearer(&token)
        } else {
            (own, token)
        };
        let answer = client.get(path, &[(name, &value)]);
        assert_eq!(answer.status, 401, "{number}");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        assert!(!answer.body.contains(value.trim_start_matches("Bearer ")) || value.len() < 20);
    }
    let (name, value) = bearer(ANN);
    let port = client.get("/boxes/b/port/80/", &[(name, &value)]);
    assert_eq!(port.status, 404);
    assert_eq!(client.upgrade(&[(name, &value)]).status, 101);
}

#[test]
fn ten_thousand_wrong_tokens_are_refused_in_hello() {
    let server = Setup::new()
        .with_tokens()
        .args(&["--listen", "tcp://127.0.0.1:0"])
        .start();
    let address = server.address("tcp://").strip_prefix("tcp://").unwrap();
    let say = |token: &str| -> Value {
        let mut client = Client::to(address);
        let hello =
            json!({"jsonrpc": "2.0", "id": 1, "method": "hello", "params": {"token": token}});
        client.write(&format!("{hello}\n"));
        let mut line = String::new();
        client.stream.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    };
    std::thread::scope(|scope| {
        for part in 0..4 {
            scope.spawn(move || {
                for number in (part..WRONG).step_by(4) {
                    let answer = say(&wrong(number));
                    assert!(answer.get("result").is_none(), "{number}: {answer}");
                    assert_eq!(answer["error"]["code"], -32005, "{answer}");
                }
            });
        }
    });
    assert!(say(ANN).get("result").is_some());
}

#[test]
fn langbots_header_is_accepted_at_langbots_paths_only() {
    let server = Setup::new().with_tokens().start();
    let mut client = server.client();
    let header = ("X-LangBot-Box-Control-Token", ANN);
    assert_eq!(client.get("/rpc/ws", &[header]).status, 426);
    let port = client.get("/boxes/b/port/80/", &[header]);
    assert_eq!(
        (port.status, &port.json()["code"]),
        (401, &"MISSING_API_KEY".into())
    );
    let (name, value) = bearer(ANN);
    assert_eq!(
        client.get("/boxes/b/port/80/", &[(name, &value)]).status,
        404
    );
    let in_query = format!("/boxes/b/port/80/?api_key={ANN}");
    assert_eq!(client.get(&in_query, &[]).status, 401);
    let body = client.get("/v1/sessions/s/managed-process/ws", &[]).json();
    assert_eq!(body["error"]["code"], "Unauthorized");
    let (name, value) = bearer("x");
    let wrong = client.get("/boxes/b/port/80/", &[(name, &value)]);
    assert_eq!(wrong.json()["code"], "INVALID_API_KEY");
}

#[test]
fn no_secret_is_logged() {
    let mut server = Setup::new()
        .with_tokens()
        .env("BOXD_LOG_LEVEL", "trace")
        .start();
    let mut client = server.client();
    let cap = "c4pab1lity";
    let (name, value) = bearer(ANN);
    client.get(&format!("/boxes/b~{cap}/port/80/x?token={cap}"), &[]);
    client.get(&format!("/boxes/b%7E{cap}/port/80/"), &[(name, &value)]);
    client.get(&format!("/rpc/ws?api_key={BOB}"), &[]);
    client.get("/rpc/ws", &[("X-LangBot-Box-Control-Token", "wr0ng-guess")]);
    client.get("/nowhere", &[(name, &value)]);
    client.upgrade(&[("X-LangBot-Box-Control-Token", BOB)]);
    drop(client);
    server.signal(rustix::process::Signal::TERM);
    let (status, log) = server.ended();
    assert!(status.success());
    assert!(log.contains("/boxes/b~…/port/80/x"), "{log}");
    for secret in [ANN, BOB, cap, "wr0ng-guess"] {
        assert!(!log.contains(secret), "{secret} in {log}");
    }
    assert!(
        log.contains("audit") && log.contains("wrong_token"),
        "{log}"
    );
}
