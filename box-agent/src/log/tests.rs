use proptest::prelude::*;

use super::block::Run;
use super::*;

use StreamName::{Stderr, Stdout};

fn stored(bytes: u64) -> Log {
    let store = Store::new(tempfile::tempfile().unwrap().into());
    Log::new(Some(bytes), Some(store))
}

fn all(log: &mut Log, cursor: &mut Cursor) -> Vec<(StreamName, u64, Vec<u8>)> {
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
    let mut log = stored(1 << 20);
    log.take(Stdout, b"one");
    log.take(Stderr, b"two");
    log.take(Stdout, b"three");
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    let expected = [
        (Stdout, 0, b"one".to_vec()),
        (Stderr, 0, b"two".to_vec()),
        (Stdout, 3, b"three".to_vec()),
    ];
    assert_eq!(all(&mut log, &mut cursor), expected);
    log.take(Stderr, b"more");
    assert_eq!(all(&mut log, &mut cursor), [(Stderr, 3, b"more".to_vec())]);
}

#[test]
fn the_oldest_goes_unless_somebody_reads_it() {
    let mut log = stored(4 << 10);
    for _ in 0..100 {
        log.take(Stdout, &[b'x'; 512]);
    }
    assert_eq!(log.size().stdout, 51_200);
    assert_eq!(log.kept_from().stdout, 51_200 - 4096);
    let (mut cursor, told) = begin(&mut log, ReadFrom::default(), View::Bytes);
    assert_eq!(told.raw.stdout, 51_200 - 4096, "the gap is known");
    assert!(!log.has_room(), "the command waits for its reader");
    log.take(Stdout, &[b'y'; 512]);
    assert_eq!(
        log.kept_from().stdout,
        51_200 - 4096,
        "nothing is lost meanwhile"
    );
    let read: usize = all(&mut log, &mut cursor)
        .iter()
        .map(|(.., data)| data.len())
        .sum();
    assert_eq!(read, 4096 + 512);
    assert!(log.has_room());
    let (late, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    log.leave(&cursor);
    log.take(Stdout, &[b'z'; 8192]);
    assert!(!log.has_room(), "another one reads");
    log.leave(&late);
    assert_eq!(log.kept_from().stdout, 51_200 + 512 + 8192 - 4096);
}

#[test]
fn a_reader_that_left_holds_nothing_and_a_stranger_learns_that_it_is_late() {
    let mut log = stored(4 << 10);
    log.take(Stdout, b"abc");
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    log.leave(&cursor);
    for _ in 0..20 {
        log.take(Stdout, &[b'x'; 512]);
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
fn little_of_an_ended_command_stays_in_memory() {
    let mut log = stored(1 << 20);
    log.take(Stdout, &[b'x'; 2000]);
    log.finish();
    assert!(matches!(log.blocks[0].content, Content::Stored(_)));
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    assert_eq!(all(&mut log, &mut cursor)[0].2.len(), 2000);
    let mut small = stored(1 << 20);
    small.take(Stdout, b"little");
    small.finish();
    let Content::Memory { bytes, runs, .. } = &small.blocks[0].content else {
        panic!("little needs no store");
    };
    assert_eq!((bytes.capacity(), runs.capacity()), (6, 1));
}

/// What the log has in memory, about.
fn memory(log: &Log) -> usize {
    let blocks = log.blocks.iter().map(|block| match &block.content {
        Content::Memory { bytes, runs, .. } => {
            bytes.capacity() + runs.capacity() * size_of::<Run>()
        }
        Content::Stored(_) => 0,
    });
    blocks.sum::<usize>() + log.blocks.capacity() * size_of::<Block>()
}

#[test]
fn single_bytes_of_either_stream_take_no_more_memory_than_others() {
    let mut log = stored(1 << 20);
    for _ in 0..1 << 19 {
        log.take(Stdout, b"o");
        log.take(Stderr, b"e");
    }
    assert!(memory(&log) < 512 << 10, "{}", memory(&log));
    assert!(log.kept <= 1 << 20);
    let (mut cursor, told) = begin(&mut log, ReadFrom::default(), View::Bytes);
    let kept = log.size().sum() - told.raw.sum();
    assert!(kept > 80_000, "{kept}");
    let pieces = all(&mut log, &mut cursor);
    assert_eq!(pieces.len() as u64, kept);
    let [.., (Stdout, _, last), (Stderr, end, _)] = &pieces[..] else {
        panic!("the order is another one");
    };
    assert_eq!((&last[..], *end), (&b"o"[..], (1 << 19) - 1));
}

#[test]
fn notes_of_runs_come_back_as_they_were() {
    for run in [(Stdout, 0, 1), (Stderr, 253_402_300_799_999, SEGMENT)] {
        let (stream, at, length) = run;
        let at = UnixMs(at);
        let run = Run { stream, at, length };
        assert_eq!(Run::from_note(&run.noted()), run);
    }
}

#[test]
fn a_full_store_costs_output_and_little_memory() {
    let store = Store::new(tempfile::tempfile().unwrap().into());
    let full: Vec<_> = std::iter::from_fn(|| store.segment(1)).collect();
    let mut log = Log::new(Some(16 << 20), Some(Arc::clone(&store)));
    let flood = |log: &mut Log| {
        for _ in 0..64 {
            log.take(Stdout, &vec![b'x'; 64 << 10]);
        }
    };
    flood(&mut log);
    assert!(memory(&log) <= 512 << 10, "{}", memory(&log));
    assert!(
        log.kept_from().stdout >= (62 * 64) << 10,
        "the loss is told"
    );
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    let mut taken = 0;
    while log.has_room() {
        log.take(Stdout, &vec![b'y'; 64 << 10]);
        taken += 1;
    }
    assert!(taken < 20, "a reader slows it down instead: {taken}");
    assert!(memory(&log) <= 2 << 20, "{}", memory(&log));
    let (size, kept) = (log.size().stdout, log.kept_from().stdout);
    let pieces = all(&mut log, &mut cursor);
    let read: u64 = pieces.iter().map(|(.., data)| data.len() as u64).sum();
    assert_eq!(read, size - kept);
    log.finish();
    assert!(
        log.kept_from().stdout < size,
        "somebody is about to read it"
    );
    log.leave(&cursor);
    assert!(memory(&log) <= 2 << 20, "{}", memory(&log));
    let kept = size - log.kept_from().stdout;
    assert!(kept >= SEGMENT as u64, "the last of it stays: {kept}");
    // With room again, all is kept.
    drop(full);
    let mut log = Log::new(Some(16 << 20), Some(store));
    flood(&mut log);
    assert_eq!(log.kept_from().stdout, 0);
    log.finish();
    assert!(log.is_spooled());
    log.forget();
    assert_eq!(log.kept_from(), log.size());
    assert!(log.read_from(ReadFrom::default(), View::Text).is_some());
}

fn in_store(log: &Log) -> usize {
    let stored = |block: &&Block| matches!(block.content, Content::Stored(_));
    log.blocks.iter().filter(stored).count()
}

#[test]
fn what_is_read_stays_in_memory_until_it_is_settled() {
    let mut log = stored(1 << 20);
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    let block = vec![b'x'; SEGMENT];
    for _ in 0..8 {
        log.take(Stdout, &block);
    }
    assert_eq!((log.held, in_store(&log)), (7, 0));
    assert!(log.is_spooled(), "whoever makes room must know of it");
    assert_eq!(all(&mut log, &mut cursor).len(), 16);
    log.settle();
    assert_eq!((log.held, in_store(&log)), (0, 7));
    // One that is as far behind as may be: what it has read goes without a detour.
    for _ in 0..8 {
        log.take(Stdout, &block);
    }
    for _ in 0..32 {
        while log.has_room() {
            log.take(Stdout, &block);
        }
        log.read(&mut cursor).unwrap().unwrap();
    }
    assert_eq!(in_store(&log), 0);
    log.finish();
    assert_eq!((log.held, log.in_memory), (0, 0), "whoever still reads it");
    assert_eq!(in_store(&log), log.blocks.len());
    let left = all(&mut log, &mut cursor);
    assert!(
        left.iter()
            .all(|(.., data)| data.iter().all(|byte| *byte == b'x'))
    );
    assert_eq!(cursor.at.stdout, log.size().stdout);
}

#[test]
fn an_ended_command_goes_to_the_store_when_there_is_room_again() {
    let store = Store::new(tempfile::tempfile().unwrap().into());
    let mut log = Log::new(None, Some(Arc::clone(&store)));
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    for _ in 0..4 {
        log.take(Stdout, &vec![b'x'; SEGMENT]);
    }
    log.settle();
    let full: Vec<_> = std::iter::from_fn(|| store.segment(1)).collect();
    for _ in 0..4 {
        log.take(Stdout, &vec![b'y'; SEGMENT]);
    }
    log.finish();
    assert!(
        memory(&log) > 4 * SEGMENT,
        "somebody is about to read it, and there is no room"
    );
    drop(full);
    assert_eq!(all(&mut log, &mut cursor).len(), 16);
    log.leave(&cursor);
    assert!(memory(&log) < 4096, "{}", memory(&log));
    assert_eq!(log.kept_from().stdout, 0, "and nothing is lost");
}

#[test]
fn all_logs_together_have_little_in_memory_for_their_readers() {
    let store = Store::new(tempfile::tempfile().unwrap().into());
    let mut logs = [0, 1].map(|_| Log::new(None, Some(Arc::clone(&store))));
    let mut cursors = Vec::new();
    for (number, log) in (b'0'..).zip(&mut logs) {
        cursors.push(begin(log, ReadFrom::default(), View::Bytes).0);
        for _ in 0..12 {
            log.take(Stdout, &vec![number; SEGMENT]);
        }
    }
    assert_eq!(logs.each_ref().map(|log| log.held), [11, 5]);
    for ((number, log), cursor) in (b'0'..).zip(&mut logs).zip(&mut cursors) {
        let read = all(log, cursor);
        assert!(
            read.iter()
                .all(|(.., data)| data.iter().all(|byte| *byte == number))
        );
        assert_eq!(read.len(), 24);
        log.settle();
        assert_eq!(log.held, 0);
    }
}

#[test]
fn without_room_in_the_store_what_was_read_goes() {
    let store = Store::new(tempfile::tempfile().unwrap().into());
    let _full: Vec<_> = std::iter::from_fn(|| store.segment(1)).collect();
    let mut log = Log::new(None, Some(store));
    let (mut cursor, _) = begin(&mut log, ReadFrom::default(), View::Bytes);
    for _ in 0..4 {
        log.take(Stdout, &vec![b'x'; SEGMENT]);
    }
    assert_eq!(all(&mut log, &mut cursor).len(), 8);
    log.settle();
    assert_eq!((log.held, log.blocks.len()), (0, 1));
    assert_eq!(log.kept_from().stdout, 3 * SEGMENT as u64);
}

proptest! {
    /// Whoever reads, however far behind, and whatever room there is: no byte is lost, twice or another one.
    #[test]
    fn readers_get_every_byte_once(
        room in 0..12_usize,
        steps in proptest::collection::vec((0..8_u8, 1..3_000_usize), 1..200),
    ) {
        let store = Store::new(tempfile::tempfile().unwrap().into());
        let _full = store.segment((256 << 20) - room * 4096).unwrap();
        let mut log = Log::new(Some(16 << 10), Some(Arc::clone(&store)));
        let (mut written, mut readers) = (0, VecDeque::new());
        for (step, length) in steps {
            match step {
                0 => readers.push_back(log.read_from(ReadFrom::Tail(length as u64), View::Bytes).unwrap().0),
                1 if length < 1_000 => log.settle(),
                1 => if let Some(cursor) = readers.pop_front() {
                    log.leave(&cursor);
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
                    log.take(Stdout, &bytes);
                },
            }
            let held = log.blocks.iter().filter(|block| block.is_held()).count();
            let open = log.blocks.iter().filter(|block| block.is_in_memory()).count();
            prop_assert_eq!((log.held, log.in_memory), (held, open));
            prop_assert!(held <= 16 && open <= WAITING + 2);
        }
        log.finish();
        for cursor in &readers {
            log.leave(cursor);
        }
        // What the store has no room for stays in memory, if that is little.
        prop_assert!(log.held <= 16 && (log.held == 0 || room < 12));
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
    for (stream, _, data) in all(log, &mut cursor) {
        let at = usize::from(stream == Stderr);
        texts[at].push_str(&decoders[at].decode(&data));
    }
    log.leave(&cursor);
    Some((begin.text, texts))
}

proptest! {
    /// Whatever was dropped and wherever reading begins, each view tells the same bytes at the same offsets.
    #[test]
    fn every_view_of_every_begin_agrees(
        writes in proptest::collection::vec(
            (any::<bool>(), proptest::collection::vec(prop_oneof![any::<u8>(), Just(0xe2), Just(0x82)], 1..200)), 1..60),
        from in 0_u64..8_000,
    ) {
        let mut log = stored(4 << 10);
        let mut written = [Vec::new(), Vec::new()];
        for (second, bytes) in &writes {
            let stream = if *second { Stderr } else { Stdout };
            log.take(stream, bytes);
            written[usize::from(*second)].extend_from_slice(bytes);
        }
        let (size, kept) = (log.size(), log.kept_from());
        prop_assert_eq!([size.stdout, size.stderr].map(|n| usize::try_from(n).unwrap()), [written[0].len(), written[1].len()]);
        let dropped = kept.stdout + kept.stderr;
        prop_assert!(size.stdout + size.stderr - dropped <= 4096);

        // Bytes, from a position over both.
        if let Some((mut cursor, told)) = log.read_from(ReadFrom::Pos(from), View::Bytes) {
            prop_assert!(told.raw.stdout + told.raw.stderr <= from.max(dropped));
            let mut offsets = [told.raw.stdout, told.raw.stderr];
            for (stream, offset, data) in all(&mut log, &mut cursor) {
                let at = usize::from(stream == Stderr);
                prop_assert_eq!(offset, offsets[at]);
                let begin = usize::try_from(offset).unwrap();
                prop_assert_eq!(&data, &written[at][begin..begin + data.len()]);
                offsets[at] += data.len() as u64;
            }
            prop_assert_eq!(offsets, [size.stdout, size.stderr]);
            log.leave(&cursor);
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
    let store = Store::new(full.unwrap().into());
    let mut log = Log::new(Some(1 << 20), Some(Arc::clone(&store)));
    let written: Vec<u8> = (0..300_000_u32).map(|n| (n % 251) as u8).collect();
    for piece in written.chunks(1000) {
        log.take(Stdout, piece);
    }
    log.finish();
    let size = log.size().stdout;
    assert_eq!(size, 300_000, "what is lost is counted");
    let (mut cursor, told) = begin(&mut log, ReadFrom::default(), View::Bytes);
    let kept: Vec<u8> = all(&mut log, &mut cursor)
        .into_iter()
        .flat_map(|(_, _, data)| data)
        .collect();
    assert!(kept.len() >= 32 << 10, "{} bytes are left", kept.len());
    assert_eq!(told.raw.stdout + kept.len() as u64, size);
    assert!(written.ends_with(&kept), "the newest");
    log.leave(&cursor);
    assert!(log.size().stdout == size && log.kept_from().stdout == told.raw.stdout);
    // Many of them take no more memory than blocks may be held, and the room comes back.
    let mut others: Vec<Log> = (0..64)
        .map(|_| {
            let mut other = Log::new(Some(1 << 20), Some(Arc::clone(&store)));
            other.take(Stdout, &written);
            other.finish();
            other
        })
        .collect();
    let in_memory = |log: &Log| log.size().stdout - log.kept_from().stdout;
    let all_of_them: u64 = others.iter().map(in_memory).sum();
    assert!(all_of_them <= 2 << 20, "{all_of_them} bytes");
    others.clear();
    drop(log);
    let mut again = Log::new(Some(1 << 20), Some(store));
    again.take(Stdout, &written);
    again.finish();
    assert!(in_memory(&again) >= 32 << 10);
}
