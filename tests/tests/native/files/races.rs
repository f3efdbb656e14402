//! Files that change during a call.

use std::path::Path;
use std::time::Instant;

use box_protocol::actions::{
    FileFind, FileMove, FileOutcome, FilePack, FileRead, FileRemove, FileStat,
};
use box_tests::machine::{on_each_machine, spec};
use serde_json::json;

use super::BoxFiles;

#[tokio::test]
async fn no_line_of_two_appenders_is_lost() {
    const LINES: usize = 5000;
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "append").await;
        let append = async |who: &str| {
            for number in 0..LINES {
                let line = format!("{who} {number}\n");
                let more = json!({"append": true});
                inside
                    .write_with("/tmp/log", line.as_bytes(), more)
                    .await
                    .unwrap();
            }
        };
        tokio::join!(append("a"), append("b"));
        let text = inside.text("/tmp/log").await;
        let mut next = [0, 0];
        for line in text.lines() {
            let (who, number) = line.split_once(' ').unwrap();
            let next = &mut next[usize::from(who == "b")];
            assert_eq!(
                number.parse::<usize>().unwrap(),
                *next,
                "in order and none twice"
            );
            *next += 1;
        }
        assert_eq!(next, [LINES, LINES]);
    })
    .await;
}

/// The number of batches: 100,000 stats on each machine, and some thousand operations of every
/// other kind.
const BATCHES: usize = 40;
const BATCH: usize = 2500;

/// A guest that swaps `swap/d` with links to various paths, until the test stops it.
async fn swap(inside: BoxFiles<'_>, outside: &Path) {
    let script = format!(
        "import os, itertools\n\
         os.makedirs('swap', exist_ok=True); os.chdir('swap'); os.mkdir('real')\n\
         open('real/f', 'w').write('mine')\n\
         targets = ['{}', '/etc', '/proc/1/root/etc', '/proc/self/root/etc', '/', 'real']\n\
         for target in itertools.cycle(targets):\n\
         \x20   if os.path.exists('/workspace/stop'): break\n\
         \x20   for make in (lambda: os.symlink(target, 'd'), lambda: os.mkdir('d')):\n\
         \x20       try: os.unlink('d')\n\
         \x20       except OSError:\n\
         \x20           try: os.rename('d', 'gone')\n\
         \x20           except OSError: pass\n\
         \x20       os.system('rm -rf gone') if os.path.isdir('gone') and os.listdir('gone') else None\n\
         \x20       try: os.rmdir('gone')\n\
         \x20       except OSError: pass\n\
         \x20       try: make()\n\
         \x20       except OSError: pass\n",
        outside.display()
    );
    inside.run(&format!("python3 -c \"{script}\"")).await;
}

#[tokio::test]
async fn a_guest_that_swaps_directories_for_links_gains_nothing() {
    on_each_machine(async |machine| {
        let (workspace, outside) = (machine.directory(), machine.directory());
        let host = outside.path().canonicalize().unwrap();
        for number in 0..10 {
            std::fs::write(host.join(format!("f{number}")), "canary").unwrap();
        }
        std::fs::write(host.join("f"), "of the host").unwrap();
        let shape = json!({"host_path": workspace.path(), "timeout_sec": 600});
        let inside = BoxFiles::with(machine, "swap", shape).await;
        let stop = workspace.path().join("stop");
        let attack = async {
            let begin = Instant::now();
            // The control: resolving the path on the host does end up there.
            let probe = workspace.path().join("swap/d/touched");
            while !host.join("touched").exists() {
                let _ = std::fs::write(&probe, "x");
                assert!(begin.elapsed() < box_test_wait::LONG, "the swaps do not work");
                tokio::task::yield_now().await;
            }
            std::fs::remove_file(host.join("touched")).unwrap();

            let mut seen = [0_usize; 2];
            for round in 0..BATCHES {
                seen = looked_at(inside, seen).await;
                let paths: Vec<_> = (0..BATCH / 10).map(|n| format!("/workspace/swap/d/f{}", n % 10)).collect();
                // A component that is not a directory at that moment ends a batch. The next batch
                // does the rest.
                let _ = inside.ask::<FileRemove>(json!({"paths": paths, "missing_ok": true})).await;
                for n in 0..20 {
                    let path = format!("/workspace/swap/d/w{}", n % 10);
                    let _ = inside.write_with(&path, b"from inside", json!({"parents": n % 2 == 0})).await;
                    let (_, bytes) = inside.stream::<FileRead>(json!({"path": "/workspace/swap/d/f"})).await;
                    assert!(!bytes.starts_with(b"of the host"), "read outside");
                }
                let moved = json!({"src": "/workspace/swap/d", "dest": format!("/workspace/swap/c{round}"), "keep_source": true});
                let _ = inside.ask::<FileMove>(moved).await;
                let _ = inside.ask::<FileRemove>(json!({"paths": ["/workspace/swap/d"], "recursive": true, "missing_ok": true})).await;
            }
            // The control: on a busy machine the guest may need longer until the path has existed
            // once.
            let rounds_done = Instant::now();
            while seen.contains(&0) {
                assert!(rounds_done.elapsed() < box_test_wait::LONG, "the file existed and did not: {seen:?}");
                seen = looked_at(inside, seen).await;
            }
            std::fs::write(&stop, "").unwrap();
            begin.elapsed()
        };
        let ((), took) = tokio::join!(swap(inside, &host), attack);
        eprintln!("{}: {took:?}", machine.name);
        let mut names: Vec<_> = std::fs::read_dir(&host).unwrap().flatten().map(|entry| entry.file_name()).collect();
        names.sort();
        assert_eq!(names.len(), 11, "{names:?}");
        for number in 0..10 {
            let text = std::fs::read_to_string(host.join(format!("f{number}"))).unwrap();
            assert_eq!(text, "canary");
        }
        assert_eq!(std::fs::read_to_string(host.join("f")).unwrap(), "of the host");
    })
    .await;
}

/// Stats a file behind the swapped directory many times: it is the guest's file, or it does not
/// exist.
async fn looked_at(inside: BoxFiles<'_>, mut seen: [usize; 2]) -> [usize; 2] {
    // Different spellings of the same path.
    let dots = |n: usize| (0..12).map(move |bit| if n >> bit & 1 == 1 { "/." } else { "/" });
    let name = |n| format!("/workspace/swap{}/d/f", dots(n).collect::<String>());
    let paths: Vec<_> = (0..BATCH).map(name).collect();
    let answer = inside
        .done::<FileStat>(json!({"paths": paths, "follow": true}))
        .await;
    for (path, outcome) in answer.paths {
        match outcome {
            FileOutcome::Stat(info) => {
                assert_eq!((info.size, info.owner.as_str()), (4, "box"), "{path}");
                seen[0] += 1;
            }
            FileOutcome::Error(_) => seen[1] += 1,
        }
    }
    seen
}

#[tokio::test]
async fn a_walk_does_not_follow_a_link_that_replaced_a_directory() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "walk").await;
        inside
            .run("mkdir -p /workspace/keep /workspace/t; cd /workspace/keep; for i in $(seq 50); do echo kept > k$i; done")
            .await;
        let script = "import os, itertools\n\
            os.chdir('/workspace/t')\n\
            while not os.path.exists('/workspace/stop'):\n\
            \x20   for n in range(20):\n\
            \x20       for make in (lambda: os.mkdir(f'd{n}'), lambda: os.rmdir(f'd{n}'),\n\
            \x20                    lambda: os.symlink('/workspace/keep', f'd{n}'), lambda: os.unlink(f'd{n}')):\n\
            \x20           try: make()\n\
            \x20           except OSError: pass\n";
        let guest = spec(json!({"box_id": "walk", "timeout_sec": 100, "cmd": format!("python3 -c \"{script}\"")}));
        let attack = async {
            for _ in 0..150 {
                let removed = json!({"paths": (0..20).map(|n| format!("/workspace/t/d{n}")).collect::<Vec<_>>(),
                    "recursive": true, "missing_ok": true});
                let _ = inside.ask::<FileRemove>(removed).await;
                let found = json!({"path": "/workspace/t", "glob": "**/k*"});
                if let Ok(found) = inside.ask::<FileFind>(found).await {
                    assert!(found.entries.is_empty(), "{:?}", found.entries);
                }
                let (_, bytes) = inside.stream::<FilePack>(json!({"path": "/workspace/t"})).await;
                assert!(!bytes.windows(4).any(|four| four == b"kept"), "packed through a link");
            }
            inside.write("/workspace/stop", "").await;
        };
        let (guest, ()) = tokio::join!(machine.exec_spec(guest), attack);
        guest.unwrap();
        assert_eq!(inside.run("cat /workspace/keep/k* | sort | uniq -c | xargs").await, "50 kept");
    })
    .await;
}
