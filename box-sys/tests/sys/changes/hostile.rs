//! What a guest or a user of the host does to lead an apply astray.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};

use box_sys::{ApplyOptions, Selection};

use super::{Workspace, ok, options};
use crate::support::SERVERS;

#[test]
fn nothing_that_a_guest_makes_is_written_outside_of_the_directory() {
    for server in SERVERS.iter() {
        let workspace = Workspace::new(server);
        workspace.write("dir/file", "x");
        workspace.write("plain", "x");
        // Links of the host, in the place of directories of the box.
        let boxed = workspace.start();
        ok(
            &boxed,
            "cd /workspace; echo box > dir/file; mkdir fresh; echo box > fresh/outside; mkfifo pipe; \
             printf '#!/bin/sh\\n' > tool; chmod 755 tool; chmod 6755 tool 2> /dev/null || true; chmod 1777 fresh; ln -s .. up; ln -s ../outside outside; \
             truncate -s 1T sparse; printf 'a\\nb' > \"$(printf 'new\\nline')\"; echo x > \"$(printf '\\377\\376')\"; \
             echo x > ..x; mkdir -p deep; ln plain deep/hard; mkdir .tmp-apply; \
             python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\"",
        );
        fs::rename(
            workspace.path().join("dir"),
            workspace.outer.path().join("moved"),
        )
        .unwrap();
        symlink("../moved", workspace.path().join("dir")).unwrap();
        symlink("..", workspace.path().join("fresh")).unwrap();
        let forced = ApplyOptions {
            force: true,
            ..options()
        };
        let applied = workspace.apply(&boxed, &forced);
        assert_eq!(applied.failed, None, "{}", server.name);
        let skipped: Vec<_> = applied
            .skipped
            .first
            .iter()
            .map(|(path, _)| path.as_str())
            .collect();
        assert_eq!(skipped, [".tmp-apply", "pipe", "sock"], "{}", server.name);
        // The links of the host are replaced, and nothing behind them changes.
        let moved = workspace.outer.path().join("moved");
        assert_eq!(fs::read_to_string(moved.join("file")).unwrap(), "x");
        fs::rename(&moved, workspace.path().join("back")).unwrap();
        workspace.assert_outside_unchanged();
        assert_eq!(workspace.read("dir/file").as_deref(), Some("box\n"));
        assert_eq!(workspace.read("fresh/outside").as_deref(), Some("box\n"));
        assert_eq!(workspace.read("new\nline").as_deref(), Some("a\nb"));
        let mode = |name: &str| fs::metadata(workspace.path().join(name)).unwrap().mode() & 0o7777;
        assert_eq!((mode("tool"), mode("fresh")), (0o755, 0o777));
        let sparse = fs::metadata(workspace.path().join("sparse")).unwrap();
        assert_eq!((sparse.len(), sparse.blocks()), (1 << 40, 0));
        let link = |name: &str| fs::read_link(workspace.path().join(name)).unwrap();
        assert_eq!(
            (link("up"), link("outside")),
            ("..".into(), "../outside".into())
        );
        let names: Vec<_> = fs::read_dir(workspace.path()).unwrap().collect();
        assert!(
            names
                .iter()
                .all(|entry| entry.as_ref().unwrap().file_name() != ".tmp-apply")
        );
        // Again, through the links that now exist on the host.
        ok(
            &boxed,
            "cd /workspace; rm up outside; mkdir up outside; echo box > up/outside; echo box > outside/x",
        );
        let applied = workspace.apply(
            &boxed,
            &ApplyOptions {
                force: true,
                ..options()
            },
        );
        assert_eq!(applied.failed, None);
        workspace.assert_outside_unchanged();
        assert_eq!(workspace.read("up/outside").as_deref(), Some("box\n"));
    }
}

#[test]
fn a_guest_that_runs_meanwhile_cannot_lead_an_apply_astray() {
    for server in SERVERS.iter() {
        let workspace = Workspace::new(server);
        workspace.write("d/outside", "x");
        let boxed = workspace.start();
        // Control: this is what the guest tries to reach.
        assert!(workspace.path().join("../outside").exists());
        ok(
            &boxed,
            "cd /workspace; mkdir real; echo box > real/outside; ln -s .. link; \
             (while :; do rm -rf d; mkdir d; echo box > d/outside; rm -rf d; ln -s .. d; \
              mv real t 2> /dev/null; ln -sfn .. real; rm -f real; mv t real; done) > /dev/null 2>&1 & \
             sleep 0.1",
        );
        let forced = ApplyOptions {
            force: true,
            ..options()
        };
        for _ in 0..60 {
            workspace.with(&boxed, &Selection::default(), |of| {
                // An entry that changes meanwhile can fail.
                let apply = server.fork_server.start_apply(of, &forced, 0).unwrap();
                let _ = apply.finish();
            });
            workspace.assert_outside_unchanged();
        }
        let undone = workspace.with(&boxed, &Selection::default(), |of| {
            server
                .fork_server
                .start_discard(of, ".tmp-discard")
                .unwrap()
                .finish()
        });
        drop(undone);
        workspace.assert_outside_unchanged();
    }
}

#[test]
fn an_apply_has_only_the_rights_of_the_owner() {
    let Some(server) = SERVERS.iter().find(|server| server.privileged()) else {
        eprintln!("the server of an ordinary user has no other rights");
        return;
    };
    let workspace = Workspace::new(server);
    workspace.write("mine/old", "x");
    workspace.write("theirs/old", "x");
    let give = |name: &str, user: u32| {
        std::os::unix::fs::chown(workspace.path().join(name), Some(user), Some(user)).unwrap();
    };
    for name in ["", "mine", "mine/old", "theirs", "theirs/old"] {
        give(name, 4001);
    }
    let boxed = workspace.start();
    ok(
        &boxed,
        "cd /workspace; echo x > mine/f; echo x > theirs/f; rm theirs/old",
    );
    // Another user gets a directory meanwhile.
    give("theirs", 4002);
    let applied = workspace.apply(&boxed, &options());
    assert_eq!(applied.failed, Some(("theirs/f".to_owned(), libc::EACCES)));
    assert_eq!((applied.added, workspace.read("theirs/f")), (1, None));
    let written = fs::metadata(workspace.path().join("mine/f")).unwrap();
    assert_eq!((written.uid(), written.gid()), (4001, 4001));
    // Control: the owner can write there again.
    give("theirs", 4001);
    let applied = workspace.apply(&boxed, &options());
    assert_eq!(
        (applied.failed, applied.added, applied.deleted),
        (None, 1, 1)
    );
}
