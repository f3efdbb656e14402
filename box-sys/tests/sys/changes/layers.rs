//! Changes of boxes on snapshots and on images.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use box_sys::{Applied, ChangesOf, Comparison, Layer, LayerSource, Root, SandboxPlan, Selection};
use tempfile::TempDir;

use super::{CHANGES, LISTED, SHOW, Workspace, filled, layer, line, ok, options};
use crate::support::{SERVERS, TestBox, TestServer, guest};

/// Copies the private files of a box to a new directory.
fn snapshot(server: &TestServer, boxed: &TestBox<'_>, place: &TempDir) -> PathBuf {
    let path = place.path().canonicalize().unwrap().join("layer");
    fs::create_dir(&path).unwrap();
    std::os::unix::fs::chown(&path, Some(server.uid()), Some(server.uid())).unwrap();
    let to = File::open(&path).unwrap();
    let limits = box_sys::SnapshotLimits {
        bytes: u64::MAX,
        entries: u64::MAX,
    };
    let copy = server
        .fork_server
        .start_snapshot(boxed.sandbox(), to.as_fd(), limits);
    copy.unwrap().finish().unwrap();
    path
}

#[test]
fn a_box_on_a_snapshot_continues_with_the_changes_of_the_workspace() {
    for server in SERVERS.iter() {
        server.on_each_root(|base| {
            let workspace = filled(server);
            let base = SandboxPlan {
                read_only_root: false,
                ..base.clone()
            };
            let boxed = server.create_box(&workspace.plan(&base));
            ok(&boxed, CHANGES);
            let inside = ok(&boxed, &format!("cd /workspace; {SHOW}"));
            let place = server.directory();
            let layer_path = snapshot(server, &boxed, &place);
            drop(boxed);
            let mut plan = workspace.plan(&base);
            plan.layers.push(Layer::directory(&layer_path));
            let boxed = server.create_box(&plan);
            assert_eq!(
                ok(&boxed, &format!("cd /workspace; {SHOW}")),
                inside,
                "{}",
                server.name
            );
            ok(
                &boxed,
                "cd /workspace; echo second > dir/second; rm dir/new",
            );
            let source = File::open(workspace.path()).unwrap();
            let comparison = Comparison {
                layers: vec![
                    layer(LayerSource::Private, true, false),
                    layer(
                        LayerSource::Layer(Layer::directory(&layer_path)),
                        true,
                        false,
                    ),
                    layer(LayerSource::Workspace, true, true),
                ],
                directory: "workspace".into(),
                hidden: Vec::new(),
                made: Vec::new(),
                special_modes: false,
            };
            let listed = |comparison: &Comparison, paths: &[&str]| -> Vec<String> {
                let selection = Selection {
                    paths: paths.iter().map(PathBuf::from).collect(),
                };
                let of = ChangesOf {
                    comparison,
                    selection: &selection,
                    sandbox: Some(boxed.sandbox()),
                    workspace: Some(source.as_fd()),
                };
                let list = server.fork_server.start_list(of, None, 1000);
                let page = list.unwrap().finish().unwrap();
                page.changes.iter().map(line).collect()
            };
            let mut wanted: Vec<_> = LISTED.iter().map(|line| (*line).to_owned()).collect();
            let at = wanted.iter().position(|line| line == "A dir/new").unwrap();
            wanted[at] = "A dir/second".to_owned();
            assert_eq!(listed(&comparison, &[]), wanted, "{}", server.name);
            // Since the snapshot.
            let since = Comparison {
                layers: vec![
                    layer(LayerSource::Private, true, false),
                    layer(
                        LayerSource::Layer(Layer::directory(&layer_path)),
                        true,
                        true,
                    ),
                    layer(LayerSource::Workspace, true, true),
                ],
                ..comparison.clone()
            };
            assert_eq!(listed(&since, &[]), ["D dir/new", "A dir/second"]);
            // The same as a part of the whole box.
            let mut whole = Comparison {
                directory: PathBuf::new(),
                ..since.clone()
            };
            let at = LayerSource::WorkspaceAt("workspace".into());
            *whole.layers.last_mut().unwrap() = layer(at, true, true);
            assert_eq!(
                listed(&whole, &["workspace"]),
                ["D workspace/dir/new", "A workspace/dir/second"]
            );
        });
    }
}

#[test]
fn changes_of_a_box_since_its_image_are_listed() {
    for server in SERVERS.iter() {
        let image = server.image();
        let image_path = image.path().canonicalize().unwrap();
        let plan = SandboxPlan {
            root: Root::Image(image_path.clone()),
            read_only_root: false,
            guest: guest("root", "/root", 0, 0),
            ..server.plan()
        };
        let boxed = server.create_box(&plan);
        let comparison = Comparison {
            layers: vec![
                layer(LayerSource::Private, true, false),
                layer(LayerSource::Image(image_path), true, true),
            ],
            directory: PathBuf::new(),
            hidden: ["dev", "proc", "probe", "etc/resolv.conf"]
                .map(PathBuf::from)
                .into(),
            made: ["tmp", "var", "var/tmp", "root", "opt"]
                .map(PathBuf::from)
                .into(),
            special_modes: true,
        };
        let list = |boxed: &TestBox<'_>| {
            let of = ChangesOf {
                comparison: &comparison,
                selection: &Selection::default(),
                sandbox: Some(boxed.sandbox()),
                workspace: None,
            };
            let page = server
                .fork_server
                .start_list(of, None, 1000)
                .unwrap()
                .finish()
                .unwrap();
            page.changes.iter().map(line).collect::<Vec<_>>()
        };
        assert_eq!(list(&boxed), [""; 0], "{}: a new box", server.name);
        ok(
            &boxed,
            "rm /usr/share/marker && rm -r /srv/app && mkdir /srv/app && echo n > /srv/app/new && echo more >> /etc/list && echo r > /root/r && chmod 700 /etc/secret",
        );
        let wanted = [
            "M etc/list",
            "M etc/secret",
            "A root/r",
            "D srv/app/kept",
            "A srv/app/new",
            "D usr/share/marker",
        ];
        assert_eq!(list(&boxed), wanted, "{}", server.name);
    }
}

/// What an apply of a box, or of layers alone, would do without force.
fn planned(
    workspace: &Workspace<'_>,
    boxed: Option<&TestBox<'_>>,
    layers: &[&PathBuf],
) -> Vec<String> {
    let source = File::open(workspace.path()).unwrap();
    let live = boxed.map(|_| layer(LayerSource::Private, true, false));
    let below = layers.iter().map(|path| {
        let source = LayerSource::Layer(Layer::directory(path.as_path()));
        layer(source, true, false)
    });
    let last = [layer(LayerSource::Workspace, true, true)];
    let comparison = Comparison {
        layers: live.into_iter().chain(below).chain(last).collect(),
        directory: "workspace".into(),
        hidden: Vec::new(),
        made: Vec::new(),
        special_modes: false,
    };
    let of = ChangesOf {
        comparison: &comparison,
        selection: &Selection::default(),
        sandbox: boxed.map(TestBox::sandbox),
        workspace: Some(source.as_fd()),
    };
    let dry = box_sys::ApplyOptions {
        dry_run: true,
        ..options()
    };
    let server = &workspace.server.fork_server;
    // A time that is too late by far: the layers themselves must have the right one.
    let applied: Applied = server
        .start_apply(of, &dry, i64::MAX)
        .unwrap()
        .finish()
        .unwrap();
    let conflicts = applied.conflicts.first.into_iter();
    conflicts.map(|(path, _)| path).collect()
}

#[test]
fn copies_of_a_box_know_since_when_it_has_its_own_versions() {
    for server in SERVERS.iter() {
        let workspace = Workspace::new(server);
        for name in [
            "both",
            "mine",
            "gone",
            "tree/file",
            "later",
            "link",
            "quiet",
        ] {
            workspace.write(name, name);
        }
        let pause = || std::thread::sleep(std::time::Duration::from_millis(50));
        pause();
        let boxed = workspace.start();
        ok(
            &boxed,
            "cd /workspace; echo box >> both; echo box >> mine; rm gone; rm -r tree; \
             ln -sf x link; echo box > new",
        );
        pause();
        for name in ["both", "new", "tree/added", "gone", "link"] {
            workspace.write(name, "host");
        }
        // The guest has seen this one.
        workspace.write("later", "host");
        pause();
        ok(&boxed, "cd /workspace; echo box >> later");
        let conflicts = ["both", "gone", "link", "new", "tree/added"];
        assert_eq!(
            planned(&workspace, Some(&boxed), &[]),
            conflicts,
            "{}",
            server.name
        );
        let place = server.directory();
        let first = snapshot(server, &boxed, &place);
        drop(boxed);
        assert_eq!(
            planned(&workspace, None, &[&first]),
            conflicts,
            "{}: a copy",
            server.name
        );
        // The box continues on the copy, and never sees the files of the host.
        let mut plan = workspace.plan(&server.plan());
        plan.layers.push(Layer::directory(&first));
        let boxed = server.create_box(&plan);
        ok(
            &boxed,
            "cd /workspace; echo again >> both; sed -i s/x/y/ mine; rm new; rm -f link; \
             mkdir tree; echo x > tree/added",
        );
        assert_eq!(
            planned(&workspace, Some(&boxed), &[&first]),
            conflicts,
            "{}: a box on a copy",
            server.name
        );
        let second = server.directory();
        let second_path = snapshot(server, &boxed, &second);
        drop(boxed);
        let merged = server.directory();
        let merged_path = merged.path().canonicalize().unwrap().join("merged");
        fs::create_dir(&merged_path).unwrap();
        std::os::unix::fs::chown(&merged_path, Some(server.uid()), Some(server.uid())).unwrap();
        let to = File::open(&merged_path).unwrap();
        let limits = box_sys::SnapshotLimits {
            bytes: u64::MAX,
            entries: u64::MAX,
        };
        let layers = [&second_path, &first].map(|path| Layer::directory(path.as_path()));
        let merge = server.fork_server.start_merge(&layers, to.as_fd(), limits);
        merge.unwrap().finish().unwrap();
        assert_eq!(
            planned(&workspace, None, &[&merged_path]),
            conflicts,
            "{}: merged copies",
            server.name
        );
    }
}

#[test]
fn a_version_that_replaces_an_earlier_one_is_as_old_as_the_earlier_one() {
    for server in SERVERS.iter() {
        let workspace = Workspace::new(server);
        for name in ["edited", "deleted", "untouched"] {
            workspace.write(name, "x");
        }
        let pause = || std::thread::sleep(std::time::Duration::from_millis(50));
        pause();
        let boxed = workspace.start();
        ok(&boxed, "cd /workspace; echo 1 >> edited; echo 1 >> deleted");
        pause();
        workspace.write("edited", "host");
        workspace.write("deleted", "host");
        pause();
        // A new file in place of the first version, and a mark.
        ok(
            &boxed,
            "cd /workspace; sed -i s/1/2/ edited; rm deleted untouched",
        );
        let conflicts = planned(&workspace, Some(&boxed), &[]);
        assert_eq!(conflicts, ["deleted", "edited"], "{}", server.name);
        // After a discard, the guest works on the version of the host.
        let some = Selection {
            paths: vec!["edited".into()],
        };
        assert_eq!(workspace.discard(&boxed, &some), 1);
        ok(&boxed, "cd /workspace; echo 3 >> edited");
        let conflicts = planned(&workspace, Some(&boxed), &[]);
        assert_eq!(conflicts, ["deleted"], "{}", server.name);
        pause();
        workspace.write("edited", "host again");
        let conflicts = planned(&workspace, Some(&boxed), &[]);
        assert_eq!(conflicts, ["deleted", "edited"], "{}", server.name);
    }
}
