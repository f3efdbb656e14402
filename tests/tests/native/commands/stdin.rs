//! Input of commands, and terminals.

use box_protocol::Code;
use box_protocol::error::Detail;
use box_test_wait::LONG;
use serde_json::json;

use super::{attach, input, run, text, with_box};

#[tokio::test]
async fn input_after_the_close_is_refused() {
    with_box(async |machine| {
        let open = json!({"command_id": "cat", "stdin": "open"});
        run(machine, text("cat; echo end", open)).await.unwrap();
        let large = vec![b'x'; 300_000];
        let data = box_protocol::Blob::from(large.clone());
        let reading = attach(machine, "cat", json!({"view": "bytes"}));
        let writing = async {
            assert_eq!(
                input(machine, "cat", json!({"data": data})).await.unwrap(),
                300_000
            );
            input(machine, "cat", json!({"close": true})).await.unwrap();
        };
        let (read, ()) = tokio::join!(reading, writing);
        let (got, info, _) = read.unwrap();
        assert_eq!(got.stdout, [&large[..], b"end\n"].concat());
        assert_eq!(info.exit.unwrap().code, Some(0));
        let error = input(machine, "cat", json!({"data": "eA=="}))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Conflict);
        run(machine, text("sleep 60", json!({"command_id": "deaf"})))
            .await
            .unwrap();
        let error = input(machine, "deaf", json!({"data": "eA=="}))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Conflict);
    })
    .await;
}

#[tokio::test]
async fn input_that_a_command_does_not_read_in_time_is_counted() {
    with_box(async |machine| {
        let script = "until [ -e go ]; do sleep 0.05; done; cat";
        let open = json!({"command_id": "late", "stdin": "open"});
        run(machine, text(script, open)).await.unwrap();
        let all: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
        let data = box_protocol::Blob::from(all.clone());
        let limited = json!({"data": data, "close": true, "wait_ms": 500});
        let error = input(machine, "late", limited).await.unwrap_err();
        assert_eq!(error.code(), Code::Timeout);
        let detail: Detail = error.detail().unwrap();
        let accepted = detail.accepted.unwrap();
        assert!(accepted > 0 && accepted < 300_000, "{accepted}");
        let counted = format!(
            "{accepted} of 300000 bytes were written within 500 ms, and stdin is not closed"
        );
        assert!(error.message().contains(&counted), "{}", error.message());
        // Behind the unread input, nothing is written.
        let error = input(machine, "late", json!({"data": "eA==", "wait_ms": 0})).await;
        assert_eq!(
            error.unwrap_err().detail::<Detail>().unwrap().accepted,
            Some(0)
        );
        // The rest completes the input.
        run(machine, text("touch go", json!({}))).await.unwrap();
        let rest = box_protocol::Blob::from(all[usize::try_from(accepted).unwrap()..].to_vec());
        let writing = input(
            machine,
            "late",
            json!({"data": rest, "close": true, "wait_ms": 120_000}),
        );
        let reading = attach(machine, "late", json!({"view": "bytes"}));
        let (wrote, read) = tokio::join!(writing, reading);
        assert_eq!(wrote.unwrap(), 300_000 - accepted);
        assert!(read.unwrap().0.stdout == all);
    })
    .await;
}

#[tokio::test]
async fn a_background_child_with_open_stdin_does_not_delay_the_exit() {
    with_box(async |machine| {
        // The child has the unread input on another descriptor, because a shell redirects the
        // standard input of background processes.
        let script = "exec 3<&0; sleep 86421 > /dev/null 2>&1 & head -c 10 > /dev/null; exit 4";
        let open = json!({"command_id": "held", "stdin": "open"});
        run(machine, text(script, open)).await.unwrap();
        let data = box_protocol::Blob::from(vec![b'x'; 300_000]);
        let ending = async {
            let writing = input(machine, "held", json!({"data": data}));
            let reading = attach(machine, "held", json!({"view": "none"}));
            tokio::join!(writing, reading)
        };
        let ended = tokio::time::timeout(LONG, ending).await;
        let (wrote, read) = ended.expect("the command seems to run");
        assert_eq!(wrote.unwrap_err().code(), Code::Conflict);
        assert_eq!(read.unwrap().1.exit.unwrap().code, Some(4));
    })
    .await;
}

#[tokio::test]
async fn a_command_can_have_a_terminal() {
    with_box(async |machine| {
        let script = "tty; stty size; read line; echo got $line; trap 'stty size; exit 4' WINCH; echo ready; sleep 600 & wait";
        let pty = json!({"command_id": "t", "pty": {"cols": 91, "rows": 17}});
        run(machine, text(script, pty)).await.unwrap();
        // The output, once it ends with this text.
        let said = async |end: &str| loop {
            let quiet = json!({"until": {"silence_ms": 50}});
            let (got, info, _) = attach(machine, "t", quiet).await.unwrap();
            assert_eq!(info.exit, None, "{:?}", got.text());
            if got.text().ends_with(end) {
                break got;
            }
        };
        assert_eq!(said("91\r\n").await.text(), "/dev/pts/0\r\n17 91\r\n");
        let data = box_protocol::Blob::from("typed\n");
        input(machine, "t", json!({"data": data})).await.unwrap();
        let got = said("ready\r\n").await;
        assert!(got.text().ends_with("got typed\r\nready\r\n"), "{:?}", got.text());
        input(machine, "t", json!({"size": {"cols": 40, "rows": 30}})).await.unwrap();
        let (late, info, _) = attach(machine, "t", json!({})).await.unwrap();
        assert!(late.text().starts_with(got.text()), "replayed for a later reader");
        assert!(late.text().contains("30 40"), "{:?}", late.text());
        assert_eq!(info.exit.unwrap().code, Some(4));
        // The terminal turns Ctrl-C into a signal.
        run(machine, text("cat", json!({"command_id": "i", "pty": {"cols": 80, "rows": 24}}))).await.unwrap();
        input(machine, "i", json!({"data": box_protocol::Blob::from("\x03")})).await.unwrap();
        let (_, info, _) = attach(machine, "i", json!({"view": "none"})).await.unwrap();
        assert_eq!(info.exit.unwrap().signal, Some(2));
        let resize = input(machine, "i", json!({"size": {"cols": 1, "rows": 1}})).await;
        assert_eq!(resize.unwrap_err().code(), Code::Conflict);
    })
    .await;
}
