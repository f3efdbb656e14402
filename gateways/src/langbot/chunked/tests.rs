use box_transports::line::Line;
use box_transports::queue;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

use super::*;

fn framed(lines: impl Connection, limits: &Limits) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
    Box::new(ChunkedConnection::new(Box::new(lines), limits)).split()
}

fn framed_stream(stream: UnixStream, limits: &Limits) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
    let (read, write) = stream.into_split();
    let mut lines = Line::new(read, write, limits);
    lines.skip_non_messages();
    framed(lines, limits)
}

#[tokio::test]
async fn only_long_messages_are_split() {
    let (near, far) = UnixStream::pair().unwrap();
    let (mut send, _keep) = framed_stream(near, &Limits::default());
    let mut lines = BufReader::new(far).lines();
    let message = format!("{{\"x\":\"{}\"}}", "é".repeat(20_000));
    let mut batch = VecDeque::from(["{}".to_owned(), message.clone()]);
    send.send_all(&mut batch).await.unwrap();
    assert_eq!(lines.next_line().await.unwrap().unwrap(), "{}");
    let expected: Vec<String> = Chunks::of(&message).collect();
    assert!(expected.len() > 4);
    for line in expected {
        assert_eq!(lines.next_line().await.unwrap().unwrap(), line);
    }
}

#[tokio::test]
async fn chunks_are_reassembled_between_other_lines() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let mut limits = Limits::default();
    limits.message_bytes = 30_000;
    let (_keep, mut receive) = framed_stream(near, &limits);
    let fits = format!("{{\"x\":\"{}\"}}", "y".repeat(20_000));
    let too_large = format!("{{\"id\":\"{}\"}}", "z".repeat(40_000));
    let mut text = "{}\n".to_owned();
    for message in [&fits, &too_large, &fits] {
        for line in Chunks::of(message) {
            text.extend(["noise\n", &line, "\n"]);
        }
    }
    text.extend([&too_large, "\n[]\n"]);
    let writer = tokio::spawn(async move {
        far.write_all(text.as_bytes()).await.unwrap();
    });
    let mut outcomes = Vec::new();
    loop {
        match receive.receive().await {
            Ok(Some(message)) => outcomes.push(message.len()),
            Ok(None) => break,
            Err(ConnectionError::TooLarge { head, limit }) => {
                assert!(head.starts_with("{\"id\":\"zz"), "{head}");
                outcomes.push(limit + head.len());
            }
            Err(error) => panic!("{error}"),
        }
        while let Some(message) = receive.receive_ready() {
            outcomes.push(message.len());
        }
    }
    assert_eq!(outcomes, [2, fits.len(), 30_512, fits.len(), 30_512, 2]);
    writer.await.unwrap();
}

/// Receives messages from lines that arrive one every five seconds.
///
/// Returns the lengths of the messages, or the error that ended them.
async fn receive_slowly(lines: Vec<String>) -> Result<Vec<usize>, ConnectionError> {
    let (near, far) = queue::pair(1);
    let (_keep, mut receive) = framed(near, &Limits::default());
    let (mut send, _other) = Box::new(far).split();
    let writer = tokio::spawn(async move {
        for line in lines {
            if send.send(line).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    });
    let mut lengths = Vec::new();
    let outcome = loop {
        // The engine also takes messages that have already arrived first.
        let received = match receive.receive_ready() {
            Some(ready) => Ok(Some(ready)),
            None => receive.receive().await,
        };
        match received {
            Ok(Some(message)) => lengths.push(message.len()),
            Ok(None) => break Ok(lengths),
            Err(error) => break Err(error),
        }
    };
    writer.abort();
    outcome
}

#[tokio::test(start_paused = true)]
async fn a_chunked_message_has_one_deadline() {
    let start = r#"{"type": "chunk_start", "total_size": 100}"#.to_owned();
    let chunk = |offset| format!(r#"{{"type": "chunk_data", "data": "x", "offset": {offset}}}"#);
    let lines = std::iter::once(start).chain((0..100).map(chunk));
    let started = Instant::now();
    let outcome = receive_slowly(lines.collect()).await;
    assert!(
        matches!(outcome, Err(ConnectionError::Stalled(_))),
        "{outcome:?}"
    );
    assert_eq!(started.elapsed(), Limits::default().frame);
}

#[tokio::test(start_paused = true)]
async fn each_chunked_message_has_its_own_deadline() {
    let message = format!("{{\"x\":\"{}\"}}", "y".repeat(40_000));
    let lines: Vec<String> = Chunks::of(&message).collect();
    let started = Instant::now();
    let lengths = receive_slowly(vec![lines; 20].concat()).await.unwrap();
    assert_eq!(lengths, [message.len(); 20]);
    assert!(started.elapsed() > Limits::default().frame * 5);
}
