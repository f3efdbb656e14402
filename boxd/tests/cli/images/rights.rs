//! What a caller with a token may do with the images of a server.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use super::machine::Machine;
use super::registry::{Registry, layout};
use super::{FACTS, ITS_FACTS, assert_refused, settings};
use crate::support::out;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn a_caller_with_a_token_uses_images_and_pulls_only_what_is_allowed() {
    let registry = Registry::start();
    let folder = tempfile::tempdir().unwrap();
    let layout = layout(folder.path(), 0, &settings());
    for name in ["public/app:1", "private/app:1"] {
        registry.push(&layout, name);
    }
    let (public, private) = (
        registry.reference("public/app:1"),
        registry.reference("private/app:1"),
    );
    let machine = Machine::new("root");
    machine.trust(&registry);
    let mut serve = machine.boxd(&["serve"]);
    serve.args(["--listen", "tcp://127.0.0.1:0", "--listen"]);
    serve.arg(format!("unix:{}", machine.path("sock").display()));
    serve.env("BOXD_TOKENS", format!("ann {TOKEN}\n"));
    serve.env("BOXD_IMAGES_ALLOW_PULL", registry.reference("public/*"));
    let mut child = serve.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let mut endpoints = line.trim().split(' ').skip(2);
    let (ann, owner) = (endpoints.next().unwrap(), endpoints.next().unwrap());
    let as_ann = |arguments: &[&str]| {
        let mut command = machine.boxd(arguments);
        command.env("BOXD_ENDPOINT", ann).env("BOXD_TOKEN", TOKEN);
        command.stdin(Stdio::null()).output().unwrap()
    };
    let as_owner = |arguments: &[&str]| {
        let mut command = machine.boxd(arguments);
        let done = command.env("BOXD_ENDPOINT", owner).stdin(Stdio::null());
        let done = done.output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {done:?}");
        out(&done)
    };
    let mut login = machine.boxd(&["image", "login", &host(&public), "-u", "box"]);
    login.arg("--password-stdin").env("BOXD_ENDPOINT", owner);
    assert!(crate::support::feed(&mut login, b"secret").status.success());

    // Nothing that concerns other callers.
    let archive = machine.path("any.tar");
    std::fs::write(&archive, [0; 1024]).unwrap();
    for arguments in [
        &["image", "import", archive.to_str().unwrap(), "debian:12"][..],
        &["image", "prune"],
        &["image", "logout", &host(&public)],
    ] {
        assert_refused(
            &as_ann(arguments),
            "denied: image: only the user of the server may",
        );
    }
    let refused = as_ann(&["image", "pull", &private]);
    assert_refused(&refused, "denied: image: this caller may not pull");
    assert_refused(
        &as_ann(&["run", "--image", &private, "true"]),
        "images.allow_pull",
    );
    // What the operator allows, or has pulled.
    let ran = as_ann(&["run", "--image", &public, FACTS]);
    assert_eq!(out(&ran), ITS_FACTS, "{ran:?}");
    as_owner(&["image", "pull", &private]);
    let ran = as_ann(&["run", "--image", &private, "--pull", "missing", FACTS]);
    assert_eq!(out(&ran), ITS_FACTS, "{ran:?}");
    let always = as_ann(&["run", "--image", &private, "--pull", "always", "true"]);
    assert_refused(&always, "denied: image: this caller may not pull");
    assert!(out(&as_ann(&["image", "ls"])).contains(&private));
    let refused = as_ann(&["image", "rm", &private]);
    assert_refused_removal(&refused, &private);
    as_owner(&["image", "rm", &private]);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    child.wait().unwrap();
}

fn assert_refused_removal(refused: &std::process::Output, name: &str) {
    let error = format!("{name}: denied: image: only the user of the server may remove");
    assert!(crate::support::err(refused).contains(&error), "{refused:?}");
}

fn host(reference: &str) -> String {
    reference.split('/').next().unwrap().to_owned()
}
