use box_transports::line::Line;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

use super::*;

fn framed(lines: impl Connection, limits: &Limits) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
    Box::new(InPieces::over(Box::new(lines), limits)).split()
}

fn over(stream: UnixStream, limits: &Limits) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
    let (read, write) = stream.into_split();
    let mut lines = Line::new(read, write, limits);
    lines.skip_non_messages();
    framed(lines, limits)
}

#[tokio::test]
async fn long_messages_go_in_pieces_and_short_ones_do_not() {
    let (near, far) = UnixStream::pair().unwrap();
    let (mut send, _keep) = over(near, &Limits::default());
    let mut lines = BufReader::new(far).lines();
    let message = format!("{{\"x\":\"{}\"}}", "é".repeat(20_000));
    let mut batch = VecDeque::from(["{}".to_owned(), message.clone()]);
    send.send_all(&mut batch).await.unwrap();
    assert_eq!(lines.next_line().await.unwrap().unwrap(), "{}");
    let expected: Vec<String> = Pieces::of(&message).collect();
    assert!(expected.len() > 4);
    for line in expected {
        assert_eq!(lines.next_line().await.unwrap().unwrap(), line);
    }
}

#[tokio::test]
async fn pieces_are_understood_between_plain_messages_and_noise() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let mut limits = Limits::default();
    limits.message_bytes = 30_000;
    let (_keep, mut receive) = over(near, &limits);
    let fits = format!("{{\"x\":\"{}\"}}", "y".repeat(20_000));
    let too_large = format!("{{\"id\":\"{}\"}}", "z".repeat(40_000));
    let mut text = "{}\n".to_owned();
    for message in [&fits, &too_large, &fits] {
        for line in Pieces::of(message) {
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

#[tokio::test(start_paused = true)]
async fn a_message_in_pieces_must_end_in_time_as_a_whole() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let (_keep, mut receive) = over(near, &Limits::default());
    let writer = tokio::spawn(async move {
        far.write_all(b"{\"type\": \"chunk_start\", \"total_size\": 100}\n")
            .await
            .unwrap();
        for offset in 0..100 {
            let line =
                format!("{{\"type\": \"chunk_data\", \"data\": \"x\", \"offset\": {offset}}}\n");
            if far.write_all(line.as_bytes()).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    });
    let outcome = receive.receive().await;
    assert!(
        matches!(outcome, Err(ConnectionError::Stalled(_))),
        "{outcome:?}"
    );
    writer.abort();
}

/// Reads `text` with `bytes` of it arriving every five seconds.
///
/// Returns the lengths of the messages, or the error that ended them.
async fn trickled(text: String, bytes: usize) -> Result<Vec<usize>, ConnectionError> {
    let (near, mut far) = tokio::io::duplex(1 << 20);
    let mut lines = Line::new(near, tokio::io::sink(), &Limits::default());
    lines.skip_non_messages();
    let (_keep, mut receive) = framed(lines, &Limits::default());
    let writer = async move {
        for part in text.as_bytes().chunks(bytes) {
            far.write_all(part).await.unwrap();
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    };
    let reader = async {
        let mut lengths = Vec::new();
        loop {
            // The engine also takes messages that have already arrived first.
            let received = match receive.receive_ready() {
                Some(ready) => Ok(Some(ready)),
                None => receive.receive().await,
            };
            match received {
                Ok(Some(message)) => lengths.push(message.len()),
                Ok(None) => return Ok(lengths),
                Err(error) => return Err(error),
            }
        }
    };
    tokio::select! {
        outcome = reader => outcome,
        () = async { writer.await; std::future::pending().await } => unreachable!(),
    }
}

fn in_lines(pieces: Pieces<'_>) -> String {
    pieces.map(|line| line + "\n").collect()
}

#[tokio::test(start_paused = true)]
async fn each_of_many_messages_in_pieces_has_its_own_time() {
    let message = format!("{{\"x\":\"{}\"}}", "y".repeat(40_000));
    let text = in_lines(Pieces::of(&message)).repeat(20);
    let begun = tokio::time::Instant::now();
    let lengths = trickled(text, 10_007).await.unwrap();
    assert_eq!(lengths, [message.len(); 20]);
    assert!(begun.elapsed() > Limits::default().frame * 5);
}

#[tokio::test(start_paused = true)]
async fn noise_gives_a_message_in_pieces_no_more_time() {
    let message = format!("{{\"x\":\"{}\"}}", "y".repeat(40_000));
    let mut lines = Pieces::of(&message).map(|line| line + "\n");
    let start = lines.next().unwrap();
    let rest: String = lines.collect();
    let text = start + &"a log that says nothing\n".repeat(1000) + &rest;
    let begun = tokio::time::Instant::now();
    let outcome = trickled(text, 1009).await;
    assert!(
        matches!(outcome, Err(ConnectionError::Stalled(_))),
        "{outcome:?}"
    );
    assert_eq!(begun.elapsed(), Limits::default().frame);
}
