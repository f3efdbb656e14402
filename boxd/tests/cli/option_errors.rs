//! Errors of options name the option, its value and a remedy. They need no server.

use super::support::{boxd, err, feed};

#[test]
fn a_wrong_option_is_named_with_its_value_and_a_remedy() {
    for (args, message) in [
        (
            &["cp", "x:a", "y:b"][..],
            "FROM, TO: neither is BOX:/PATH; the path in a box must be absolute",
        ),
        (
            &["run", "--workspace", "/nowhere/at/all", "true"],
            "--workspace /nowhere/at/all: no such directory; create it or choose another",
        ),
        (
            &["run", "--mount", "/nowhere/at/all:/d", "true"],
            "--mount /nowhere/at/all: no such directory; create it or choose another",
        ),
        (
            &["run", "--workspace", "/dev/null", "true"],
            "--workspace /dev/null: not a directory; choose a directory",
        ),
        (
            &["run", "--env", "=x", "true"],
            "--env =x: the name is missing; use NAME=VALUE",
        ),
        (
            &["run", "--env", "BOXD_NOT_SET", "true"],
            "--env BOXD_NOT_SET: not set in this environment; use BOXD_NOT_SET=VALUE",
        ),
        (
            &["run", "--on-expiry", "stop", "--expire", "1m", "true"],
            "--expire: requires --name; add --name NAME",
        ),
        (
            &["run", "--wake", "true"],
            "--wake: requires --name; add --name NAME",
        ),
        (
            &["--endpoint", "foo://x", "ps"],
            "endpoint foo://x: unknown scheme; use queue:NAME",
        ),
        (
            &["--token", "/nowhere/at/all", "ps"],
            "--token /nowhere/at/all: no such file; pass a file, not the token itself",
        ),
    ] {
        let refused = feed(boxd().args(args), b"");
        assert_eq!(refused.status.code(), Some(125), "{args:?}: {refused:?}");
        let text = err(&refused);
        assert!(text.starts_with(&format!("boxd: {message}")), "{text}");
    }
}
