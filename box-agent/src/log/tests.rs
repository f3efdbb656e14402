use proptest::prelude::*;

use super::block::Span;
use super::*;

use StreamName::{Stderr, Stdout};

fn log_with_file(bytes: u64) -> Log {
    let log_file = LogFile::new(tempfile::tempfile().unwrap().into());
    Log::new(Some(bytes), Some(log_file))
}

fn read_all(log: &mut Log, cursor: &mut Cursor) -> Vec<(StreamName, u64, Vec<u8>)> {
    let mut pieces = Vec::new();
    while let Some(piece) = log.read(cursor).unwrap() {
        pieces.push((piece.stream, piece.offset, piece.data));
    }
    pieces
}

fn begin(log: &mut Log, from: ReadFrom, view: View) -> (Cursor, ReadBegin) {
    log.read_from(from, view).unwrap()
}

#[test]
fn output_comes_in_the_order_it_was_written() {
    let mut log = log_with_file(1 << 20);
    log.append(Stdout, b"one");
    log.append(Stderr, b"two");
    log.append(Stdout, b"three");
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    let expected = [
        (Stdout, 0, b"one".to_vec()),
        (Stderr, 0, b"two".to_vec()),
        (Stdout, 3, b"three".to_vec()),
    ];
    assert_eq!(read_all(&mut log, &mut cursor), expected);
    log.append(Stderr, b"more");
    assert_eq!(
        read_all(&mut log, &mut cursor),
        [(Stderr, 3, b"more".to_vec())]
    );
}

#[test]
fn the_oldest_block_is_dropped_unless_a_reader_needs_it() {
    let mut log = log_with_file(4 << 10);
    for _ in 0..100 {
        log.append(Stdout, &[b'x'; 512]);
    }
    assert_eq!(log.size().stdout, 51_200);
    assert_eq!(log.kept_from().stdout, 51_200 - 4096);
    let (mut cursor, begin_info) = begin(&mut log, ReadFrom::default(), View::Bytes);
    assert_eq!(begin_info.raw.stdout, 51_200 - 4096, "the gap is reported");
    assert!(!log.has_room(), "the command waits for its reader");
    log.append(Stdout, &[b'y'; 512]);
    assert_eq!(
        log.kept_from().stdout,
        51_200 - 4096,
        "no output is lost meanwhile"
    );
    let read: usize = read_all(&mut log, &mut cursor)
        .iter()
        .map(|(.., data)| data.len())
        .sum();
    assert_eq!(read, 4096 + 512);
    assert!(log.has_room());
    let (late, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    log.detach(&cursor);
    log.append(Stdout, &[b'z'; 8192]);
    assert!(!log.has_room(), "another reader needs the blocks");
    log.detach(&late);
    assert_eq!(log.kept_from().stdout, 51_200 + 512 + 8192 - 4096);
}

#[test]
fn a_lost_reader_keeps_blocks_until_its_time_is_over_or_it_attaches_again() {
    let limit = Duration::from_hours(1);
    let mut log = log_with_file(64 << 10);
    log.keep_for_lost(Some(limit));
    log.append(Stdout, &vec![b'x'; 100_000]);
    let (mut cursor, _) = begin(&mut log, ReadFrom::Pos(99_000), View::Bytes);
    read_all(&mut log, &mut cursor);
    log.lose(&cursor);
    assert!(log.lost_until() > Some(Instant::now()));
    // A quarter of the log stays, because pieces on the way to the reader are lost with it.
    while log.has_room() {
        log.append(Stdout, &[b'y'; 1000]);
    }
    let kept = log.kept_from().stdout;
    assert!((70_000..90_000).contains(&kept), "{kept}");
    assert!(log.size().stdout > 130_000);
    // Another reader of the last output does not take its place.
    let (tail, _) = begin(&mut log, ReadFrom::Tail(10), View::Bytes);
    log.detach(&tail);
    assert!(!log.has_room());
    let (again, info) = begin(&mut log, ReadFrom::Pos(90_000), View::Bytes);
    assert!(info.raw.stdout <= 90_000, "nothing is lost");
    assert_eq!(log.lost_until(), None);
    log.detach(&again);
    log.append(Stdout, &vec![b'z'; 1_000_000]);
    assert!(log.has_room(), "a reader that ends keeps nothing");
    // The time is over.
    let (again, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    log.keep_for_lost(Some(Duration::from_nanos(1)));
    log.lose(&again);
    std::thread::sleep(Duration::from_millis(1));
    assert!(log.has_room());
    // By default, a lost reader keeps nothing.
    let (again, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    log.keep_for_lost(None);
    log.lose(&again);
    assert_eq!(log.lost_until(), None);
}

#[test]
fn a_detached_reader_keeps_no_blocks_and_a_start_beyond_the_end_is_refused() {
    let mut log = log_with_file(4 << 10);
    log.append(Stdout, b"abc");
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    log.detach(&cursor);
    for _ in 0..20 {
        log.append(Stdout, &[b'x'; 512]);
    }
    assert!(log.read(&mut cursor).is_err());
    assert!(log.read_from(ReadFrom::Pos(1 << 40), View::Bytes).is_none());
    let offsets = PerStream {
        stdout: 0,
        stderr: 1,
    };
    assert!(
        log.read_from(ReadFrom::Offsets(offsets), View::Bytes)
            .is_none()
    );
}

#[test]
fn only_small_output_of_an_ended_command_stays_in_memory() {
    let mut log = log_with_file(1 << 20);
    log.append(Stdout, &[b'x'; 2000]);
    log.finish();
    assert!(matches!(log.blocks[0].content, Content::Stored(_)));
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    assert_eq!(read_all(&mut log, &mut cursor)[0].2.len(), 2000);
    let mut small = log_with_file(1 << 20);
    small.append(Stdout, b"little");
    small.finish();
    let Content::Memory { bytes, spans, .. } = &small.blocks[0].content else {
        panic!("small output stays in memory");
    };
    assert_eq!((bytes.capacity(), spans.capacity()), (6, 1));
}

/// The memory of the log, approximately.
fn memory(log: &Log) -> usize {
    let blocks = log.blocks.iter().map(|block| match &block.content {
        Content::Memory { bytes, spans, .. } => {
            bytes.capacity() + spans.capacity() * size_of::<Span>()
        }
        Content::Stored(_) => 0,
    });
    blocks.sum::<usize>() + log.blocks.capacity() * size_of::<Block>()
}

#[test]
fn alternating_single_bytes_take_no_more_memory_than_long_writes() {
    let mut log = log_with_file(1 << 20);
    for _ in 0..1 << 19 {
        log.append(Stdout, b"o");
        log.append(Stderr, b"e");
    }
    assert!(memory(&log) < 512 << 10, "{}", memory(&log));
    assert!(log.kept_bytes <= 1 << 20);
    let (mut cursor, begin_info) = begin(&mut log, ReadFrom::default(), View::Bytes);
    let kept = log.size().sum() - begin_info.raw.sum();
    assert!(kept > 80_000, "{kept}");
    let pieces = read_all(&mut log, &mut cursor);
    assert_eq!(pieces.len() as u64, kept);
    let [.., (Stdout, _, last), (Stderr, end, _)] = &pieces[..] else {
        panic!("the order differs");
    };
    assert_eq!((&last[..], *end), (&b"o"[..], (1 << 19) - 1));
}

#[test]
fn encoded_spans_decode_to_the_same_spans() {
    for span in [(Stdout, 0, 1), (Stderr, 253_402_300_799_999, SEGMENT)] {
        let (stream, at, length) = span;
        let at = UnixMs(at);
        let span = Span { stream, at, length };
        assert_eq!(Span::decode(&span.encode()), span);
    }
}

#[test]
fn a_full_log_file_costs_output_and_little_memory() {
    let log_file = LogFile::new(tempfile::tempfile().unwrap().into());
    let full: Vec<_> = std::iter::from_fn(|| log_file.segment(1)).collect();
    let mut log = Log::new(Some(16 << 20), Some(Arc::clone(&log_file)));
    let flood = |log: &mut Log| {
        for _ in 0..64 {
            log.append(Stdout, &vec![b'x'; 64 << 10]);
        }
    };
    flood(&mut log);
    assert!(memory(&log) <= 512 << 10, "{}", memory(&log));
    assert!(
        log.kept_from().stdout >= (62 * 64) << 10,
        "the loss is reported"
    );
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    let mut taken = 0;
    while log.has_room() {
        log.append(Stdout, &vec![b'y'; 64 << 10]);
        taken += 1;
    }
    assert!(taken < 20, "a reader makes the command wait: {taken}");
    assert!(memory(&log) <= 2 << 20, "{}", memory(&log));
    let (size, kept) = (log.size().stdout, log.kept_from().stdout);
    let pieces = read_all(&mut log, &mut cursor);
    let read: u64 = pieces.iter().map(|(.., data)| data.len() as u64).sum();
    assert_eq!(read, size - kept);
    log.finish();
    assert!(log.kept_from().stdout < size, "a reader needs it");
    log.detach(&cursor);
    assert!(memory(&log) <= 2 << 20, "{}", memory(&log));
    let kept = size - log.kept_from().stdout;
    assert!(kept >= SEGMENT as u64, "the last block stays: {kept}");
    // With free space again, everything is kept.
    drop(full);
    let mut log = Log::new(Some(16 << 20), Some(log_file));
    flood(&mut log);
    assert_eq!(log.kept_from().stdout, 0);
    log.finish();
    assert!(log.has_stored());
    log.drop_unneeded();
    assert_eq!(log.kept_from(), log.size());
    assert!(log.read_from(ReadFrom::default(), View::Text).is_some());
}

fn stored_blocks(log: &Log) -> usize {
    let stored = |block: &&Block| matches!(block.content, Content::Stored(_));
    log.blocks.iter().filter(stored).count()
}

#[test]
fn blocks_that_are_read_stay_buffered_until_they_are_flushed() {
    let mut log = log_with_file(1 << 20);
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    let block = vec![b'x'; SEGMENT];
    for _ in 0..8 {
        log.append(Stdout, &block);
    }
    assert_eq!((log.buffered, stored_blocks(&log)), (7, 0));
    assert!(
        log.has_stored(),
        "the log is a candidate for dropping output"
    );
    assert_eq!(read_all(&mut log, &mut cursor).len(), 16);
    log.flush_buffered();
    assert_eq!((log.buffered, stored_blocks(&log)), (0, 7));
    // A reader as far behind as possible: blocks it has read are dropped without reaching the file.
    for _ in 0..8 {
        log.append(Stdout, &block);
    }
    for _ in 0..32 {
        while log.has_room() {
            log.append(Stdout, &block);
        }
        log.read(&mut cursor).unwrap().unwrap();
    }
    assert_eq!(stored_blocks(&log), 0);
    log.finish();
    assert_eq!(
        (log.buffered, log.in_memory),
        (0, 0),
        "also while a reader is attached"
    );
    assert_eq!(stored_blocks(&log), log.blocks.len());
    let left = read_all(&mut log, &mut cursor);
    assert!(
        left.iter()
            .all(|(.., data)| data.iter().all(|byte| *byte == b'x'))
    );
    assert_eq!(cursor.at.stdout, log.size().stdout);
}

#[test]
fn an_ended_command_moves_to_the_file_when_it_has_room_again() {
    let log_file = LogFile::new(tempfile::tempfile().unwrap().into());
    let mut log = Log::new(None, Some(Arc::clone(&log_file)));
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    for _ in 0..4 {
        log.append(Stdout, &vec![b'x'; SEGMENT]);
    }
    log.flush_buffered();
    let full: Vec<_> = std::iter::from_fn(|| log_file.segment(1)).collect();
    for _ in 0..4 {
        log.append(Stdout, &vec![b'y'; SEGMENT]);
    }
    log.finish();
    assert!(
        memory(&log) > 4 * SEGMENT,
        "a reader needs it and the file is full"
    );
    drop(full);
    assert_eq!(read_all(&mut log, &mut cursor).len(), 16);
    log.detach(&cursor);
    assert!(memory(&log) < 4096, "{}", memory(&log));
    assert_eq!(log.kept_from().stdout, 0, "no output is lost");
}

#[test]
fn the_limit_on_buffered_blocks_holds_over_all_logs() {
    let log_file = LogFile::new(tempfile::tempfile().unwrap().into());
    let mut logs = [0, 1].map(|_| Log::new(None, Some(Arc::clone(&log_file))));
    let mut cursors = Vec::new();
    for (number, log) in (b'0'..).zip(&mut logs) {
        cursors.push(begin(log, ReadFrom::default(), View::Bytes).0);
        for _ in 0..12 {
            log.append(Stdout, &vec![number; SEGMENT]);
        }
    }
    assert_eq!(logs.each_ref().map(|log| log.buffered), [11, 5]);
    for ((number, log), cursor) in (b'0'..).zip(&mut logs).zip(&mut cursors) {
        let read = read_all(log, cursor);
        assert!(
            read.iter()
                .all(|(.., data)| data.iter().all(|byte| *byte == number))
        );
        assert_eq!(read.len(), 24);
        log.flush_buffered();
        assert_eq!(log.buffered, 0);
    }
}

#[test]
fn blocks_that_were_read_are_dropped_if_the_file_is_full() {
    let log_file = LogFile::new(tempfile::tempfile().unwrap().into());
    let _full: Vec<_> = std::iter::from_fn(|| log_file.segment(1)).collect();
    let mut log = Log::new(None, Some(log_file));
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    for _ in 0..4 {
        log.append(Stdout, &vec![b'x'; SEGMENT]);
    }
    assert_eq!(read_all(&mut log, &mut cursor).len(), 8);
    log.flush_buffered();
    assert_eq!((log.buffered, log.blocks.len()), (0, 1));
    assert_eq!(log.kept_from().stdout, 3 * SEGMENT as u64);
}

proptest! {
    /// Each reader gets every byte exactly once, at any distance and free space.
    #[test]
    fn readers_get_every_byte_once(
        room in 0..12_usize,
        steps in proptest::collection::vec((0..8_u8, 1..3_000_usize), 1..200),
    ) {
        let log_file = LogFile::new(tempfile::tempfile().unwrap().into());
        let _full = log_file.segment((256 << 20) - room * 4096).unwrap();
        let mut log = Log::new(Some(16 << 10), Some(Arc::clone(&log_file)));
        let (mut written, mut readers) = (0, VecDeque::new());
        for (step, length) in steps {
            match step {
                0 => readers.push_back(log.read_from(ReadFrom::Tail(length as u64), View::Bytes).unwrap().0),
                1 if length < 1_000 => log.flush_buffered(),
                1 => if let Some(cursor) = readers.pop_front() {
                    log.detach(&cursor);
                },
                2..5 => if let Some(mut cursor) = readers.pop_front() {
                    for _ in 0..length / 500 {
                        let next = cursor.at.stdout;
                        let Some(piece) = log.read(&mut cursor).unwrap() else {
                            prop_assert_eq!(next, log.size().stdout);
                            break;
                        };
                        prop_assert_eq!(piece.offset, next);
                        for (at, byte) in (next..).zip(piece.data) {
                            prop_assert_eq!(u64::from(byte), at % 251);
                        }
                    }
                    readers.push_back(cursor);
                },
                _ => if log.has_room() {
                    let bytes: Vec<u8> = (written..).take(length).map(|at| (at % 251) as u8).collect();
                    written += length as u64;
                    log.append(Stdout, &bytes);
                },
            }
            let buffered = log.blocks.iter().filter(|block| block.is_buffered()).count();
            let open = log.blocks.iter().filter(|block| block.is_in_memory()).count();
            prop_assert_eq!((log.buffered, log.in_memory), (buffered, open));
            prop_assert!(buffered <= 16 && open <= MEMORY_BLOCKS + 2);
        }
        log.finish();
        for cursor in &readers {
            log.detach(cursor);
        }
        // A few blocks that do not fit into the file stay in memory.
        prop_assert!(log.buffered <= 16 && (log.buffered == 0 || room < 12));
    }
}

fn text_of(log: &mut Log, from: ReadFrom) -> Option<(PerStream, [String; 2])> {
    let (mut cursor, begin) = log.read_from(from, View::Text)?;
    let decoder = |pending: &[u8]| TextDecoder::resume(pending).unwrap();
    let mut decoders = [
        decoder(&begin.pending.stdout),
        decoder(&begin.pending.stderr),
    ];
    let mut texts = [String::new(), String::new()];
    for (stream, _, data) in read_all(log, &mut cursor) {
        let at = usize::from(stream == Stderr);
        texts[at].push_str(&decoders[at].decode(&data));
    }
    log.detach(&cursor);
    Some((begin.text, texts))
}

proptest! {
    /// Every view returns the same bytes at the same offsets, wherever reading begins.
    #[test]
    fn all_views_agree_from_every_start(
        writes in proptest::collection::vec(
            (any::<bool>(), proptest::collection::vec(prop_oneof![any::<u8>(), Just(0xe2), Just(0x82)], 1..200)), 1..60),
        from in 0_u64..8_000,
    ) {
        let mut log = log_with_file(4 << 10);
        let mut written = [Vec::new(), Vec::new()];
        for (second, bytes) in &writes {
            let stream = if *second { Stderr } else { Stdout };
            log.append(stream, bytes);
            written[usize::from(*second)].extend_from_slice(bytes);
        }
        let (size, kept) = (log.size(), log.kept_from());
        prop_assert_eq!([size.stdout, size.stderr].map(|n| usize::try_from(n).unwrap()), [written[0].len(), written[1].len()]);
        let dropped = kept.stdout + kept.stderr;
        prop_assert!(size.stdout + size.stderr - dropped <= 4096);

        // Bytes, from a position over both streams.
        if let Some((mut cursor, begin_info)) = log.read_from(ReadFrom::Pos(from), View::Bytes) {
            prop_assert!(begin_info.raw.stdout + begin_info.raw.stderr <= from.max(dropped));
            let mut offsets = [begin_info.raw.stdout, begin_info.raw.stderr];
            for (stream, offset, data) in read_all(&mut log, &mut cursor) {
                let at = usize::from(stream == Stderr);
                prop_assert_eq!(offset, offsets[at]);
                let begin = usize::try_from(offset).unwrap();
                prop_assert_eq!(&data, &written[at][begin..begin + data.len()]);
                offsets[at] += data.len() as u64;
            }
            prop_assert_eq!(offsets, [size.stdout, size.stderr]);
            log.detach(&cursor);
        } else {
            prop_assert!(from > size.stdout + size.stderr);
        }

        // Text, from an offset of one stream.
        let whole = written.clone().map(|bytes| {
            let mut decoder = TextDecoder::default();
            decoder.decode(&bytes)
        });
        let offsets = ReadFrom::Offsets(PerStream { stdout: from.min(whole[0].len() as u64), stderr: 0 });
        let (begin, texts) = text_of(&mut log, offsets).unwrap();
        for (at, begin) in [begin.stdout, begin.stderr].into_iter().enumerate() {
            let begin = usize::try_from(begin).unwrap();
            prop_assert_eq!(&texts[at], &whole[at][begin..]);
        }
    }
}

#[test]
fn on_a_full_disk_the_last_output_stays_in_memory_and_the_rest_is_counted() {
    let mut options = std::fs::File::options();
    let full = options.read(true).write(true).open("/dev/full");
    let log_file = LogFile::new(full.unwrap().into());
    let mut log = Log::new(Some(1 << 20), Some(Arc::clone(&log_file)));
    let written: Vec<u8> = (0..300_000_u32).map(|n| (n % 251) as u8).collect();
    for piece in written.chunks(1000) {
        log.append(Stdout, piece);
    }
    log.finish();
    let size = log.size().stdout;
    assert_eq!(size, 300_000, "lost output is counted");
    let (mut cursor, begin_info) = begin(&mut log, ReadFrom::default(), View::Bytes);
    let kept: Vec<u8> = read_all(&mut log, &mut cursor)
        .into_iter()
        .flat_map(|(_, _, data)| data)
        .collect();
    assert!(kept.len() >= 32 << 10, "{} bytes are left", kept.len());
    assert_eq!(begin_info.raw.stdout + kept.len() as u64, size);
    assert!(written.ends_with(&kept), "the newest bytes are kept");
    log.detach(&cursor);
    assert!(log.size().stdout == size && log.kept_from().stdout == begin_info.raw.stdout);
    // Many logs stay within the limit on buffered blocks, and ended logs free their share.
    let mut others: Vec<Log> = (0..64)
        .map(|_| {
            let mut other = Log::new(Some(1 << 20), Some(Arc::clone(&log_file)));
            other.append(Stdout, &written);
            other.finish();
            other
        })
        .collect();
    let in_memory = |log: &Log| log.size().stdout - log.kept_from().stdout;
    let all_of_them: u64 = others.iter().map(in_memory).sum();
    assert!(all_of_them <= 2 << 20, "{all_of_them} bytes");
    others.clear();
    drop(log);
    let mut again = Log::new(Some(1 << 20), Some(log_file));
    again.append(Stdout, &written);
    again.finish();
    assert!(in_memory(&again) >= 32 << 10);
}
