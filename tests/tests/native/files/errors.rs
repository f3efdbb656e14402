//! The error codes of file actions.

use box_protocol::Code;
use box_protocol::actions::{
    FileAttributes, FileFind, FileGrep, FileList, FileMkdir, FileMove, FileOutcome, FilePack,
    FileRead, FileRemove, FileReplace, FileStat, FileWrite,
};
use box_protocol::error::Detail;
use box_runtime::Caller;
use box_tests::machine::on_each_machine;
use serde_json::json;

use super::BoxFiles;

#[tokio::test]
async fn missing_files_are_not_found() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "absent").await;
        let none = "/tmp/no/such";
        assert_eq!(inside.unreadable(none).await, Code::NotFound);
        assert_eq!(inside.stat(none).await.unwrap_err(), Code::NotFound);
        assert_eq!(
            inside.refused::<FileList>(json!({"path": none})).await,
            Code::NotFound
        );
        assert_eq!(
            inside
                .refused::<FileFind>(json!({"path": none, "glob": "*"}))
                .await,
            Code::NotFound
        );
        assert_eq!(
            inside
                .refused::<FileGrep>(json!({"path": none, "pattern": "x"}))
                .await,
            Code::NotFound
        );
        let asked = json!({"path": none, "old": "a", "new": "b"});
        assert_eq!(inside.refused::<FileReplace>(asked).await, Code::NotFound);
        assert_eq!(
            inside
                .refused::<FileMove>(json!({"src": none, "dest": "/tmp/x"}))
                .await,
            Code::NotFound
        );
        assert_eq!(
            inside.refused::<FileRemove>(json!({"paths": [none]})).await,
            Code::NotFound
        );
        assert_eq!(
            inside
                .refused::<FileAttributes>(json!({"path": none, "mode": 0}))
                .await,
            Code::NotFound
        );
        assert_eq!(
            inside
                .stream::<FilePack>(json!({"path": none}))
                .await
                .0
                .unwrap_err()
                .code(),
            Code::NotFound
        );
        let written = inside.write_with(none, b"", json!({})).await.unwrap_err();
        assert_eq!(written.code(), Code::NotFound);
        assert_eq!(
            written.detail::<Detail>().unwrap().errno.as_deref(),
            Some("ENOENT")
        );
        let other = Caller::token("another owner");
        let params = inside.params(json!({"paths": ["/"]}));
        let refused = machine.runtime.forward::<FileStat>(&other, &params).await;
        assert_eq!(refused.unwrap_err().code(), Code::NotFound);
    })
    .await;
}

#[tokio::test]
async fn forbidden_paths_are_denied() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "denied").await;
        for path in ["/usr/x", "/etc/x", "/x", "/proc/x", "/dev/x"] {
            let refused = inside.write_with(path, b"x", json!({})).await.unwrap_err();
            assert!(
                matches!(refused.code(), Code::Denied | Code::NotFound),
                "{path}: {refused:?}"
            );
        }
        let passwd = inside.write_with("/etc/passwd", b"x", json!({})).await;
        assert_eq!(passwd.unwrap_err().code(), Code::Denied);
        inside.run("cd /tmp; echo x > ro; chmod 444 ro; echo x > wo; chmod 222 wo; mkdir no; chmod 0 no").await;
        let ro = inside.write_with("/tmp/ro", b"x", json!({})).await;
        assert_eq!(ro.unwrap_err().code(), Code::Denied);
        assert_eq!(inside.unreadable("/tmp/wo").await, Code::Denied);
        assert_eq!(inside.stat("/tmp/no/x").await.unwrap_err(), Code::Denied);
        assert_eq!(inside.refused::<FileList>(json!({"path": "/tmp/no"})).await, Code::Denied);
        // Signals, memory and descriptors of the first process are not the guest's, so the guest's
        // agent cannot read them either.
        for path in ["/proc/1/environ", "/proc/1/mem", "/proc/1/maps"] {
            assert_eq!(inside.unreadable(path).await, Code::Denied, "{path}");
        }
        for (field, value) in [("owner", "root"), ("group", "0"), ("owner", "4242"), ("user", "root")] {
            let refused = inside.write_with("/tmp/own", b"x", json!({field: value})).await.unwrap_err();
            assert_eq!(refused.code(), Code::Denied, "{field}");
            let begin = format!("{field}: {value:?} is not a ");
            assert!(refused.message().starts_with(&begin), "{refused:?}");
        }
        let asked = json!({"path": "/usr", "mode": 0o777});
        assert_eq!(inside.refused::<FileAttributes>(asked).await, Code::Denied);
    })
    .await;
}

#[tokio::test]
async fn invalid_requests_are_refused_as_such() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "sense").await;
        inside.write("/tmp/f", "text\n").await;
        for path in [
            "",
            "relative",
            "~",
            "/tmp/a\0b",
            &"/a".repeat(3000),
            "/tmp",
            "/tmp/f/x",
        ] {
            let refused = inside.write_with(path, b"x", json!({})).await.unwrap_err();
            assert_eq!(refused.code(), Code::Validation, "{path}: {refused:?}");
        }
        let long = format!("/tmp/{}", "n".repeat(300));
        assert_eq!(inside.unreadable(&long).await, Code::Validation);
        assert_eq!(inside.unreadable("/tmp").await, Code::Validation);
        for mode in [0o4755, 0o2755, 0o1755, 0o10_000] {
            let set_id = json!({"path": "/tmp/f", "mode": mode});
            assert_eq!(
                inside.refused::<FileAttributes>(set_id).await,
                Code::Validation
            );
            let refused = inside
                .write_with("/tmp/s", b"x", json!({"mode": mode}))
                .await;
            assert_eq!(refused.unwrap_err().code(), Code::Validation);
            let asked = json!({"path": "/tmp/sd", "mode": mode});
            assert_eq!(inside.refused::<FileMkdir>(asked).await, Code::Validation);
        }
        for part in [
            json!({"bytes": {"offset": 6}}),
            json!({"lines": {"start": 0}}),
            json!({"lines": {"start": 2, "end": 1}}),
        ] {
            let (refused, _) = inside
                .stream::<FileRead>(json!({"path": "/tmp/f", "part": part}))
                .await;
            assert_eq!(refused.unwrap_err().code(), Code::Validation, "{part}");
        }
        let pattern = json!({"path": "/tmp", "pattern": "("});
        assert_eq!(inside.refused::<FileGrep>(pattern).await, Code::Validation);
        let glob = json!({"path": "/tmp", "glob": "["});
        assert_eq!(inside.refused::<FileFind>(glob).await, Code::Validation);
        assert_eq!(
            inside.refused::<FileList>(json!({"path": "/tmp/f"})).await,
            Code::Validation
        );
        assert_eq!(
            inside
                .refused::<FileRemove>(json!({"paths": ["/"], "recursive": true}))
                .await,
            Code::Validation
        );
        let empty = json!({"path": "/tmp/f", "old": "", "new": "x"});
        assert_eq!(inside.refused::<FileReplace>(empty).await, Code::Validation);
    })
    .await;
}

#[tokio::test]
async fn an_existing_file_in_the_way_is_a_conflict() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "way").await;
        let first = inside.write("/tmp/f", "one").await;
        inside.run("mkdir -p /tmp/full/inner").await;
        let new = json!({"create": "new"});
        let refused = inside.write_with("/tmp/f", b"x", new.clone()).await;
        assert_eq!(refused.unwrap_err().code(), Code::Conflict);
        inside.write_with("/tmp/new", b"x", new).await.unwrap();
        inside.write("/tmp/f", "two").await;
        let stale = json!({"if_match": first.etag});
        for append in [false, true] {
            let mut more = stale.clone();
            more["append"] = json!(append);
            let refused = inside.write_with("/tmp/f", b"x", more).await.unwrap_err();
            assert_eq!(refused.code(), Code::Conflict);
        }
        let read = json!({"path": "/tmp/f", "if_match": first.etag});
        assert_eq!(
            inside.stream::<FileRead>(read).await.0.unwrap_err().code(),
            Code::Conflict
        );
        let now = inside.stat("/tmp/f").await.unwrap().etag;
        inside
            .write_with("/tmp/f", b"three", json!({"if_match": now}))
            .await
            .unwrap();
        assert_eq!(inside.text("/tmp/f").await, "three");
        assert_eq!(
            inside
                .refused::<FileRemove>(json!({"paths": ["/tmp/full"]}))
                .await,
            Code::Conflict
        );
        assert_eq!(
            inside.refused::<FileMkdir>(json!({"path": "/tmp/f"})).await,
            Code::Conflict
        );
        for keep in [false, true] {
            let asked = json!({"src": "/tmp/f", "dest": "/tmp/new", "keep_source": keep});
            assert_eq!(inside.refused::<FileMove>(asked).await, Code::Conflict);
        }
    })
    .await;
}

#[tokio::test]
async fn excess_is_refused_with_the_name_of_the_limit() {
    on_each_machine(async |machine| {
        let workspace = machine.directory();
        let quota = json!({"host_path": workspace.path(), "workspace_quota_mb": 1});
        let inside = BoxFiles::with(machine, "quota", quota).await;
        let mebibyte = vec![b'x'; 1 << 20];
        inside.write("/workspace/fits", &mebibyte[..1 << 19]).await;
        let mut more = mebibyte.clone();
        more.push(b'x');
        let refused = inside
            .write_with("/workspace/large", &more, json!({}))
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Code::Capacity);
        let grown = inside
            .write_with("/workspace/fits", &mebibyte, json!({"append": true}))
            .await;
        assert_eq!(grown.unwrap_err().code(), Code::Capacity);
        let upload = json!({"upload": {"id": "u", "offset": 0}});
        inside
            .write_with("/workspace/up", &mebibyte[..1000], upload)
            .await
            .unwrap();
        let upload = json!({"upload": {"id": "u", "offset": 1000, "done": true}});
        let refused = inside.write_with("/workspace/up", &mebibyte, upload).await;
        assert_eq!(refused.unwrap_err().code(), Code::Capacity);
        assert_eq!(inside.text("/workspace/fits").await.len(), 1 << 19);

        let message = vec![0; 13 << 20];
        let refused = inside.write_with("/tmp/message", &message, json!({})).await;
        assert_eq!(refused.unwrap_err().code(), Code::TooLarge);
        let paths: Vec<_> = (0..5000).map(|n| format!("/{n}")).collect();
        assert_eq!(
            inside.refused::<FileStat>(json!({"paths": paths})).await,
            Code::TooLarge
        );
        let packed = json!({"path": "/workspace", "caps": {"bytes": 1000}});
        assert_eq!(
            inside
                .stream::<FilePack>(packed)
                .await
                .0
                .unwrap_err()
                .code(),
            Code::TooLarge
        );
    })
    .await;
}

#[tokio::test]
async fn a_box_full_of_processes_still_answers() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::with(machine, "full", json!({"pids_limit": 12})).await;
        // Every freed process slot is taken at once, so the guest gets no further thread. The agent
        // has reserved slots.
        let greedy = "import os, time\n\
            while True:\n\
            \x20   try:\n\
            \x20       if os.fork() == 0: time.sleep(100)\n\
            \x20   except OSError:\n\
            \x20       open('/tmp/is-full', 'w').close()\n\
            \x20       time.sleep(0.001)\n";
        let fill = format!("python3 -c \"{greedy}\" > /dev/null 2>&1 &");
        inside.run(&fill).await;
        let is_full = json!({"paths": ["/tmp/is-full"]});
        box_test_wait::eventually("the process limit is reached", async || {
            let answer = inside.ask::<FileStat>(is_full.clone()).await.unwrap();
            matches!(answer.paths["/tmp/is-full"], FileOutcome::Stat(_))
        })
        .await;
        for number in 0..20 {
            let path = format!("/tmp/written-{number}");
            inside
                .ask::<FileWrite>(json!({"path": path, "data": ""}))
                .await
                .unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_move_never_loses_files_that_a_copy_omits() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "names").await;
        // Names that are not UTF-8, and names of the agent's hidden files.
        for name in [r"b\377", ".box-tmp-b"] {
            let make = format!(
                r#"rm -rf /tmp/t /tmp/u; mkdir -p /tmp/t/sub && echo 1 >/tmp/t/a && echo 2 >"/tmp/t/sub/$(printf '{name}')""#
            );
            inside.run(&make).await;
            let asked = json!({"src": "/tmp/t", "dest": "/workspace/t"});
            assert_eq!(inside.refused::<FileMove>(asked).await, Code::Validation);
            let left = inside
                .run("find /tmp/t -type f | sort | xargs cat; ls -A /workspace")
                .await;
            assert_eq!(
                left, "1\n2",
                "all is where it was, and nothing is elsewhere"
            );
            // Without a copy, names do not matter.
            let asked = json!({"src": "/tmp/t", "dest": "/tmp/u"});
            inside.done::<FileMove>(asked).await;
            assert_eq!(inside.run("find /tmp/u/sub -type f | xargs cat").await, "2");
        }
    })
    .await;
}
