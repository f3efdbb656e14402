//! Large files: memory stays constant.

use box_protocol::actions::{FileRead, FileReadParams};
use box_runtime::Caller;
use box_tests::machine::on_each_machine;
use box_tests::process::status_kib;
use serde_json::json;
use tokio::sync::mpsc;

use super::BoxFiles;

/// On the first machine and on the second. The second has the same code path, and a debug build is
/// slow.
const MEBIBYTES: [u64; 2] = [200, 20];

/// The peak memory of a process, in kibibytes.
fn peak(status: &str) -> u64 {
    status_kib(status, "VmHWM")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_mebibytes_are_read_with_flat_memory() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "large").await;
        let size = MEBIBYTES[usize::from(machine.user().is_some())];
        inside
            .run(&format!(
                "truncate -s {size}M /tmp/large; echo end >> /tmp/large"
            ))
            .await;
        let bytes = (size << 20) + 4;
        inside.read("/etc/passwd").await;
        let agent = async || peak(&inside.run("cat /proc/1/status").await);
        let this = || peak(&std::fs::read_to_string("/proc/self/status").unwrap());
        let before = (agent().await, this());
        let params: FileReadParams = inside.params(json!({"path": "/tmp/large"}));
        let (to, mut chunks) = mpsc::channel(2);
        let caller = Caller::Local;
        let reading = machine
            .runtime
            .forward_streamed::<FileRead>(&caller, &params, to);
        let (info, (total, last)) = tokio::join!(reading, async {
            let (mut total, mut last) = (0, Vec::new());
            while let Some(chunk) = chunks.recv().await {
                assert_eq!(chunk.offset, total);
                total += chunk.data.len() as u64;
                last = chunk.data.to_vec();
            }
            (total, last)
        });
        assert_eq!((info.unwrap().size, total), (bytes, bytes));
        assert!(last.ends_with(b"end\n"));
        let after = (agent().await, this());
        // The kernel counts pages in batches, so a peak may also read a little lower later.
        let grown = (
            after.0.saturating_sub(before.0),
            after.1.saturating_sub(before.1),
        );
        assert!(
            grown.0 < 16 << 10 && grown.1 < 32 << 10,
            "kibibytes: {grown:?}"
        );
    })
    .await;
}
