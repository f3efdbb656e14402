//! Overlay workspaces on the real program: an agent works on a copy of a directory, and its user
//! takes or drops the result. As root and as an ordinary user, also across `kill -9`.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use box_test_wait::blocking::eventually;
use serde_json::{Value, json};

use super::support::{Server, err, out, users};

/// A directory of a user, with a few files.
struct Project {
    directory: tempfile::TempDir,
    user: Option<u32>,
}

impl Project {
    fn new(user: Option<u32>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let project = Self { directory, user };
        fs::create_dir(project.path().join("src")).unwrap();
        project.write("README", "read me\n");
        project.write("src/main", "main\n");
        project.write("src/old", "old\n");
        project.own(project.path());
        project.own(project.path().join("src"));
        project
    }

    fn path(&self) -> PathBuf {
        self.directory.path().canonicalize().unwrap()
    }

    fn own(&self, path: impl AsRef<Path>) {
        if self.user.is_some() {
            chown(path, self.user, self.user).unwrap();
        }
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.path().join(name), content).unwrap();
        self.own(self.path().join(name));
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path().join(name)).ok()
    }

    fn workspace(&self) -> String {
        format!("{}:overlay", self.path().display())
    }
}

fn start(user: Option<u32>) -> Server {
    Server::of_user(tempfile::tempdir().unwrap(), user)
}

/// Applies the changes of a box. A machine that cannot pause boxes has to stop it first.
fn apply(server: &Server, arguments: &[&str]) -> Output {
    let mut all = vec!["apply", "work"];
    all.extend(arguments);
    let applied = server.run(&all);
    if !err(&applied).contains("stop the box first") {
        return applied;
    }
    server.ok(&["stop", "work"]);
    let applied = server.run(&all);
    server.ok(&["start", "work"]);
    applied
}

#[track_caller]
fn applied(server: &Server, arguments: &[&str]) -> String {
    let output = apply(server, arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    out(&output)
}

#[test]
fn a_change_right_after_an_apply_is_a_conflict() {
    for user in users() {
        let (server, project) = (start(user), Project::new(user));
        let workspace = project.workspace();
        let script = "echo more >> README; for i in 1 2 3 4 5; do echo $i > $i; done";
        server.ok(&["run", "--name", "work", "--workspace", &workspace, script]);
        for number in ["1", "2", "3", "4", "5"] {
            applied(&server, &[number]);
            project.write("README", number);
            let conflict = apply(&server, &["README"]);
            assert_eq!(conflict.status.code(), Some(125), "{conflict:?}");
            assert_eq!(project.read("README").as_deref(), Some(number));
        }
    }
}

#[test]
fn a_user_takes_or_drops_what_an_agent_did_to_a_copy_of_a_directory() {
    for user in users() {
        let (server, project) = (start(user), Project::new(user));
        let workspace = project.workspace();
        let run = [
            "run",
            "--name",
            "work",
            "--workspace",
            &workspace,
            "set -e; echo more >> README; rm src/old; mkdir lib; echo new > lib/new; cat src/main",
        ];
        assert_eq!(server.ok(&run), "main\n");
        assert_eq!(project.read("README").as_deref(), Some("read me\n"));
        assert_eq!(project.read("src/old").as_deref(), Some("old\n"));
        assert!(!project.path().join("lib").exists());
        assert_eq!(
            server.ok(&["diff", "work"]),
            "M README\nA lib/\nA lib/new\nD src/old\n"
        );
        assert_eq!(server.ok(&["diff", "work", "src"]), "D src/old\n");
        assert_eq!(
            server.ok(&["diff", "work", "/workspace/lib/new"]),
            "A lib/new\n"
        );
        let changes: Value =
            serde_json::from_str(&server.ok(&["--json", "diff", "work", "README"])).unwrap();
        let wanted = json!([{"path": "README", "change": "changed", "kind": "file", "size": 13}]);
        assert_eq!(changes, wanted);
        // The private files are another list.
        server.ok(&["exec", "work", "echo x > ~/notes; echo x > /tmp/t"]);
        assert_eq!(
            server.ok(&["diff", "work", "--since", "image"]),
            "A /home/box/notes\nA /tmp/t\n"
        );
        let refused = server.run(&["diff", "work", "--since", "nothing"]);
        assert!(
            err(&refused).contains("since: the box has no checkpoint nothing"),
            "{refused:?}"
        );
        for path in ["../x", "/etc", "a/../../b"] {
            let refused = server.run(&["diff", "work", path]);
            assert!(err(&refused).contains("path: must"), "{refused:?}");
        }

        // Takes a part, drops another part, takes the rest.
        assert_eq!(
            applied(&server, &["--dry-run"]),
            "would apply: 2 added, 1 changed, 1 deleted\n"
        );
        assert_eq!(project.read("README").as_deref(), Some("read me\n"));
        assert_eq!(
            applied(&server, &["lib"]),
            "applied: 2 added, 0 changed, 0 deleted\n"
        );
        assert_eq!(project.read("lib/new").as_deref(), Some("new\n"));
        let owner = fs::metadata(project.path().join("lib/new")).unwrap().uid();
        assert_eq!(
            owner,
            user.unwrap_or_else(|| rustix::process::geteuid().as_raw())
        );
        assert_eq!(
            server.ok(&["discard", "work", "src"]),
            "discarded: 1 changes\n"
        );
        assert_eq!(server.ok(&["exec", "work", "cat src/old"]), "old\n");
        assert_eq!(server.ok(&["diff", "work"]), "M README\n");
        // The user has changed the same file.
        project.write("README", "of the user\n");
        let conflict = apply(&server, &[]);
        assert_eq!(conflict.status.code(), Some(125), "{conflict:?}");
        assert!(
            err(&conflict)
                .contains("conflict: force: also changed on the host: \"README\"; set force"),
            "{conflict:?}"
        );
        assert_eq!(project.read("README").as_deref(), Some("of the user\n"));
        assert_eq!(
            applied(&server, &["--force"]),
            "applied: 0 added, 1 changed, 0 deleted\n"
        );
        assert_eq!(project.read("README").as_deref(), Some("read me\nmore\n"));
        assert_eq!(server.ok(&["diff", "work"]), "");
        // A second change of the box is no conflict with the first apply, also for the next server.
        let server = Server::of_user(server.kill(), user);
        server.ok(&["exec", "work", "echo again >> README"]);
        assert_eq!(server.ok(&["diff", "work"]), "M README\n");
        assert_eq!(
            applied(&server, &[]),
            "applied: 0 added, 1 changed, 0 deleted\n"
        );
        assert_eq!(
            project.read("README").as_deref(),
            Some("read me\nmore\nagain\n")
        );
    }
}

#[test]
fn only_an_overlay_workspace_can_be_applied_and_the_directory_must_be_the_same() {
    for user in users() {
        let (server, project) = (start(user), Project::new(user));
        let path = project.path().display().to_string();
        server.ok(&["run", "--name", "work", "--workspace", &path, "true"]);
        for command in ["apply", "discard"] {
            let refused = server.run(&[command, "work"]);
            let error = "unsupported: host_path_mode: the workspace is not an overlay";
            assert!(err(&refused).contains(error), "{refused:?}");
        }
        server.ok(&["rm", "--force", "work"]);
        let parent = tempfile::tempdir().unwrap();
        let inner = parent.path().join("project");
        fs::create_dir(&inner).unwrap();
        let other = parent.path().join("other");
        fs::create_dir(&other).unwrap();
        for path in [parent.path(), &inner, &other] {
            if user.is_some() {
                chown(path, user, user).unwrap();
            }
        }
        let workspace = format!("{}:overlay", inner.canonicalize().unwrap().display());
        server.ok(&[
            "run",
            "--name",
            "work",
            "--workspace",
            &workspace,
            "echo x > f",
        ]);
        let moved = parent.path().join("moved");
        fs::rename(&inner, &moved).unwrap();
        fs::rename(&other, &inner).unwrap();
        let refused = apply(&server, &[]);
        assert!(
            err(&refused).contains("conflict: host_path: another directory"),
            "{refused:?}"
        );
        assert!(!inner.join("f").exists());
        // Also if the box is stopped.
        server.ok(&["stop", "work"]);
        let refused = server.run(&["apply", "work"]);
        assert!(
            err(&refused).contains("conflict: host_path: another directory"),
            "{refused:?}"
        );
        assert!(!inner.join("f").exists());
        fs::remove_dir(&inner).unwrap();
        fs::rename(&moved, &inner).unwrap();
        server.ok(&["start", "work"]);
        applied(&server, &[]);
        assert!(inner.join("f").exists());
    }
}

#[test]
fn a_path_that_does_not_exist_is_an_error() {
    for user in users() {
        let (server, project) = (start(user), Project::new(user));
        let workspace = project.workspace();
        let script = "echo new > new; rm src/old";
        server.ok(&["run", "--name", "work", "--workspace", &workspace, script]);
        let refused = |output: Output, field: &str| {
            let wanted =
                format!("not_found: {field}: \"scr\" is neither in the box nor in the directory");
            assert_eq!(output.status.code(), Some(125), "{output:?}");
            assert!(err(&output).contains(&wanted), "{output:?}");
        };
        refused(server.run(&["diff", "work", "scr"]), "path");
        refused(apply(&server, &["new", "scr"]), "paths");
        refused(server.run(&["discard", "work", "new", "scr"]), "paths");
        // Neither has changed anything.
        assert_eq!(server.ok(&["diff", "work"]), "A new\nD src/old\n");
        assert_eq!(project.read("new"), None);
        // A path without changes, one that only the box has, and one that only the directory has.
        assert_eq!(server.ok(&["diff", "work", "README"]), "");
        assert_eq!(server.ok(&["diff", "work", "new"]), "A new\n");
        assert_eq!(server.ok(&["diff", "work", "src/old"]), "D src/old\n");
        let image = |path: &str| server.run(&["diff", "work", "--since", "image", path]);
        let no_file = err(&image("/home/box/none"));
        assert!(
            no_file.contains("path: \"/home/box/none\" is neither"),
            "{no_file}"
        );
        for path in ["/", "/usr/bin", "/etc/hosts", "/tmp", "/home", "/workspace"] {
            let found = image(path);
            assert!(found.status.success(), "{found:?}");
        }
    }
}

/// Size of each file in the test of an interrupted apply.
const SIZE: usize = 2 << 20;

#[test]
fn an_apply_whose_server_is_killed_leaves_whole_files_and_can_be_repeated() {
    for user in users() {
        let (server, project) = (start(user), Project::new(user));
        let old = "o".repeat(SIZE);
        for n in 0..60 {
            project.write(&format!("file-{n:02}"), &old);
        }
        let workspace = project.workspace();
        let change = format!(
            "i=0; while [ $i -lt 60 ]; do n=$(printf %02d $i); head -c {SIZE} /dev/zero | tr '\\0' n > file-$n; i=$((i+1)); done; rm README"
        );
        server.ok(&[
            "run",
            "--name",
            "work",
            "--workspace",
            &workspace,
            "-m",
            "512m",
            &change,
        ]);
        let new = "n".repeat(SIZE);
        // A stopped box is applied on every machine.
        server.ok(&["stop", "work"]);
        let mut applying = server.boxd(&["apply", "work"]);
        let applying = applying.stdout(Stdio::null()).stderr(Stdio::null());
        let mut applying = applying.spawn().unwrap();
        let is_new = |n: usize| {
            project
                .read(&format!("file-{n:02}"))
                .is_some_and(|content| content == new)
        };
        eventually("the apply has begun", || is_new(0));
        let server = Server::of_user(server.kill(), user);
        applying.wait().unwrap();
        let temporary = || {
            let names = fs::read_dir(project.path()).unwrap();
            let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.filter(|name| name.starts_with(".box-")).count()
        };
        eventually("the interrupted apply has ended", || temporary() == 0);
        for n in 0..60 {
            let content = project.read(&format!("file-{n:02}")).unwrap();
            assert!(
                content == old || content == new,
                "file-{n:02}: {} bytes",
                content.len()
            );
        }
        let again = server.run(&["apply", "work"]);
        assert!(again.status.success(), "{again:?}");
        assert!((0..60).all(is_new));
        assert_eq!(project.read("README"), None);
        assert_eq!(temporary(), 0);
        assert_eq!(server.ok(&["diff", "work"]), "");
    }
}

#[test]
fn a_box_is_compared_with_its_checkpoints_also_when_it_is_stopped() {
    for user in users() {
        let (server, project) = (start(user), Project::new(user));
        let workspace = project.workspace();
        let run = ["run", "--name", "work", "--workspace", &workspace];
        let script = "echo one > ~/a; echo two > ~/b; echo box >> README";
        server.ok(&[&run[..], &[script]].concat());
        // A stopped box is copied on every machine.
        server.ok(&["stop", "work"]);
        server.ok(&["checkpoint", "work", "first"]);
        assert_eq!(server.ok(&["diff", "work"]), "M README\n");
        server.ok(&["start", "work"]);
        assert_eq!(server.ok(&["diff", "work", "--since", "first"]), "");
        let no_option = err(&server.run(&["diff", "work", "first"]));
        assert!(
            no_option.contains("path: \"first\" is neither in the box nor in the directory")
                && no_option.contains("boxd diff work --since first"),
            "{no_option}"
        );
        let no_file = err(&server.run(&["diff", "work", "second"]));
        assert!(
            no_file.contains("path: \"second\" is neither") && !no_file.contains("--since"),
            "{no_file}"
        );
        let script = "rm ~/a; echo more >> ~/b; echo three > ~/c; rm src/old";
        server.ok(&["exec", "work", script]);
        let compared = |server: &Server| {
            let since = |name: &str| server.ok(&["diff", "work", "--since", name]);
            [since("first"), since("image"), since("workspace")]
        };
        let wanted = [
            "D /home/box/a\nM /home/box/b\nA /home/box/c\nD /workspace/src/old\n",
            "A /home/box/b\nA /home/box/c\n",
            "M README\nD src/old\n",
        ];
        assert_eq!(compared(&server), wanted);
        let below = ["diff", "work", "--since", "first", "/workspace"];
        assert_eq!(server.ok(&below), "D /workspace/src/old\n");
        server.ok(&["stop", "work"]);
        assert_eq!(compared(&server), wanted);
        let refused = server.run(&["discard", "work"]);
        assert!(
            err(&refused).contains("the box is stopped; start it first"),
            "{refused:?}"
        );
        // Also for the next server.
        let server = Server::of_user(server.kill(), user);
        assert_eq!(compared(&server), wanted);
        let written = server.ok(&["apply", "work"]);
        assert_eq!(written, "applied: 0 added, 1 changed, 1 deleted\n");
        assert_eq!(project.read("README").as_deref(), Some("read me\nbox\n"));
        assert_eq!(project.read("src/old"), None);
        // What is deleted already is no mistake.
        let written = server.ok(&["apply", "work", "src/old"]);
        assert_eq!(written, "applied: 0 added, 0 changed, 0 deleted\n");
        server.ok(&["start", "work"]);
        assert_eq!(server.ok(&["diff", "work"]), "");
        assert_eq!(
            server.ok(&["exec", "work", "cat README ~/c"]),
            "read me\nbox\nthree\n"
        );
    }
}

#[test]
fn changes_of_a_user_are_kept_after_a_stop_a_start_and_a_fork() {
    for user in users() {
        let (server, project) = (start(user), Project::new(user));
        let workspace = project.workspace();
        let script = "echo box >> README; echo box >> src/main; rm src/old";
        let run = ["run", "--name", "work", "--workspace", &workspace, script];
        server.ok(&run);
        project.write("README", "of the user\n");
        let refused = |server: &Server, id: &str, when: &str| {
            let refused = server.run(&["apply", id]);
            assert!(
                err(&refused).contains("also changed on the host: \"README\"; set force"),
                "{when}: {refused:?}"
            );
            assert_eq!(project.read("README").as_deref(), Some("of the user\n"));
        };
        server.ok(&["stop", "work"]);
        refused(&server, "work", "stopped");
        let server = Server::of_user(server.kill(), user);
        refused(&server, "work", "stopped, with the next server");
        server.ok(&["fork", "work", "--prefix", "of-stopped"]);
        server.ok(&["stop", "of-stopped-1"]);
        refused(&server, "of-stopped-1", "a fork of the stopped box");
        server.ok(&["start", "work"]);
        server.ok(&["exec", "work", "echo again >> README"]);
        server.ok(&["stop", "work"]);
        refused(&server, "work", "stopped again");
        // The other files are applied, and the box knows that afterwards, as do its forks.
        let written = server.ok(&["apply", "work", "src"]);
        assert_eq!(written, "applied: 0 added, 1 changed, 1 deleted\n");
        server.ok(&["fork", "work", "--prefix", "later"]);
        for id in ["work", "later-1"] {
            if id == "work" {
                server.ok(&["start", id]);
            }
            server.ok(&["exec", id, &format!("echo {id} >> src/main")]);
            server.ok(&["stop", id]);
            let written = server.ok(&["apply", id, "src", "--dry-run"]);
            assert_eq!(
                written, "would apply: 0 added, 1 changed, 0 deleted\n",
                "{id}"
            );
        }
    }
}
