//! `config`, `version`, `completions`, `man`, `doctor`.

use super::support::{boxd, err, feed, out};

#[test]
fn config_show_prints_values_with_their_origin() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("boxd.toml");
    std::fs::write(&file, "[runtime]\nmax_boxes = 5\n").unwrap();
    let shown = feed(
        boxd()
            .env("BOXD_LOG_LEVEL", "debug")
            .args(["config", "--config"])
            .arg(&file)
            .arg("show"),
        b"",
    );
    let text = out(&shown);
    assert!(
        text.contains(&format!("max_boxes = 5  # {}", file.display())),
        "{text}"
    );
    assert!(
        text.contains("level = \"debug\"  # BOXD_LOG_LEVEL")
            && text.contains("spares = 2  # default"),
        "{text}"
    );
    let json = feed(boxd().args(["--json", "config", "show"]), b"");
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["runtime.max_boxes"]["from"], "default");
    std::fs::write(&file, "[runtime]\nmax_sesions = 5\n").unwrap();
    let wrong = feed(boxd().args(["config", "check", "--config"]).arg(&file), b"");
    assert!(
        err(&wrong).contains("did you mean runtime.max_boxes?"),
        "{wrong:?}"
    );
}

#[test]
fn a_password_is_not_shown() {
    for json in [false, true] {
        let mut command = boxd();
        command.env("BOXD_NETWORK_PROXY", "http://ann:secret@proxy.example:3128");
        command.args(["config", "show"]);
        if json {
            command.arg("--json");
        }
        let text = out(&feed(&mut command, b""));
        assert!(text.contains("http://***@proxy.example:3128"), "{text}");
        assert!(!text.contains("secret") && !text.contains("ann"), "{text}");
    }
}

#[test]
fn config_check_refuses_an_unusable_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("boxd.toml");
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, "too short\n").unwrap();
    let check = |text: &str| {
        std::fs::write(&file, text).unwrap();
        feed(boxd().args(["config", "check", "--config"]).arg(&file), b"")
    };
    let token_file = format!("[server]\ntoken_file = {tokens:?}");
    for (text, why) in [
        (
            "[policy]\nprofile = \"nope\"",
            "/boxd.toml): unknown profile \"nope\"; use one of default",
        ),
        ("[server]\nlisten = [\"nope:\"]", "endpoint nope:: "),
        (
            "[server]\nlisten = [\"tcp://0.0.0.0:1\"]",
            "tcp://0.0.0.0:1",
        ),
        (
            "[server]\nlisten = [\"tls://127.0.0.1:1\"]",
            "tls_certificate",
        ),
        (
            "[server]\nhttp = \"x\"",
            "server.http: \"x\" is not HOST:PORT",
        ),
        ("[log]\nlevel = \"=,=x\"", "log.level"),
        ("[network.hosts]\n\"a b\" = [\"10.0.0.1\"]", "network.hosts"),
        ("[network]\nproxy = \"gopher://x\"", "network.proxy"),
        (&token_file, "token file"),
    ] {
        let refused = check(text);
        assert_eq!(refused.status.code(), Some(125), "{text}: {refused:?}");
        assert!(err(&refused).contains(why), "{text}: {refused:?}");
    }
    let usable = check("[server]\nlisten = [\"tcp://127.0.0.1:1\"]\nhttp = \"127.0.0.1:2\"");
    assert!(usable.status.success(), "{usable:?}");
}

#[test]
fn versions_completions_and_the_manual_are_printed() {
    let version = feed(boxd().arg("--version"), b"");
    assert!(
        out(&version).starts_with("boxd 0.") && out(&version).contains("features: native"),
        "{version:?}"
    );
    let json = feed(boxd().args(["version", "--json"]), b"");
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert!(json["commit"].as_str().unwrap().len() >= 7, "{json}");
    for shell in ["bash", "zsh", "fish"] {
        let script = out(&feed(boxd().args(["completions", shell]), b""));
        assert!(
            script.contains("boxd") && script.contains("_BOXD_COMPLETE"),
            "{script}"
        );
    }
    assert!(out(&feed(boxd().arg("man"), b"")).contains(".TH boxd"));
    let page = out(&feed(boxd().args(["man", "run"]), b""));
    assert!(
        page.contains(".TH boxd-run") && page.contains("memory"),
        "{page}"
    );
    let pages = tempfile::tempdir().unwrap();
    let written = feed(boxd().args(["man", "--directory"]).arg(pages.path()), b"");
    assert!(written.status.success(), "{written:?}");
    for page in ["boxd.1", "boxd-run.1", "boxd-config-show.1"] {
        assert!(pages.path().join(page).exists(), "{page}");
    }
    let none = feed(boxd().args(["man", "fly"]), b"");
    assert!(err(&none).contains("no command fly"), "{none:?}");
}

#[test]
fn every_command_has_help() {
    let help = out(&feed(boxd().arg("--help"), b""));
    for command in [
        "run", "serve", "stdio", "ps", "inspect", "exec", "shell", "logs", "cp", "stats", "pause",
        "resume", "kill", "wait", "rm", "doctor", "config", "version",
    ] {
        assert!(help.contains(&format!("\n  {command} ")), "{command}");
        let own = feed(boxd().args([command, "--help"]), b"");
        assert!(
            own.status.success() && out(&own).contains("Usage: boxd"),
            "{command}"
        );
    }
}
