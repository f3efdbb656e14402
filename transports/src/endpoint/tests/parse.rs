//! Parsing and printing of endpoints.

use super::*;

#[test]
fn endpoints_print_as_they_are_written() {
    for text in [
        "queue:tests",
        "stdio:",
        "stdio:boxd stdio --root=/tmp",
        "stdio:sh -c 'echo \"hi\" there' ''",
        "stdio:x 'it'\\''s'",
        "tcp://127.0.0.1:80",
        "tcp://[::1]:0",
        "tls://box.example.org:7000",
        "unix:/run/box/box.sock",
        "unix:relative.sock",
        "ws://localhost:5410/rpc/ws",
        "ws://localhost:5410",
        "wss://[fe80::1]:1/",
    ] {
        let parsed = endpoint(text);
        assert_eq!(parsed.to_string(), text);
        assert_eq!(endpoint(&parsed.to_string()), parsed);
    }
    assert_eq!(endpoint("ws://h").to_string(), "ws://h:80");
    assert_eq!(endpoint("wss://h/x").to_string(), "wss://h:443/x");
}

#[test]
fn words_are_split_like_in_a_shell() {
    for (text, words) in [
        ("a  b\tc", &["a", "b", "c"][..]),
        (r#"a "b c" 'd "e'"#, &["a", "b c", "d \"e"]),
        (r#"a\ b "\"\\\n" ''"#, &["a b", "\"\\\\n", ""]),
        (r#"pre"mid"'post'"#, &["premidpost"]),
        ("", &[]),
    ] {
        let Endpoint::Stdio { command } = endpoint(&format!("stdio:{text}")) else {
            panic!("not stdio");
        };
        assert_eq!(command, words, "{text}");
    }
}

#[test]
fn an_invalid_endpoint_has_its_error() {
    for (text, error) in [
        ("", EndpointError::Scheme),
        ("localhost:80", EndpointError::Scheme),
        ("http://x", EndpointError::Scheme),
        ("queue:", EndpointError::Missing("name")),
        ("unix:", EndpointError::Missing("path")),
        ("tcp:host:1", EndpointError::Missing("//")),
        ("tcp://", EndpointError::Missing("host")),
        ("tcp://host", EndpointError::Missing("port")),
        ("tcp://host:", EndpointError::Missing("port")),
        ("tcp://:80", EndpointError::Missing("host")),
        ("tcp://host:65536", EndpointError::Port),
        ("tcp://host:+1", EndpointError::Port),
        ("tcp://host:80/x", EndpointError::Port),
        ("tcp://::1:80", EndpointError::Missing("host")),
        ("tcp://fe80::1:80", EndpointError::Host),
        ("tcp://[::1:80", EndpointError::Host),
        ("tcp://[::1]80", EndpointError::Host),
        ("tcp://a b:80", EndpointError::Host),
        ("ws://user:secret@host:1/", EndpointError::UserInfo),
        ("ws://host:1/?token=x", EndpointError::Path),
        ("ws://host:1?token=x", EndpointError::Path),
        ("ws://host:1/a b", EndpointError::Path),
        ("ws://host:1/\r\nX: y", EndpointError::Path),
        ("stdio:'x", EndpointError::Quote),
        ("stdio:\"x", EndpointError::Quote),
        ("stdio:x\\", EndpointError::Quote),
    ] {
        assert_eq!(text.parse::<Endpoint>(), Err(error), "{text}");
        assert!(!error.to_string().contains("secret "));
    }
    assert!(EndpointError::Scheme.to_string().contains("unix:PATH"));
}
