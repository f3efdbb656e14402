//! The results of each action without errors.

use box_protocol::Code;
use box_protocol::actions::{
    FileAttributes, FileFind, FileGrep, FileKind, FileList, FileMkdir, FileMove, FileOutcome,
    FileRead, FileRemove, FileReplace, FileStat,
};
use box_protocol::error::{Detail, Subject};
use box_test_wait::eventually;
use box_tests::machine::on_each_machine;
use serde_json::json;

use super::BoxFiles;

#[tokio::test]
async fn a_file_is_written_and_read_as_the_guests() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "rw").await;
        let info = inside.write("/workspace/a", "hello\n").await;
        assert_eq!(
            (info.kind, info.size, info.mode),
            (FileKind::File, 6, 0o644)
        );
        assert_eq!((info.owner.as_str(), info.group.as_str()), ("box", "box"));
        assert_eq!(inside.text("/workspace/a").await, "hello\n");
        let seen = inside
            .run("stat -c '%U %G %a %s' /workspace/a; rm /workspace/a")
            .await;
        assert_eq!(seen, "box box 644 6");
        inside.run("umask 077; echo old > /workspace/b").await;
        inside.write("/workspace/b", "new").await;
        assert_eq!(inside.run("stat -c %a b; cat b").await, "600\nnew");
        let more = json!({"parents": true, "mode": 0o750, "owner": "box", "group": "1000"});
        let deep = inside
            .write_with("/workspace/x/y/z", b"", more)
            .await
            .unwrap();
        assert_eq!((deep.size, deep.mode), (0, 0o750));
        assert_eq!(
            inside.run("stat -c '%U %a' x x/y").await,
            "box 755\nbox 755"
        );
        assert_eq!(inside.run("ls -A").await, "b\nx", "nothing hidden is left");
    })
    .await;
}

#[tokio::test]
async fn parts_of_a_file_are_read_by_bytes_and_by_lines() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "parts").await;
        inside.write("/tmp/f", "one\ntwo\nthree\n").await;
        for (part, want) in [
            (json!({"bytes": {"offset": 4, "len": 3}}), "two"),
            (json!({"bytes": {"offset": 8}}), "three\n"),
            (json!({"bytes": {"offset": 14, "len": 5}}), ""),
            (json!({"lines": {"start": 2, "end": 2}}), "two\n"),
            (json!({"lines": {"start": 2}}), "two\nthree\n"),
            (json!({"lines": {"start": 9}}), ""),
        ] {
            let asked = json!({"path": "/tmp/f", "part": part});
            let (result, bytes) = inside.stream::<FileRead>(asked).await;
            result.unwrap();
            assert_eq!(String::from_utf8(bytes).unwrap(), want, "{part}");
        }
        let etag = inside.stat("/tmp/f").await.unwrap().etag;
        let asked = json!({"path": "/tmp/f", "if_match": etag});
        assert_eq!(inside.stream::<FileRead>(asked).await.1.len(), 14);
    })
    .await;
}

#[tokio::test]
async fn paths_are_expanded_if_asked() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "expand").await;
        let expand = json!({"expand": true});
        for (asked, real) in [
            ("~/a", "/home/box/a"),
            ("$HOME/b", "/home/box/b"),
            ("${HOME}/c", "/home/box/c"),
            ("d", "/workspace/d"),
        ] {
            let written = inside.write_with(asked, b"x", expand.clone()).await;
            assert_eq!(written.unwrap().path, real);
        }
        assert_eq!(
            inside.run("ls ~ /workspace | xargs").await,
            "/home/box: a b c /workspace: d"
        );
    })
    .await;
}

#[tokio::test]
async fn directories_are_listed_in_order_and_in_pages() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "list").await;
        inside
            .run(
                "cd /tmp && mkdir -p t/a/b t/.h && touch t/a/f t/a/b/g t/a-b t/.h/x && ln -s a t/l",
            )
            .await;
        let paths = async |asked| {
            let found = inside.done::<FileList>(asked).await;
            let short = |path: &str| path.strip_prefix("/tmp/t/").unwrap().to_owned();
            let paths: Vec<_> = found
                .entries
                .iter()
                .map(|entry| short(&entry.path))
                .collect();
            (paths.join(" "), found)
        };
        let (names, found) = paths(json!({"path": "/tmp/t"})).await;
        assert_eq!(names, "a a-b l");
        assert_eq!(found.entries[2].target.as_deref(), Some("a"));
        let all = json!({"path": "/tmp/t", "depth": 9, "hidden": true});
        assert_eq!(paths(all).await.0, ".h .h/x a a/b a/b/g a/f a-b l");
        let files = json!({"path": "/tmp/t", "depth": 3, "kinds": ["file"]});
        assert_eq!(paths(files).await.0, "a/b/g a/f a-b");
        let (mut after, mut got) = (json!(null), Vec::new());
        loop {
            let page = json!({"path": "/tmp/t", "depth": 9, "limit": 2, "after": after});
            let (names, found) = paths(page).await;
            got.push(names);
            match found.next {
                Some(next) => after = json!(next),
                None => break,
            }
        }
        assert_eq!(got, ["a a/b", "a/b/g a/f", "a-b l"]);
    })
    .await;
}

#[tokio::test]
async fn files_and_their_lines_are_found_by_pattern() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "find").await;
        inside
            .run("cd /tmp && mkdir -p s/src s/out s/.git && echo 'fn main() {}' > s/src/main.rs && \
                  printf 'Alpha\\nbeta\\nalpha\\n' > s/a.txt && echo alpha > s/out/o.txt && \
                  echo alpha > s/.git/c.txt && printf 'alpha\\0' > s/bin.txt && ln -s / s/everything")
            .await;
        let found = async |more: serde_json::Value| {
            let mut asked = json!({"path": "/tmp/s"});
            asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let found = inside.done::<FileFind>(asked).await;
            let names = found.entries.iter().map(|entry| entry.path[7..].to_owned());
            (names.collect::<Vec<_>>().join(" "), found.truncated)
        };
        let path = found(json!({"glob": "**/*.txt", "exclude": ["out"]})).await;
        assert_eq!(path, ("a.txt bin.txt".to_owned(), false));
        let name = found(json!({"glob": "*.rs", "match": "name"})).await;
        assert_eq!(name.0, "src/main.rs");
        let kinds = found(json!({"glob": "*", "kinds": ["directory", "symlink"]})).await;
        assert_eq!(kinds.0, "everything out src");
        let cut = found(json!({"glob": "**", "hidden": true, "limit": 2})).await;
        assert_eq!((cut.0.split(' ').count(), cut.1), (2, true));

        let grep = json!({"path": "/tmp/s", "pattern": "^ALPHA$", "ignore_case": true,
            "exclude": ["out", ".git"], "after": 1});
        let found = inside.done::<FileGrep>(grep).await;
        let lines = found.lines.iter().map(|line| (line.line, &*line.text, line.context));
        assert_eq!(
            lines.collect::<Vec<_>>(),
            [(1, "Alpha", false), (2, "beta", true), (3, "alpha", false)]
        );
        assert_eq!((found.matches, found.files, found.truncated), (2, 1, false));
        assert!(found.files_searched > found.files, "{found:?}");
        let fixed = json!({"path": "/tmp/s", "pattern": "main() {", "fixed": true, "include": ["*.rs"]});
        assert_eq!(inside.done::<FileGrep>(fixed).await.matches, 1);
        let some = json!({"path": "/tmp/s", "pattern": "alpha", "limit": 1});
        let found = inside.done::<FileGrep>(some).await;
        assert_eq!((found.lines.len(), found.truncated), (1, true));
    })
    .await;
}

#[tokio::test]
async fn text_is_replaced_and_the_mode_stays() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "replace").await;
        inside
            .run("cd /tmp; printf 'a b a\\n' > f; chmod 640 f")
            .await;
        let count = async |more: serde_json::Value| {
            let mut asked = json!({"path": "/tmp/f", "old": "", "new": ""});
            asked
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            inside.done::<FileReplace>(asked).await.count
        };
        assert_eq!(
            count(json!({"old": "a", "new": "x", "first_only": true})).await,
            1
        );
        assert_eq!(count(json!({"old": "zzz", "new": "x"})).await, 0);
        assert_eq!(count(json!({"insert_line": 1, "new": "last\n"})).await, 1);
        assert_eq!(inside.text("/tmp/f").await, "x b a\nlast\n");
        assert_eq!(inside.run("stat -c '%a %U' /tmp/f").await, "640 box");

        inside.write("/tmp/f", "one two two").await;
        let twice = json!({"path": "/tmp/f", "old": "two", "new": "2", "expect": 1});
        let error = inside.ask::<FileReplace>(twice).await.unwrap_err();
        assert_eq!(error.code(), Code::Conflict);
        let detail: Detail = error.detail().unwrap();
        let text = "expect: the file has 2 occurrences of old, not 1";
        assert_eq!(error.message(), text);
        assert_eq!(detail.subject, Some(Subject::File));
        assert_eq!(inside.text("/tmp/f").await, "one two two");
        assert_eq!(
            count(json!({"old": "one", "new": "1", "expect": 1})).await,
            1
        );
        assert_eq!(inside.text("/tmp/f").await, "1 two two");
    })
    .await;
}

#[tokio::test]
async fn files_are_moved_copied_created_and_removed() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "things").await;
        inside
            .run("cd /tmp && mkdir -p d/sub && echo 1 > d/f && echo 2 > d/sub/g && \
                  chmod 500 d/sub && chmod 711 d/f && ln -s f d/l")
            .await;
        let copy = json!({"src": "/tmp/d", "dest": "/tmp/n/copy", "keep_source": true, "parents": true});
        inside.done::<FileMove>(copy).await;
        let seen = inside.run("cd /tmp/n/copy && cat l sub/g && stat -c %a f sub && readlink l").await;
        assert_eq!(seen, "1\n2\n711\n500\nf");
        // From one file system to another.
        inside.run("chmod 700 /tmp/d/sub").await;
        inside.done::<FileMove>(json!({"src": "/tmp/d", "dest": "/workspace/moved"})).await;
        assert_eq!(inside.run("ls /tmp; cat /workspace/moved/sub/g").await, "n\n2");
        inside.write("/workspace/old", "old").await;
        let over = json!({"src": "/workspace/moved/f", "dest": "/workspace/old", "overwrite": true});
        inside.done::<FileMove>(over).await;
        assert_eq!(inside.text("/workspace/old").await, "1\n");

        let asked = json!({"path": "/workspace/p/q", "mode": 0o700});
        assert!(inside.done::<FileMkdir>(asked.clone()).await.created);
        assert!(!inside.done::<FileMkdir>(asked).await.created, "it existed");
        assert_eq!(inside.run("stat -c '%a %U' p p/q").await, "755 box\n700 box");

        inside.done::<FileAttributes>(json!({"path": "/workspace/old", "mode": 0})).await;
        let asked = json!({"path": "/workspace/old", "mode": 0o604, "owner": "1000"});
        let info = inside.done::<FileAttributes>(asked).await;
        assert_eq!(info.mode, 0o604);

        inside.run("chmod 700 /tmp/n/copy/sub; ln -s /workspace/p /tmp/n/link").await;
        let paths = json!({"paths": ["/tmp/n", "/workspace/nothing"], "recursive": true, "missing_ok": true});
        inside.done::<FileRemove>(paths).await;
        assert_eq!(inside.run("ls /tmp; ls /workspace/p").await, "q", "no link was followed");
    })
    .await;
}

#[tokio::test]
async fn pieces_of_uploads_can_be_repeated() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "upload").await;
        let whole: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        let piece = async |from: usize, to: usize, done: bool| {
            let upload = json!({"upload": {"id": "u", "offset": from, "done": done}});
            let sent = inside.write_with("/workspace/up", &whole[from..to], upload);
            sent.await.map(|info| info.size)
        };
        assert_eq!(piece(0, 100_000, false).await.unwrap(), 100_000);
        assert_eq!(piece(0, 100_000, false).await.unwrap(), 100_000);
        // An interrupted piece: only a part arrived, and the client repeats it from before that
        // end.
        assert_eq!(piece(100_000, 150_000, false).await.unwrap(), 150_000);
        assert_eq!(inside.run("ls").await, "", "nothing is seen of it yet");
        assert_eq!(piece(120_000, 300_000, false).await.unwrap(), 300_000);
        let gap = piece(300_001, 300_002, false).await.unwrap_err();
        assert_eq!(gap.code(), box_protocol::Code::Conflict);
        assert_eq!(piece(300_000, 400_000, true).await.unwrap(), 400_000);
        assert_eq!(
            piece(300_000, 400_000, true).await.unwrap(),
            400_000,
            "the answer was lost"
        );
        assert_eq!(inside.read("/workspace/up").await, whole);
        assert_eq!(inside.run("ls -A").await, "up");
        let late = piece(100, 200, false).await.unwrap_err();
        assert_eq!(late.code(), box_protocol::Code::Conflict);
    })
    .await;
}

#[tokio::test]
async fn files_do_not_wait_for_a_command() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "busy").await;
        // The command waits for the file, so this hangs if the file waits for the command.
        let waits =
            "touch /tmp/begun; until [ -e /tmp/meanwhile ]; do sleep 0.01; done; echo ended";
        let (said, ()) = tokio::join!(inside.run(waits), async {
            let begun = json!({"paths": ["/tmp/begun"]});
            eventually("the command begins", async || {
                let found = inside.done::<FileStat>(begun.clone()).await;
                matches!(found.paths["/tmp/begun"], FileOutcome::Stat(_))
            })
            .await;
            inside.write("/tmp/meanwhile", "x").await;
        });
        assert_eq!(said, "ended");
    })
    .await;
}

#[tokio::test]
async fn attributes_have_ids_and_the_time_of_creation() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "ids").await;
        let before = box_protocol::UnixMs::now();
        inside.run("echo x > /tmp/f; mkdir /tmp/d").await;
        let ids = inside.run("id -u; id -g; stat -c %W /tmp/f").await;
        let ids: Vec<i64> = ids.lines().map(|line| line.parse().unwrap()).collect();
        let stat = json!({"paths": ["/tmp/f", "/usr", "/tmp/none"]});
        let found = inside.done::<FileStat>(stat).await.paths;
        let FileOutcome::Stat(file) = &found["/tmp/f"] else {
            panic!("{found:?}");
        };
        assert_eq!((i64::from(file.uid), i64::from(file.gid)), (ids[0], ids[1]));
        // The kernel reports 0 or - where the file system records no time.
        assert_eq!(file.created_at.is_some(), ids[2] > 0, "{file:?}");
        if let Some(created) = file.created_at {
            assert!(created.0 + 2000 >= before.0, "{created:?} {before:?}");
            assert!(created <= box_protocol::UnixMs::now());
        }
        let listed = inside.done::<FileList>(json!({"path": "/tmp"})).await;
        let same = listed.entries.iter().find(|entry| entry.path == "/tmp/f");
        assert_eq!(same, Some(file));
    })
    .await;
}
