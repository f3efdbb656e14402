//! Random writers with readers that start late, stop, are cut and resume.
//!
//! The bytes that a reader saw and those reported as dropped are exactly the written bytes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use box_protocol::PerStream;
use box_protocol::actions::{CommandChunk, ReadWhy, StreamName};
use box_runtime::Caller;
use box_tests::machine::{Machine, on_each_machine, on_each_machine_within, printed};
use serde_json::json;
use tokio::sync::mpsc;

/// The number of commands on each machine.
const RUNS: usize = 5000;
/// The number of concurrent commands.
const WIDTH: usize = 8;

/// Pseudo-random numbers that are the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// The state of one stream for one reader.
#[derive(Default)]
struct SeenStream {
    next: u64,
    gone: u64,
}

impl SeenStream {
    /// Checks a piece: it starts where the last one ended, and has the written bytes.
    fn piece(&mut self, offset: u64, data: &[u8], written: &[u8]) {
        assert_eq!(offset, self.next, "in order, nothing twice");
        let begin = usize::try_from(offset).unwrap();
        assert_eq!(data, &written[begin..begin + data.len()]);
        self.next += data.len() as u64;
    }
}

/// Reads a command to its end, with any number of interruptions. Returns the dropped bytes and the
/// interruptions.
async fn read_all(
    machine: &Machine,
    id: &str,
    written: &[Vec<u8>; 2],
    random: &mut Random,
) -> (u64, usize) {
    let mut seen = [SeenStream::default(), SeenStream::default()];
    let mut cuts = 0;
    let view = ["bytes", "text"][usize::try_from(random.below(2)).unwrap()];
    loop {
        let from = PerStream {
            stdout: seen[0].next,
            stderr: seen[1].next,
        };
        let wanted = (random.below(3) == 0).then(|| 1 + random.below(20_000));
        let cut_after = (random.below(3) == 0).then(|| random.below(3));
        let params = json!({"box_id": "r", "command_id": id, "view": view,
            "from": {"offsets": from}, "until": {"bytes": wanted}});
        let params = serde_json::from_value(params).unwrap();
        let (sender, mut chunks) = mpsc::channel(1);
        let runtime = machine.runtime.clone();
        let call =
            tokio::spawn(
                async move { runtime.attach_command(&Caller::Local, params, sender).await },
            );
        let (mut taken, mut cut) = (0, false);
        while let Some(chunk) = chunks.recv().await {
            match chunk {
                CommandChunk::Bytes(piece) => {
                    let at = usize::from(piece.stream == StreamName::Stderr);
                    seen[at].piece(piece.offset, &piece.data, &written[at]);
                }
                CommandChunk::Text(piece) => {
                    let at = usize::from(piece.stream == StreamName::Stderr);
                    seen[at].piece(piece.offset, piece.data.as_bytes(), &written[at]);
                }
                CommandChunk::Gap(gap) => {
                    let seen = &mut seen[usize::from(gap.stream == StreamName::Stderr)];
                    assert_eq!(gap.offset, seen.next);
                    seen.next += gap.bytes;
                    seen.gone += gap.bytes;
                }
                other => panic!("{other:?}"),
            }
            if cut_after == Some(taken) {
                cut = true;
                break;
            }
            taken += 1;
        }
        if cut {
            call.abort();
            cuts += 1;
            continue;
        }
        let result = call.await.unwrap().unwrap();
        let next = PerStream {
            stdout: seen[0].next,
            stderr: seen[1].next,
        };
        assert_eq!(result.read.next, next, "the answer has the next offset");
        match result.read.why {
            ReadWhy::Exit => break,
            ReadWhy::Bytes => cuts += 1,
            other => panic!("{other:?}"),
        }
    }
    let ends = [seen[0].next, seen[1].next].map(|end| usize::try_from(end).unwrap());
    assert_eq!(ends, [written[0].len(), written[1].len()]);
    (seen[0].gone + seen[1].gone, cuts)
}

/// Runs a command that writes known lines to both streams, with one or two readers. Returns the
/// dropped bytes and the interruptions.
async fn run(machine: &Machine, number: usize) -> (u64, usize) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (number as u64 + 1));
    // A third of the commands write to both streams.
    let both = random.below(3) == 0;
    let counts = [1 + random.below(3000), random.below(600) * u64::from(both)];
    let written = counts.map(|count| {
        let lines = (1..=count).map(|n| format!("{n}\n").into_bytes());
        lines.flatten().collect::<Vec<u8>>()
    });
    let id = format!("run-{number}");
    let program = if counts[1] == 0 {
        json!({"argv": ["seq", counts[0].to_string()]})
    } else {
        json!({"text": format!("seq {} >&2 & seq {}; wait", counts[1], counts[0])})
    };
    let params = json!({"box_id": "r", "command_id": id, "program": program, "cwd": "/tmp",
        "log_bytes": 4096 + random.below(40_000), "retain_ms": 60_000});
    let params = serde_json::from_value(params).unwrap();
    machine
        .runtime
        .start_command(&Caller::Local, params, None)
        .await
        .unwrap();
    let mut other = Random(random.0 | 1);
    other.below(7);
    let (one, two) = tokio::join!(
        read_all(machine, &id, &written, &mut random),
        read_all(machine, &id, &written, &mut other),
    );
    let forget = json!({"box_id": "r", "command_id": id, "forget": true});
    let forget = serde_json::from_value(forget).unwrap();
    machine
        .runtime
        .kill_command(&Caller::Local, forget)
        .await
        .unwrap();
    (one.0 + two.0, one.1 + two.1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seen_and_dropped_bytes_are_the_written_bytes() {
    on_each_machine_within(Duration::from_mins(4), async |machine| {
        printed(&machine.exec("r", "true").await);
        let next = AtomicUsize::new(0);
        let lane = || async {
            let (mut gone, mut cuts) = (0, 0);
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= RUNS {
                    return (gone, cuts);
                }
                let came = Box::pin(run(machine, number)).await;
                gone += came.0;
                cuts += came.1;
            }
        };
        let all = futures::future::join_all((0..WIDTH).map(|_| lane())).await;
        let gone: u64 = all.iter().map(|came| came.0).sum();
        let cuts: usize = all.iter().map(|came| came.1).sum();
        eprintln!("{RUNS} runs: {cuts} interruptions, {gone} bytes reported as dropped");
        assert!(
            gone > 0 && cuts > RUNS / 2,
            "drops and interruptions happened"
        );
    })
    .await;
}

/// The resident memory of this process.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Rss:"))
        .unwrap();
    line.split_whitespace()
        .next()
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_and_a_slow_reader_take_no_memory_and_delay_no_other_reader() {
    on_each_machine(async |machine| {
        for session in ["r", "other"] {
            printed(&machine.exec(session, "true").await);
        }
        // The full amount once: the boxes of an ordinary user do not differ here.
        let bytes: u64 = if machine.name == "root" { 1 << 30 } else { 64 << 20 };
        let params = json!({"box_id": "r", "program": {"argv": ["head", "-c", bytes.to_string(), "/dev/zero"]},
            "cwd": "/tmp", "attach": {"view": "bytes"}});
        let params = serde_json::from_value(params).unwrap();
        let (sender, mut chunks) = mpsc::channel(1);
        let runtime = machine.runtime.clone();
        let before = resident();
        let call = tokio::spawn(async move {
            runtime.start_command(&Caller::Local, params, Some(sender)).await
        });
        let (mut read, mut number, mut most) = (0, 0, 0);
        while let Some(chunk) = chunks.recv().await {
            let CommandChunk::Bytes(piece) = chunk else {
                continue;
            };
            read += piece.data.len() as u64;
            number += 1;
            if number <= 50 {
                // The reader does not read, and other calls are served as usual.
                printed(&machine.exec("other", "true").await);
            }
            if number % 512 == 0 {
                most = most.max(resident());
            }
        }
        let result = call.await.unwrap().unwrap();
        assert_eq!((read, result.read.unwrap().dropped.stdout), (bytes, 0));
        assert!(most < before + (48 << 20), "{before} before, {most} meanwhile");
    })
    .await;
}
