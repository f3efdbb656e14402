//! The kernel reveals little about itself to a guest and accepts no setting from it.

use box_tests::machine::on_each_machine;

use super::{as_root, inside, outside};

const KERNEL: &str = include_str!("probes/kernel.py");

#[tokio::test]
async fn kernel_settings_cannot_be_written_and_its_secrets_not_read() {
    let own = std::process::id().to_string();
    let host = outside(KERNEL, &[&own]);
    let open = |name: &str| host[name].starts_with("ok");
    if as_root() {
        for path in [
            "/proc/sys/kernel/core_pattern".to_owned(),
            "/proc/sys/vm/overcommit_memory".to_owned(),
            format!("/proc/{own}/oom_score_adj"),
            format!("/proc/{own}/mem"),
        ] {
            assert!(open(&format!("write:{path}")), "control: {path}: {host:?}");
        }
        for path in [
            "/proc/kallsyms".to_owned(),
            "/proc/cmdline".to_owned(),
            "/proc/timer_list".to_owned(),
            format!("/proc/{own}/environ"),
            format!("/proc/{own}/maps"),
        ] {
            let answer = &host[&format!("read:{path}")];
            assert!(answer.len() > 3, "control: {path}: {host:?}");
        }
        assert!(open("syslog"), "control");
    }
    on_each_machine(async |machine| {
        let said = inside(machine, "kernel", KERNEL, &["1", "all"]).await;
        for (question, answer) in &said {
            if question.starts_with("write:") {
                assert!(!answer.starts_with("ok"), "{question}: {answer}");
            }
            // A masked file exists and is empty.
            if question.starts_with("read:") && question != "read:/proc/meminfo" {
                assert!(
                    answer == "ok " || !answer.starts_with("ok"),
                    "{question}: {answer}"
                );
            }
        }
        assert_eq!(said["writable_settings"], "0");
        assert_eq!(said["syslog"], "EPERM");
        assert_eq!(
            said["read:/proc/meminfo"], "ok 4d",
            "control: the rest is read"
        );
    })
    .await;
}
