use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    net::UnixStream,
    time::Instant,
};

use super::*;

fn limits(message_bytes: usize) -> Limits {
    let mut limits = Limits::default();
    limits.message_bytes = message_bytes;
    limits
}

fn over<S>(stream: S, limits: &Limits) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>)
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (read, write) = tokio::io::split(stream);
    Box::new(Line::new(read, write, limits)).split()
}

/// Returns a receiving half over a pipe of `buffer` bytes, and its other end.
fn receiver(buffer: usize, limits: &Limits) -> (LineReceive<DuplexStream>, DuplexStream) {
    let (near, far) = tokio::io::duplex(buffer);
    (
        LineReceive::new(near, limits, ConnectionPermit::default()),
        far,
    )
}

async fn all(receive: &mut dyn ReceiveHalf) -> Vec<Result<String, String>> {
    let mut outcomes = Vec::new();
    loop {
        match receive.receive().await {
            Ok(Some(message)) => outcomes.push(Ok(message)),
            Ok(None) => return outcomes,
            Err(ConnectionError::TooLarge { head, .. }) => {
                outcomes.push(Err(head.trim_end().to_owned()));
            }
            Err(error) => panic!("{error}"),
        }
        while let Some(message) = receive.receive_ready() {
            outcomes.push(Ok(message));
        }
    }
}

#[tokio::test]
async fn lines_survive_every_way_of_splitting_them() {
    let bytes = "{\"a\":1}\n\n\r\n{\"b\":\"é🦀\"}\r\nxxxxxxxxxxxxxxxxxxxxx\n[]\nlast".as_bytes();
    let expected = [
        Ok("{\"a\":1}".to_owned()),
        Ok("{\"b\":\"é🦀\"}".to_owned()),
        Err("xxxxxxxxxxxxxxxxxxxxx".to_owned()),
        Ok("[]".to_owned()),
        Ok("last".to_owned()),
    ];
    for split in 0..bytes.len() {
        let (mut receive, mut far) = receiver(1024, &limits(20));
        let writer = async {
            far.write_all(&bytes[..split]).await.unwrap();
            tokio::task::yield_now().await;
            far.write_all(&bytes[split..]).await.unwrap();
            drop(far);
        };
        let (outcomes, ()) = tokio::join!(all(&mut receive), writer);
        assert_eq!(outcomes, expected, "split at {split}");
    }
    let (mut receive, mut far) = receiver(1, &limits(20));
    let writer = async move { far.write_all(bytes).await.unwrap() };
    let (outcomes, ()) = tokio::join!(all(&mut receive), writer);
    assert_eq!(outcomes, expected, "byte by byte");
}

#[tokio::test]
async fn a_line_of_exactly_the_limit_passes_with_or_without_carriage_return() {
    for end in ["\n", "\r\n", ""] {
        for (length, passes) in [(20, true), (21, false), (22, false)] {
            let (mut receive, mut far) = receiver(1024, &limits(20));
            let line = "x".repeat(length);
            far.write_all(format!("{line}{end}").as_bytes())
                .await
                .unwrap();
            drop(far);
            let expected = if passes { Ok(line) } else { Err(line) };
            assert_eq!(all(&mut receive).await, [expected], "{length} {end:?}");
        }
    }
}

#[tokio::test]
async fn an_endless_line_costs_constant_memory() {
    let (mut receive, mut far) = receiver(64 * 1024, &limits(100_000));
    let writer = async {
        let chunk = vec![b'x'; 64 * 1024];
        for _ in 0..1000 {
            far.write_all(&chunk).await.unwrap();
        }
        far.write_all(b"\n{}\n").await.unwrap();
    };
    let (outcome, ()) = tokio::join!(receive.receive(), writer);
    let Err(ConnectionError::TooLarge { head, limit }) = outcome else {
        panic!("expected TooLarge");
    };
    assert_eq!((head.len(), limit), (512, 100_000));
    assert_eq!(receive.receive().await.unwrap().unwrap(), "{}");
    assert!(
        receive.read_buffer.capacity() <= 300_000,
        "{}",
        receive.read_buffer.capacity()
    );
}

#[tokio::test]
async fn a_lowered_message_limit_applies_until_it_is_raised() {
    let (mut receive, mut far) = receiver(1 << 20, &limits(1 << 20));
    receive.set_message_limit(1000);
    let line = "x".repeat(900_000);
    far.write_all(line.as_bytes()).await.unwrap();
    let waiting = tokio::time::timeout(Duration::from_millis(50), receive.receive());
    assert!(waiting.await.is_err(), "the line has no end yet");
    let kept = receive.read_buffer.capacity();
    assert!(kept <= 100_000, "{kept} bytes for a limit of 1000");
    far.write_all(b"\n").await.unwrap();
    let Err(ConnectionError::TooLarge { limit, .. }) = receive.receive().await else {
        panic!("expected TooLarge");
    };
    assert_eq!(limit, 1000);
    receive.set_message_limit(1 << 20);
    far.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    assert_eq!(receive.receive().await.unwrap().unwrap(), line);
}

#[tokio::test]
async fn an_idle_connection_returns_its_buffer() {
    let (mut receive, mut far) = receiver(1 << 20, &limits(1 << 20));
    let line = "x".repeat(600_000);
    far.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    assert_eq!(receive.receive().await.unwrap().unwrap().len(), line.len());
    let waiting = tokio::time::timeout(Duration::from_millis(1), receive.receive());
    assert!(waiting.await.is_err());
    assert!(
        receive.read_buffer.capacity() <= 4096,
        "{}",
        receive.read_buffer.capacity()
    );
}

#[tokio::test]
async fn bytes_that_are_no_text_arrive_as_replacement_characters() {
    let (mut receive, mut far) = receiver(1024, &limits(100));
    far.write_all(b"a\xff\xfeb\n").await.unwrap();
    assert_eq!(
        receive.receive().await.unwrap().unwrap(),
        "a\u{fffd}\u{fffd}b"
    );
}

#[tokio::test]
async fn lines_that_are_no_messages_are_skipped_and_counted() {
    let text = "hello\n{\"a\":1}\n{half\n half}\n  [1] \n\"x\"\nlonglonglonglonglonglong\n{}\n";
    let (mut receive, mut far) = receiver(1024, &limits(20));
    let skipped_lines = receive.skipped_lines.get_or_insert_default().clone();
    far.write_all(text.as_bytes()).await.unwrap();
    drop(far);
    let messages: Vec<_> = all(&mut receive)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert_eq!(messages, ["{\"a\":1}", "  [1] ", "{}"]);
    assert_eq!(skipped_lines.get(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_line_must_end_in_time_once_started() {
    let (mut receive, mut far) = receiver(1024, &Limits::default());
    let begin = Instant::now();
    far.write_all(b"{").await.unwrap();
    let trickle = tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(7)).await;
            if far.write_all(b" ").await.is_err() {
                return;
            }
        }
    });
    let outcome = receive.receive().await;
    assert!(
        matches!(outcome, Err(ConnectionError::Stalled(_))),
        "{outcome:?}"
    );
    assert_eq!(begin.elapsed().as_secs(), 60);
    trickle.abort();
}

#[tokio::test(start_paused = true)]
async fn each_skipped_line_has_a_separate_timeout() {
    let (mut receive, mut far) = receiver(1 << 20, &Limits::default());
    receive.skipped_lines = Some(SkippedLines::default());
    let log = format!("{}\n", "a log line of a library ".repeat(100)).repeat(50);
    let start = Instant::now();
    let writer = async move {
        for part in (log + "\n{}\n").as_bytes().chunks(1009) {
            far.write_all(part).await.unwrap();
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    };
    let (outcomes, ()) = tokio::join!(all(&mut receive), writer);
    assert_eq!(outcomes, [Ok("{}".to_owned())]);
    assert!(start.elapsed() > Limits::default().frame * 5);
}

#[tokio::test(start_paused = true)]
async fn the_timeout_does_not_run_between_lines() {
    let (mut receive, mut far) = receiver(1024, &Limits::default());
    let writer = async {
        for _ in 0..3 {
            far.write_all(b"{\"x\":").await.unwrap();
            tokio::time::sleep(Duration::from_secs(50)).await;
            far.write_all(b"1}\n").await.unwrap();
            tokio::time::sleep(Duration::from_secs(500)).await;
        }
        drop(far);
    };
    let (outcomes, ()) = tokio::join!(all(&mut receive), writer);
    assert_eq!(outcomes.len(), 3);
}

#[tokio::test]
async fn receiving_is_cancel_safe() {
    let (mut receive, mut far) = receiver(1, &limits(100));
    let writer = tokio::spawn(async move { far.write_all(b"{\"id\":12345}\n").await.unwrap() });
    let message = loop {
        tokio::select! {
            biased;
            message = receive.receive() => break message,
            () = tokio::task::yield_now() => {}
        }
    };
    assert_eq!(message.unwrap().unwrap(), "{\"id\":12345}");
    writer.await.unwrap();
}

#[tokio::test]
async fn batches_arrive_in_order_whatever_the_sizes() {
    let (near, far) = UnixStream::pair().unwrap();
    let (mut send, _keep) = over(near, &Limits::default());
    let (_also, mut receive) = over(far, &Limits::default());
    let messages: Vec<String> = [1, 10, 40_000, 3, 200_000, 0, 1000, 32_768, 5]
        .iter()
        .cycle()
        .take(200)
        .enumerate()
        .map(|(at, length)| format!("{{\"{at}\":\"{}\"}}", "x".repeat(*length)))
        .collect();
    let mut batch: VecDeque<String> = messages.iter().cloned().collect();
    let sending = tokio::spawn(async move {
        send.send_all(&mut batch).await.unwrap();
        send.close().await.unwrap();
        assert!(matches!(
            send.send(String::new()).await,
            Ok(()) | Err(ConnectionError::Closed)
        ));
        assert!(matches!(send.flush().await, Err(ConnectionError::Closed)));
    });
    let outcomes: Vec<_> = all(&mut *receive)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert_eq!(outcomes, messages);
    sending.await.unwrap();
}

#[tokio::test]
async fn a_message_with_line_breaks_stays_one_line() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let (mut send, _keep) = over(near, &Limits::default());
    send.send("{\n\"a\":\n1}".to_owned()).await.unwrap();
    send.flush().await.unwrap();
    let mut bytes = [0; 10];
    far.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"{ \"a\": 1}\n");
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_does_not_read_stalls_the_sender_for_the_frame_limit_only() {
    let (near, _far) = tokio::io::duplex(16);
    let (mut send, _keep) = over(near, &Limits::default());
    let begin = Instant::now();
    let mut batch = VecDeque::from(["x".repeat(1000)]);
    let outcome = send.send_all(&mut batch).await;
    assert!(
        matches!(outcome, Err(ConnectionError::Stalled(_))),
        "{outcome:?}"
    );
    assert_eq!(begin.elapsed().as_secs(), 60);
    send.send("{}".to_owned()).await.unwrap();
    assert!(
        matches!(send.flush().await, Err(ConnectionError::Closed)),
        "a incomplete line is not continued"
    );
}
