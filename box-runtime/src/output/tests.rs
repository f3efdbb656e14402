use box_protocol::actions::Collected;

use super::*;

use StreamName::{Stderr, Stdout};

fn bytes(stream: StreamName, offset: u64, data: &[u8]) -> AgentChunk {
    AgentChunk::Bytes(OutputPiece {
        stream,
        offset,
        pos: 0,
        at: UnixMs::now(),
        data: data.to_vec().into(),
    })
}

/// Returns offset, position and data of each chunk that a reader gets.
fn converted(output_view: &mut OutputView, chunk: AgentChunk) -> Vec<(u64, u64, String)> {
    let (Converted::Output(chunks) | Converted::Enough(chunks)) =
        output_view.convert(chunk).unwrap()
    else {
        panic!("no output")
    };
    let short = |chunk: CommandChunk| match chunk {
        CommandChunk::Text(piece) => (piece.offset, piece.pos, piece.data),
        CommandChunk::Bytes(piece) => {
            let data = String::from_utf8_lossy(&piece.data).into_owned();
            (piece.offset, piece.pos, data)
        }
        CommandChunk::Gap(gap) => (gap.offset, gap.bytes, format!("gap {:?}", gap.stream)),
        other => panic!("{other:?}"),
    };
    chunks.into_iter().map(short).collect()
}

fn begin(raw: (u64, u64), text: (u64, u64), pending: &[u8]) -> AgentChunk {
    let both = |(stdout, stderr)| PerStream { stdout, stderr };
    AgentChunk::Begin(ReadBegin {
        raw: both(raw),
        text: both(text),
        pending: Collected {
            stdout: pending.to_vec().into(),
            ..Collected::default()
        },
        raw_end: both((1000, 1000)),
        text_end: both((1000, 1000)),
    })
}

fn piece(offset: u64, pos: u64, data: &str) -> (u64, u64, String) {
    (offset, pos, data.to_owned())
}

#[test]
fn reading_begins_at_the_requested_offset_of_each_stream() {
    let from = ReadFrom::Offsets(PerStream {
        stdout: 12,
        stderr: 3,
    });
    let mut output_view = OutputView::new(View::Bytes, from, None, None);
    assert_eq!(converted(&mut output_view, begin((10, 0), (0, 0), b"")), []);
    assert_eq!(converted(&mut output_view, bytes(Stderr, 0, b"ab")), []);
    assert_eq!(
        converted(&mut output_view, bytes(Stdout, 10, b"0123")),
        [piece(12, 14, "23")]
    );
    assert_eq!(
        converted(&mut output_view, bytes(Stderr, 2, b"cd")),
        [piece(3, 17, "d")]
    );
    let end = output_view.end(ReadWhy::Time);
    assert_eq!(
        (end.next, end.pos),
        (
            PerStream {
                stdout: 14,
                stderr: 4
            },
            18
        )
    );
}

#[test]
fn lost_output_is_reported_as_a_gap() {
    let from = ReadFrom::Offsets(PerStream {
        stdout: 4,
        stderr: 0,
    });
    let mut output_view = OutputView::new(View::Bytes, from, None, None);
    let gaps = converted(&mut output_view, begin((10, 2), (0, 0), b""));
    assert_eq!(gaps, [piece(4, 6, "gap Stdout"), piece(0, 2, "gap Stderr")]);
    assert_eq!(
        converted(&mut output_view, bytes(Stdout, 10, b"x")),
        [piece(10, 12, "x")]
    );
    let end = output_view.end(ReadWhy::Exit);
    assert_eq!(
        end.dropped,
        PerStream {
            stdout: 6,
            stderr: 2
        }
    );
    assert_eq!(
        end.next,
        PerStream {
            stdout: 11,
            stderr: 2
        }
    );
    let mut by_position = OutputView::new(View::Bytes, ReadFrom::Pos(5), None, None);
    let gaps = converted(&mut by_position, begin((10, 2), (0, 0), b""));
    assert_eq!(gaps, [piece(3, 7, "gap Stdout")]);
}

#[test]
fn a_start_inside_a_character_takes_nothing_from_the_wanted_bytes() {
    let from = ReadFrom::Offsets(PerStream {
        stdout: 1,
        stderr: 0,
    });
    let read = |pieces: &[&[u8]]| {
        let mut output_view = OutputView::new(View::Text, from, Some(3), None);
        let (mut text, mut offset) = (String::new(), 0);
        for piece in pieces {
            for (_, _, data) in converted(&mut output_view, bytes(Stdout, offset, piece)) {
                text.push_str(&data);
            }
            offset += piece.len() as u64;
        }
        (text, output_view.end(ReadWhy::Bytes).next.stdout)
    };
    let whole = "éaéb".as_bytes();
    assert_eq!(read(&[whole]), ("aé".to_owned(), 5));
    assert_eq!(read(&[&whole[..2], &whole[2..]]), ("aé".to_owned(), 5));
}

#[test]
fn the_text_view_counts_text_bytes_and_never_splits_a_character() {
    // Three invalid bytes came before, which the text view counts as nine bytes.
    let from = ReadFrom::Offsets(PerStream {
        stdout: 10,
        stderr: 0,
    });
    let mut output_view = OutputView::new(View::Text, from, None, None);
    assert_eq!(
        converted(&mut output_view, begin((5, 0), (9, 0), &[0xe2, 0x82])),
        []
    );
    let first = converted(&mut output_view, bytes(Stdout, 5, &[0xac, b'a', 0xf0]));
    // The reader's offset is inside a character, which is skipped as a whole.
    assert_eq!(first, [piece(12, 12, "a")]);
    assert_eq!(converted(&mut output_view, bytes(Stdout, 8, &[0x9f])), []);
    let rest: Vec<_> = output_view.finish();
    assert!(
        matches!(&rest[..], [CommandChunk::Text(piece)] if piece.data == "\u{fffd}" && piece.offset == 13)
    );
    assert_eq!(output_view.end(ReadWhy::Exit).next.stdout, 16);
}

#[test]
fn a_reader_gets_at_most_its_limit_and_can_continue() {
    let mut output_view = OutputView::new(View::Text, ReadFrom::default(), Some(4), None);
    assert_eq!(
        converted(&mut output_view, bytes(Stdout, 0, b"ab")),
        [piece(0, 0, "ab")]
    );
    let chunk = bytes(Stdout, 2, "céd".as_bytes());
    assert!(
        matches!(output_view.convert(chunk).unwrap(), Converted::Enough(chunks) if chunks.len() == 1)
    );
    let end = output_view.end(ReadWhy::Bytes);
    assert_eq!(
        (end.next.stdout, end.pos),
        (3, 3),
        "é does not fit and comes next time"
    );
    let from = ReadFrom::Offsets(end.next);
    let mut again = OutputView::new(View::Text, from, None, None);
    assert_eq!(
        converted(&mut again, bytes(Stdout, 0, "abcéd".as_bytes())),
        [piece(3, 3, "éd")]
    );
}

#[test]
fn a_tail_reads_the_bytes_before_the_end() {
    let mut output_view = OutputView::new(View::Bytes, ReadFrom::Tail(3), None, None);
    assert_eq!(
        converted(&mut output_view, begin((996, 1000), (0, 0), b"")),
        []
    );
    assert_eq!(
        converted(&mut output_view, bytes(Stdout, 996, b"abcd")),
        [piece(997, 1997, "bcd")]
    );
}

#[test]
fn invalid_chunks_are_refused() {
    let odd = |chunks: Vec<AgentChunk>| {
        let mut output_view = OutputView::new(View::Text, ReadFrom::default(), None, None);
        chunks
            .into_iter()
            .any(|chunk| output_view.convert(chunk).is_err())
    };
    assert!(!odd(vec![bytes(Stdout, 0, b"a"), bytes(Stdout, 1, b"b")]));
    assert!(odd(vec![bytes(Stdout, 0, b"a"), bytes(Stdout, 0, b"b")]));
    assert!(odd(vec![bytes(Stdout, 0, &[0; MAX_CHUNK_BYTES + 1])]));
    assert!(odd(vec![
        bytes(Stdout, 0, b"a"),
        begin((0, 0), (0, 0), b"")
    ]));
    assert!(odd(vec![begin((0, 0), (0, 0), b"a")]));
    let in_slot = |bytes| {
        AgentChunk::InSlot(SlotPiece {
            at: UnixMs::now(),
            stream: Stdout,
            offset: 0,
            bytes,
        })
    };
    assert!(odd(vec![in_slot(1)]), "there is no slot");
    assert!(odd(vec![in_slot(u64::MAX)]));
}

#[test]
fn impossible_offsets_are_refused() {
    for (raw, text) in [
        ((u64::MAX - 1, 0), (0, 0)),
        ((0, u64::MAX), (0, 0)),
        ((0, 0), (u64::MAX - 1, 0)),
        ((u64::MAX / 2, u64::MAX / 2 + 2), (0, 0)),
    ] {
        for view in [View::Bytes, View::Text] {
            let mut output_view = OutputView::new(view, ReadFrom::default(), None, None);
            assert!(
                output_view.convert(begin(raw, text, b"")).is_err(),
                "{raw:?}"
            );
        }
    }
    // Control: a large offset within the limit is accepted.
    let mut output_view = OutputView::new(View::Bytes, ReadFrom::Tail(9), None, None);
    assert!(
        output_view
            .convert(begin((1 << 50, 0), (0, 0), b""))
            .is_ok()
    );
}

#[test]
fn a_reader_that_wants_nothing_stops_at_its_start_however_the_output_is_split() {
    let read = |pieces: usize| {
        let mut view = OutputView::new(View::Bytes, ReadFrom::Pos(3), Some(0), None);
        for (number, part) in b"abcde".chunks(pieces).enumerate() {
            let chunk = bytes(Stderr, (number * pieces) as u64, part);
            if let Converted::Enough(_) = view.convert(chunk).unwrap() {
                break;
            }
        }
        let end = view.end(ReadWhy::Exit);
        (end.next, end.pos)
    };
    let at_start = PerStream {
        stdout: 0,
        stderr: 3,
    };
    for pieces in [1, 2, 3, 5] {
        assert_eq!(read(pieces), (at_start, 3), "in pieces of {pieces}");
    }
}
