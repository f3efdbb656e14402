//! Files that a guest may create: links, pipes, devices, endless files.

use std::time::{Duration, Instant};

use box_protocol::Code;
use box_protocol::actions::{
    FileAttributes, FileGrep, FileList, FileMove, FilePack, FileRemove, FileStat,
};
use box_tests::machine::on_each_machine;
use serde_json::json;

use super::BoxFiles;

#[tokio::test]
async fn no_path_leads_out_of_the_root() {
    on_each_machine(async |machine| {
        let (outside, workspace) = (machine.directory(), machine.directory());
        let secret = outside.path().join("secret");
        std::fs::write(&secret, "of the host").unwrap();
        std::os::unix::fs::symlink(&secret, workspace.path().join("link")).unwrap();
        std::os::unix::fs::symlink(outside.path(), workspace.path().join("dir")).unwrap();
        let up = format!("{}{}", "../".repeat(30), &secret.display().to_string()[1..]);
        std::os::unix::fs::symlink(&up, workspace.path().join("up")).unwrap();
        // The control: outside a box, each of them leads there.
        for name in ["link", "dir/secret", "up"] {
            let text = std::fs::read_to_string(workspace.path().join(name));
            assert_eq!(text.unwrap(), "of the host");
        }
        let inside = BoxFiles::with(machine, "out", json!({"host_path": workspace.path()})).await;
        let host = outside.path().display();
        for (path, code) in [
            ("/workspace/link".to_owned(), Code::NotFound),
            ("/workspace/dir/secret".to_owned(), Code::NotFound),
            ("/workspace/up".to_owned(), Code::NotFound),
            (format!("/workspace/{up}"), Code::NotFound),
            (format!("{host}/secret"), Code::NotFound),
            (format!("/proc/self/root{host}/secret"), Code::Validation),
            (format!("/proc/1/root{host}/secret"), Code::Validation),
            (
                format!("/proc/self/cwd/../..{host}/secret"),
                Code::Validation,
            ),
            ("/proc/self/exe".to_owned(), Code::Validation),
            ("/proc/1/fd/0".to_owned(), Code::Denied),
        ] {
            let met = inside.unreadable(&path).await;
            let fits = met == code || (code == Code::Denied && met == Code::Validation);
            assert!(
                fits || path.starts_with("/proc/1/") && met == Code::Denied,
                "{path}: {met:?}"
            );
            let written = inside.write_with(&path, b"x", json!({})).await;
            assert!(written.is_err(), "{path}");
        }
        // At the root, `..` is the root.
        inside.write("/tmp/f", "x").await;
        assert_eq!(inside.text("/../../tmp/../../tmp/f").await, "x");
        let names = std::fs::read_dir(outside.path()).unwrap().count();
        assert_eq!(
            (names, std::fs::read_to_string(&secret).unwrap().as_str()),
            (1, "of the host")
        );
    })
    .await;
}

#[tokio::test]
async fn pipes_devices_and_sockets_are_refused_at_once() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "special").await;
        inside
            .run("cd /tmp && mkfifo pipe && python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('socket')\"")
            .await;
        for path in ["/tmp/pipe", "/tmp/socket", "/dev/zero", "/dev/null", "/dev/tty"] {
            if inside.stat(path).await.is_err() {
                continue;
            }
            let read = inside.unreadable(path).await;
            assert!(matches!(read, Code::Validation | Code::Denied), "{path}: {read:?}");
            for append in [false, true] {
                let written = inside.write_with(path, b"x", json!({"append": append})).await;
                let code = written.unwrap_err().code();
                assert!(matches!(code, Code::Validation | Code::Denied), "{path}: {code:?}");
            }
            let copied = json!({"src": path, "dest": "/tmp/copy", "keep_source": true});
            assert_eq!(inside.refused::<FileMove>(copied).await, Code::Validation, "{path}");
            let changed = json!({"path": path, "mode": 0o666});
            assert_eq!(inside.refused::<FileAttributes>(changed).await, Code::Validation, "{path}");
        }
        let found = inside.done::<FileGrep>(json!({"path": "/tmp", "pattern": "x"})).await;
        assert_eq!(found.matches, 0);
        let (packed, _) = inside.stream::<FilePack>(json!({"path": "/tmp"})).await;
        assert_eq!(packed.unwrap().entries, 0, "they are left out");
        assert_eq!(inside.done::<FileList>(json!({"path": "/tmp"})).await.entries.len(), 2);
        inside.done::<FileRemove>(json!({"paths": ["/tmp/pipe", "/tmp/socket"]})).await;
    })
    .await;
}

#[tokio::test]
async fn a_huge_sparse_file_costs_nothing() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "sparse").await;
        inside
            .run("truncate -s 1T /tmp/sparse; echo needle > /tmp/small")
            .await;
        let found = inside
            .done::<FileGrep>(json!({"path": "/tmp", "pattern": "needle"}))
            .await;
        assert_eq!(found.files, 1);
        let (packed, bytes) = inside.stream::<FilePack>(json!({"path": "/tmp"})).await;
        assert_eq!(packed.unwrap_err().code(), Code::TooLarge);
        assert!(bytes.is_empty(), "known before the first byte");
        let part = json!({"path": "/tmp/sparse", "part": {"bytes": {"offset": (1_u64 << 40) - 5}}});
        let (read, bytes) = inside.stream::<box_protocol::actions::FileRead>(part).await;
        assert_eq!((read.unwrap().size, bytes), (1 << 40, vec![0; 5]));
        let replaced = json!({"path": "/tmp/sparse", "old": "a", "new": "b"});
        let replaced = inside
            .refused::<box_protocol::actions::FileReplace>(replaced)
            .await;
        assert_eq!(replaced, Code::TooLarge);
    })
    .await;
}

#[tokio::test]
async fn a_call_that_is_dropped_ends_and_the_next_is_served() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "dropped").await;
        // Four searches that take minutes would occupy all threads.
        inside
            .run("cd /tmp; yes abcabcabc | head -c 1M > f; python3 -c 'import os; [os.link(\"f\", f\"f{i}\") for i in range(4000)]'")
            .await;
        let endless = async || {
            let asked =
                json!({"path": "/tmp", "pattern": "[a-c]{3}[x-z]", "max_file_bytes": 1 << 25});
            let searching = inside.ask::<FileGrep>(asked);
            tokio::time::timeout(Duration::from_millis(300), searching)
                .await
                .is_err()
        };
        let dropped = futures::future::join_all((0..8).map(|_| endless())).await;
        assert_eq!(dropped, [true; 8], "they do take long");
        let begin = Instant::now();
        inside.done::<FileStat>(json!({"paths": ["/tmp"]})).await;
        let took = begin.elapsed();
        assert!(took < Duration::from_mins(1), "{took:?}");
    })
    .await;
}

#[tokio::test]
async fn the_agents_own_memory_and_descriptors_are_not_files() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "self").await;
        inside
            .run("cd /tmp; ln -s /proc/1/mem a; ln -s /proc/self b; ln -s /proc/thread-self/mem c; ln -s /dev/fd d")
            .await;
        for path in [
            "/proc/1/mem",
            "/proc/self/mem",
            "/proc/thread-self/mem",
            "/proc/1/task/1/mem",
            "/proc/self/environ",
            "/proc/self/status",
            "/tmp/a",
            "/tmp/b/mem",
            "/tmp/c",
        ] {
            assert_eq!(inside.unreadable(path).await, Code::Denied, "{path}");
            for append in [false, true] {
                let written = inside.write_with(path, b"x", json!({"append": append})).await;
                assert_eq!(written.unwrap_err().code(), Code::Denied, "{path}");
            }
        }
        for path in ["/proc", "/proc/1", "/proc/self/fd", "/tmp/b/", "/tmp/d/"] {
            assert_eq!(inside.refused::<FileList>(json!({"path": path})).await, Code::Denied, "{path}");
            let searched = json!({"path": path, "pattern": "."});
            assert_eq!(inside.refused::<FileGrep>(searched).await, Code::Denied, "{path}");
        }
        let root = inside.done::<FileList>(json!({"path": "/", "depth": 2, "limit": 10_000})).await;
        let paths: Vec<_> = root.entries.iter().map(|entry| entry.path.as_str()).collect();
        assert!(paths.contains(&"/proc") && paths.contains(&"/usr/bin"), "control");
        assert!(!paths.iter().any(|path| path.starts_with("/proc/")));
        // A file about the machine and not about a process is readable.
        assert!(inside.text("/proc/meminfo").await.starts_with("MemTotal"));
    })
    .await;
}
