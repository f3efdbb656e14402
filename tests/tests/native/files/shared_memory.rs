//! Files go through memory that is shared with the agent, in slots that calls acquire and release.

use std::time::Duration;

use box_protocol::actions::{FileRead, FileReadParams, SLOTS};
use box_runtime::Caller;
use box_tests::machine::on_each_machine;
use futures::future::join_all;
use serde_json::json;
use tokio::sync::mpsc;

use super::BoxFiles;

#[tokio::test]
async fn dropped_calls_do_not_disturb_others() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "slots").await;
        let whole: Vec<u8> = (0..=250_u8).cycle().take(3 << 20).collect();
        let half = vec![b'h'; 1 << 20];
        inside.write("/tmp/whole", &whole[..1 << 20]).await;
        for round in 0..3 * SLOTS {
            let params: FileReadParams = inside.params(json!({"path": "/tmp/whole"}));
            let (to, mut chunks) = mpsc::channel(1);
            let caller = Caller::Local;
            let runtime = &machine.runtime;
            tokio::select! {
                read = runtime.forward_streamed::<FileRead>(&caller, &params, to) => panic!("{read:?}"),
                first = chunks.recv() => assert_eq!(first.unwrap().offset, 0),
            }
            // At various points of the transfer.
            let written = inside.write_with("/tmp/half", &half, json!({}));
            let within = Duration::from_micros(u64::from(round) * 100);
            let _ = tokio::time::timeout(within, written).await;
        }
        let paths: Vec<_> = (0..2 * SLOTS).map(|n| format!("/tmp/n{n}")).collect();
        let all = paths.iter().enumerate().map(async |(n, path)| {
            let mine = &whole[n..][..1 << 20];
            inside.write(path, mine).await;
            assert!(inside.read(path).await == mine, "{path}");
        });
        join_all(all).await;
        if inside.stat("/tmp/half").await.is_ok() {
            assert!(inside.read("/tmp/half").await == half, "all of it or nothing");
        }
    })
    .await;
}
