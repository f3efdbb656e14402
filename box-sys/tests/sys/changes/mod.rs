//! Workspaces whose changes stay in the box: listed, applied to the host, or discarded.

mod hostile;
mod layers;

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use box_sys::{
    Applied, ApplyOptions, ChangeKind, ChangePage, ChangesOf, ComparedLayer, Comparison,
    LayerSource, Mount, SandboxPlan, Scratch, Selection, Source,
};
use tempfile::TempDir;

use crate::support::{SERVERS, TestBox, TestServer};

/// A directory of the host that a box changes.
struct Workspace<'a> {
    server: &'a TestServer,
    /// The directory is in another one, which must not change.
    outer: TempDir,
}

impl<'a> Workspace<'a> {
    fn new(server: &'a TestServer) -> Self {
        let outer = server.directory();
        fs::create_dir(outer.path().join("ws")).unwrap();
        fs::write(outer.path().join("outside"), "outside").unwrap();
        let workspace = Self { server, outer };
        workspace.own();
        workspace
    }

    fn path(&self) -> PathBuf {
        self.outer.path().canonicalize().unwrap().join("ws")
    }

    /// Gives everything to the user of the server.
    fn own(&self) {
        let id = format!("{0}:{0}", self.server.uid());
        let mut chown = std::process::Command::new("chown");
        let done = chown.args(["-hR", &id]).arg(self.outer.path()).status();
        assert!(done.unwrap().success());
    }

    fn write(&self, name: &str, content: &str) {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        // Not of other files, because that is a change of them.
        for path in path.ancestors().take_while(|path| *path != self.path()) {
            std::os::unix::fs::chown(path, Some(self.server.uid()), Some(self.server.uid()))
                .unwrap();
        }
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path().join(name)).ok()
    }

    fn plan(&self, base: &SandboxPlan) -> SandboxPlan {
        let mut plan = base.clone();
        plan.mounts.push(Mount {
            source: Source::Path(self.path()),
            target: "/workspace".into(),
            writable: true,
            overlay: true,
        });
        plan
    }

    fn start(&self) -> TestBox<'a> {
        self.server.create_box(&self.plan(&self.server.plan()))
    }

    fn list(&self, boxed: &TestBox<'_>) -> Vec<String> {
        let page = self.page(boxed, &Selection::default(), None, 1000);
        assert_eq!(page.next, None);
        page.changes.iter().map(line).collect()
    }

    fn page(
        &self,
        boxed: &TestBox<'_>,
        selection: &Selection,
        after: Option<&str>,
        limit: usize,
    ) -> ChangePage {
        self.with(boxed, selection, |of| {
            let list = self.server.fork_server.start_list(of, after, limit);
            list.unwrap().finish().unwrap()
        })
    }

    fn apply(&self, boxed: &TestBox<'_>, options: &ApplyOptions) -> Applied {
        self.apply_some(boxed, &Selection::default(), options)
    }

    fn apply_some(
        &self,
        boxed: &TestBox<'_>,
        selection: &Selection,
        options: &ApplyOptions,
    ) -> Applied {
        self.with(boxed, selection, |of| {
            let apply = self.server.fork_server.start_apply(of, options, 0);
            apply.unwrap().finish().unwrap()
        })
    }

    fn discard(&self, boxed: &TestBox<'_>, selection: &Selection) -> u64 {
        self.with(boxed, selection, |of| {
            let discard = self.server.fork_server.start_discard(of, ".tmp-discard");
            discard.unwrap().finish().unwrap()
        })
    }

    fn with<T>(
        &self,
        boxed: &TestBox<'_>,
        selection: &Selection,
        run: impl FnOnce(ChangesOf<'_>) -> T,
    ) -> T {
        let source = File::open(self.path()).unwrap();
        let comparison = Comparison {
            layers: vec![
                layer(LayerSource::Private, true, false),
                layer(LayerSource::Workspace, true, true),
            ],
            directory: "workspace".into(),
            hidden: Vec::new(),
            made: Vec::new(),
            special_modes: false,
        };
        run(ChangesOf {
            comparison: &comparison,
            selection,
            sandbox: Some(boxed.sandbox()),
            workspace: Some(source.as_fd()),
        })
    }

    /// Asserts that nothing beside the directory has changed.
    #[track_caller]
    fn assert_outside_unchanged(&self) {
        let mut names: Vec<_> = fs::read_dir(self.outer.path()).unwrap().collect();
        names.sort_by_key(|entry| entry.as_ref().unwrap().file_name());
        assert_eq!(names.len(), 2, "{names:?}");
        let outside = fs::read_to_string(self.outer.path().join("outside"));
        assert_eq!(outside.unwrap(), "outside");
    }
}

fn layer(source: LayerSource, in_new: bool, in_old: bool) -> ComparedLayer {
    ComparedLayer {
        source,
        in_new,
        in_old,
    }
}

fn line(change: &box_sys::Change) -> String {
    let letter = match change.kind {
        ChangeKind::Added => 'A',
        ChangeKind::Changed => 'M',
        ChangeKind::Deleted => 'D',
    };
    format!("{letter} {}", change.path)
}

fn options() -> ApplyOptions {
    ApplyOptions {
        temporary: ".tmp-apply".into(),
        ..ApplyOptions::default()
    }
}

#[track_caller]
fn ok(boxed: &TestBox<'_>, script: &str) -> String {
    let done = boxed.sh(script);
    assert_eq!(done.code, Some(0), "{script}: {done:?}");
    done.out
}

/// Files, directories and links, as `find` shows them in a box and on the host.
const SHOW: &str = "find . -mindepth 1 -printf '%P %y %m %l\\n' | sort; find . -type f | sort | while read -r f; do cat \"$f\"; done";

fn shown_on_host(path: &Path) -> String {
    let mut shell = std::process::Command::new("sh");
    let output = shell.args(["-c", SHOW]).current_dir(path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A directory with everything that a guest changes in [`CHANGES`].
fn filled(server: &TestServer) -> Workspace<'_> {
    let workspace = Workspace::new(server);
    for name in ["same", "changed", "removed", "moded", "touched"] {
        workspace.write(name, name);
    }
    workspace.write("dir/kept", "kept");
    workspace.write("dir/inner/removed", "x");
    workspace.write("gone/deep/file", "x");
    workspace.write("replaced/old", "old");
    workspace.write("replaced/both", "both");
    workspace.write("file-to-dir", "x");
    workspace.write("dir-to-file/in/side", "x");
    symlink("same", workspace.path().join("link")).unwrap();
    workspace.own();
    workspace
}

const CHANGES: &str = "set -e; umask 022; cd /workspace; echo more >> changed; rm removed; chmod 700 moded; touch touched; echo new > dir/new; \
    rm -r dir/inner; rm -r gone; rm -r replaced; mkdir replaced; echo both > replaced/both; printf both > replaced/both; echo n > replaced/new; \
    rm file-to-dir; mkdir file-to-dir; echo i > file-to-dir/i; rm -r dir-to-file; echo f > dir-to-file; ln -sf changed link; ln -s /etc/passwd out; \
    mkdir -p 'a b/c'; echo deep > 'a b/c/d'; chmod 500 'a b'; ln changed hard; \
    cp same copy; rm same; cp copy same; rm copy";

const LISTED: &[&str] = &[
    "A a b",
    "A a b/c",
    "A a b/c/d",
    "M changed",
    "D dir/inner",
    "A dir/new",
    "M dir-to-file",
    "M file-to-dir",
    "A file-to-dir/i",
    "D gone",
    "A hard",
    "M link",
    "M moded",
    "A out",
    "D removed",
    "A replaced/new",
    "D replaced/old",
];

#[test]
fn an_overlay_keeps_its_changes_in_the_box_until_they_are_applied() {
    for server in SERVERS.iter() {
        server.on_each_root(|base| {
            let workspace = filled(server);
            let before = shown_on_host(&workspace.path());
            let boxed = server.create_box(&workspace.plan(base));
            assert_eq!(ok(&boxed, &format!("cd /workspace; {SHOW}")), before);
            assert_eq!(workspace.list(&boxed), [""; 0]);
            ok(&boxed, CHANGES);
            let inside = ok(&boxed, &format!("cd /workspace; {SHOW}"));
            assert_ne!(inside, before);
            assert_eq!(shown_on_host(&workspace.path()), before, "{}", server.name);
            assert_eq!(workspace.list(&boxed), LISTED, "{}", server.name);

            let planned = workspace.apply(
                &boxed,
                &ApplyOptions {
                    dry_run: true,
                    ..options()
                },
            );
            assert_eq!(shown_on_host(&workspace.path()), before);
            let applied = workspace.apply(&boxed, &options());
            assert_eq!((applied.added, applied.changed, applied.deleted), (8, 5, 4));
            assert_eq!(applied, planned);
            assert_eq!(shown_on_host(&workspace.path()), inside, "{}", server.name);
            assert_eq!(workspace.list(&boxed), [""; 0]);
            for name in ["dir/new", "a b/c/d", "link", "changed"] {
                let found = fs::symlink_metadata(workspace.path().join(name)).unwrap();
                assert_eq!(found.uid(), server.uid(), "{name}");
            }
            assert_eq!(workspace.apply(&boxed, &options()), Applied::default());
            // The box continues on its own version.
            ok(
                &boxed,
                "cd /workspace; echo again >> changed; echo x > later",
            );
            let listed = ["M changed", "M hard", "A later"];
            assert_eq!(workspace.list(&boxed), listed, "{}", server.name);
            workspace.assert_outside_unchanged();
            fs::set_permissions(
                workspace.path().join("a b"),
                fs::Permissions::from_mode(0o700),
            )
            .unwrap();
        });
    }
}

#[test]
fn a_file_that_changed_on_the_host_as_well_is_a_conflict() {
    for server in SERVERS.iter() {
        let workspace = Workspace::new(server);
        for name in ["both", "mine", "gone", "tree/file", "later"] {
            workspace.write(name, name);
        }
        let boxed = workspace.start();
        ok(
            &boxed,
            "cd /workspace; echo box > both; echo box > mine; rm gone; rm -r tree; echo box > new",
        );
        workspace.write("both", "host");
        workspace.write("new", "host");
        workspace.write("tree/added", "host");
        // A change before the guest's own is none.
        workspace.write("later", "host");
        // The clock of files has steps of milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(50));
        ok(&boxed, "cd /workspace; echo box >> later");
        let refused = workspace.apply(&boxed, &options());
        let names = |applied: &Applied| {
            let names = applied.conflicts.first.iter();
            names.map(|(path, _)| path.clone()).collect::<Vec<_>>()
        };
        assert_eq!(
            names(&refused),
            ["both", "new", "tree/added"],
            "{}",
            server.name
        );
        assert_eq!(
            workspace.read("mine").as_deref(),
            Some("mine"),
            "nothing is written"
        );
        assert_eq!(workspace.read("gone").as_deref(), Some("gone"));
        // Only some paths.
        let some = Selection {
            paths: vec!["mine".into(), "later".into(), "gone".into()],
        };
        let applied = workspace.apply_some(&boxed, &some, &options());
        assert_eq!((applied.added, applied.changed, applied.deleted), (0, 2, 1));
        assert_eq!(workspace.read("later").as_deref(), Some("hostbox\n"));
        // An own write is no change of the host.
        ok(&boxed, "cd /workspace; echo again >> mine");
        assert_eq!(
            names(&workspace.apply_some(&boxed, &some, &options())),
            ["mine"]
        );
        let known = ApplyOptions {
            own_writes: vec![(0, i64::MAX)],
            ..options()
        };
        assert_eq!(workspace.apply_some(&boxed, &some, &known).changed, 1);
        assert_eq!(workspace.read("mine").as_deref(), Some("box\nagain\n"));
        let forced = ApplyOptions {
            force: true,
            ..options()
        };
        let applied = workspace.apply(&boxed, &forced);
        assert_eq!((applied.added, applied.changed, applied.deleted), (0, 2, 1));
        assert_eq!(workspace.read("both").as_deref(), Some("box\n"));
        assert!(!workspace.path().join("tree").exists());
        workspace.assert_outside_unchanged();
    }
}

#[test]
fn a_discard_restores_the_workspace_and_leaves_the_host_alone() {
    for server in SERVERS.iter() {
        server.on_each_root(|base| {
            let workspace = filled(server);
            let before = shown_on_host(&workspace.path());
            let boxed = server.create_box(&workspace.plan(base));
            ok(&boxed, CHANGES);
            ok(&boxed, "cd /workspace; mkdir -p x/y/z; echo z > x/y/z/f; chmod 000 x/y");
            let some = Selection {
                paths: vec!["x".into(), "gone".into()],
            };
            assert_eq!(workspace.discard(&boxed, &some), 2);
            assert_eq!(workspace.list(&boxed), LISTED.iter().copied().filter(|line| *line != "D gone").collect::<Vec<_>>());
            workspace.discard(&boxed, &Selection::default());
            assert_eq!(workspace.list(&boxed), [""; 0], "{}", server.name);
            assert_eq!(ok(&boxed, &format!("cd /workspace; {SHOW}")), before, "{}", server.name);
            assert_eq!(shown_on_host(&workspace.path()), before);
            // The guest owns what came back.
            ok(&boxed, "cd /workspace; echo x >> removed; echo x > gone/deep/more; rm -r replaced; [ $(stat -c %u removed) = $(id -u) ]");
            workspace.assert_outside_unchanged();
        });
    }
}

#[test]
fn changes_come_in_pages_and_below_a_path() {
    for server in SERVERS.iter() {
        let workspace = Workspace::new(server);
        workspace.write("m/old", "x");
        let boxed = workspace.start();
        ok(
            &boxed,
            "cd /workspace; mkdir -p many m/n; i=0; while [ $i -lt 2500 ]; do : > many/$i; i=$((i+1)); done; \
             echo x > m/n/f; echo x > m.txt; rm m/old; echo x > z",
        );
        let (mut all, mut after, mut pages) = (Vec::new(), None, 0);
        loop {
            let page = workspace.page(&boxed, &Selection::default(), after.as_deref(), 700);
            all.extend(page.changes.iter().map(line));
            pages += 1;
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        assert!(pages > 3, "{pages}");
        let mut wanted = vec!["A m/n", "A m/n/f", "D m/old", "A m.txt", "A many", "A z"];
        let rest: Vec<_> = all
            .iter()
            .filter(|line| !line.starts_with("A many/"))
            .collect();
        assert_eq!(rest, wanted, "{}", server.name);
        assert_eq!(all.len(), 2500 + wanted.len());
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 2500 + wanted.len(), "once");
        // One at a time.
        let below = Selection {
            paths: vec!["m".into()],
        };
        let mut after = None;
        wanted.truncate(3);
        for line_wanted in wanted {
            let page = workspace.page(&boxed, &below, after.as_deref(), 1);
            assert_eq!(
                page.changes.iter().map(line).collect::<Vec<_>>(),
                [line_wanted]
            );
            after = page.next;
        }
        assert_eq!(after, None);
        // The mark of a deleted file counts as one.
        let wrong = Selection {
            paths: vec!["m/old".into(), "m/none".into()],
        };
        let missing = workspace.with(&boxed, &wrong, |of| {
            let list = server.fork_server.start_list(of, None, 1000);
            list.unwrap().finish()
        });
        assert!(
            matches!(&missing, Err(box_sys::Error::Missing(path)) if path == "m/none"),
            "{missing:?}"
        );
    }
}

#[test]
fn the_changes_of_a_workspace_have_the_limit_of_the_private_files() {
    for server in SERVERS.iter() {
        let workspace = Workspace::new(server);
        workspace.write("big", &"x".repeat(3 << 20));
        let caps = box_sys::Caps {
            bytes: 2 << 20,
            inodes: 200,
        };
        let plan = SandboxPlan {
            scratch: Scratch::Memory(caps),
            ..server.plan()
        };
        let boxed = server.create_box(&workspace.plan(&plan));
        let full = boxed.sh("cd /workspace; echo x >> big");
        assert!(
            full.err.contains("No space left"),
            "{}: {full:?}",
            server.name
        );
        ok(&boxed, "echo small > /workspace/small");
    }
}
