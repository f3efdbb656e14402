//! Decodes a layer: compression, both digests and limits.
//!
//! One thread decodes and computes digests while another reads the archive, because both are busy all the time.

use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use flate2::bufread::MultiGzDecoder;
use zstd::stream::read::Decoder as ZstdDecoder;

use crate::digest::{Digest, Hashing};
use crate::error::{Error, Result};
use crate::limits::RATIO_FREE;

/// Size of a decoded piece.
const PIECE: usize = 256 << 10;
/// Decoded pieces that wait for the archive's reader.
const PIECES: usize = 8;

/// What a layer turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Decoded {
    /// Digest of the compressed bytes.
    pub(crate) digest: Digest,
    pub(crate) compressed_bytes: u64,
    /// Digest of the archive.
    pub(crate) diff_id: Digest,
    pub(crate) archive_bytes: u64,
}

/// Limits of one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerLimits {
    pub(crate) compressed_bytes: u64,
    pub(crate) decoded_bytes: u64,
    pub(crate) ratio: u64,
}

/// Decodes a source, and passes its archive to `apply`.
///
/// The digests are known only at the end, so the caller must not use the result of `apply` before it has compared them.
pub(crate) fn decode<S, T>(
    source: S,
    limits: LayerLimits,
    apply: impl FnOnce(&mut Pieces) -> Result<T>,
) -> Result<(Decoded, T)>
where
    S: Read + Send,
{
    thread::scope(|scope| {
        let (sender, receiver) = sync_channel(PIECES);
        let thread = thread::Builder::new().name("image-decoder".to_owned());
        let decoder = thread
            .spawn_scoped(scope, move || send_pieces(source, limits, &sender))
            .map_err(|error| Error::io("decoder", &error))?;
        let mut pieces = Pieces {
            receiver,
            piece: Vec::new(),
            used: 0,
        };
        // Bytes behind the end of the archive belong to its digest.
        let applied = apply(&mut pieces).and_then(|applied| {
            io::copy(&mut pieces, &mut io::sink()).map_err(|error| Error::io("layer", &error))?;
            Ok(applied)
        });
        drop(pieces);
        let joined = decoder.join();
        // A decoder that lost its reader fails too; the reader's error is the cause.
        let applied = applied?;
        Ok((joined.unwrap_or_else(|_| Err(Error::lost()))?, applied))
    })
}

/// Decodes everything; an error is also sent to the reader.
fn send_pieces(
    source: impl Read,
    limits: LayerLimits,
    sender: &SyncSender<io::Result<Vec<u8>>>,
) -> Result<Decoded> {
    let result = decode_pieces(source, limits, sender);
    if let Err(error) = &result {
        let _ = sender.send(Err(error.clone().into()));
    }
    result
}

fn decode_pieces(
    source: impl Read,
    limits: LayerLimits,
    sender: &SyncSender<io::Result<Vec<u8>>>,
) -> Result<Decoded> {
    let limited = Limited {
        inner: source,
        left: limits.compressed_bytes,
        max: limits.compressed_bytes,
    };
    let mut decoder = Hashing::new(Decoder::new(Hashing::new(limited))?);
    loop {
        let mut piece = vec![0; PIECE];
        let filled = fill(&mut decoder, &mut piece).map_err(|error| undecodable(&error))?;
        piece.truncate(filled);
        let count = decoder.count();
        if count > limits.decoded_bytes {
            return Err(Error::too_large(
                "layer",
                "decoded_bytes",
                limits.decoded_bytes,
            ));
        }
        let compressed = decoder.get_ref().compressed_bytes();
        if count > RATIO_FREE && count / limits.ratio.max(1) > compressed {
            return Err(Error::too_large("layer", "ratio", limits.ratio));
        }
        if filled == 0 {
            break;
        }
        if sender.send(Ok(piece)).is_err() {
            return Err(Error::Cancelled);
        }
    }
    let (decoder, diff_id, archive_bytes) = decoder.into_parts();
    let mut source = decoder.into_source();
    // Bytes behind the compressed content belong to its digest.
    io::copy(&mut source, &mut io::sink()).map_err(|error| Error::io("layer", &error))?;
    let (digest, compressed_bytes) = source.finish();
    Ok(Decoded {
        digest,
        compressed_bytes,
        diff_id,
        archive_bytes,
    })
}

/// Reads until the buffer is full or the source ends.
fn fill(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match source.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn undecodable(error: &io::Error) -> Error {
    match Error::io("layer", error) {
        // Anything but an error of ours or of the disk is a fault of the content.
        Error::Storage(_) if error.raw_os_error().is_none() => {
            Error::corrupt("layer: it cannot be decompressed; push or export the image again")
        }
        error => error,
    }
}

type Source<R> = BufReader<Chain<Cursor<Vec<u8>>, Counting<R>>>;

/// Decoder of one of the supported compressions, found by the first bytes.
enum Decoder<R: Read> {
    Plain(Box<Source<R>>),
    Gzip(Box<MultiGzDecoder<Source<R>>>),
    Zstd(Box<ZstdDecoder<'static, Source<R>>>),
}

/// The compressed source with its digest.
type Counting<R> = Hashing<Limited<R>>;

impl<R: Read> Decoder<R> {
    fn new(mut source: Counting<R>) -> Result<Self> {
        let mut magic = vec![0; 4];
        let read = fill(&mut source, &mut magic).map_err(|error| Error::io("layer", &error))?;
        magic.truncate(read);
        let kind = magic.clone();
        let source = BufReader::with_capacity(PIECE, Cursor::new(magic).chain(source));
        Ok(match kind.as_slice() {
            [0x1f, 0x8b, ..] => Self::Gzip(Box::new(MultiGzDecoder::new(source))),
            // A frame, or one that is skipped.
            [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => {
                let decoder = ZstdDecoder::with_buffer(source);
                Self::Zstd(Box::new(
                    decoder.map_err(|error| Error::io("decoder", &error))?,
                ))
            }
            _ => Self::Plain(Box::new(source)),
        })
    }

    fn source(&self) -> &Source<R> {
        match self {
            Self::Plain(source) => source,
            Self::Gzip(decoder) => decoder.get_ref(),
            Self::Zstd(decoder) => decoder.get_ref(),
        }
    }

    fn compressed_bytes(&self) -> u64 {
        self.source().get_ref().get_ref().1.count()
    }

    fn into_source(self) -> Counting<R> {
        let source = match self {
            Self::Plain(source) => *source,
            Self::Gzip(decoder) => decoder.into_inner(),
            Self::Zstd(decoder) => decoder.finish(),
        };
        source.into_inner().into_inner().1
    }
}

impl<R: Read> Read for Decoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(source) => source.read(buffer),
            Self::Gzip(decoder) => decoder.read(buffer),
            Self::Zstd(decoder) => decoder.read(buffer),
        }
    }
}

/// Reader that fails beyond a limit.
#[derive(Debug)]
struct Limited<R> {
    inner: R,
    left: u64,
    max: u64,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        match self.left.checked_sub(read as u64) {
            Some(left) => self.left = left,
            None => return Err(Error::too_large("layer", "compressed_bytes", self.max).into()),
        }
        Ok(read)
    }
}

/// Decoded pieces as a reader.
#[derive(Debug)]
pub(crate) struct Pieces {
    receiver: Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    used: usize,
}

impl BufRead for Pieces {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.used == self.piece.len() {
            self.used = 0;
            // The channel closes at the end of the layer.
            self.piece = self.receiver.recv().unwrap_or_else(|_| Ok(Vec::new()))?;
        }
        Ok(&self.piece[self.used..])
    }

    fn consume(&mut self, bytes: usize) {
        self.used += bytes;
    }
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let available = self.fill_buf()?;
        let read = available.len().min(buffer.len());
        buffer[..read].copy_from_slice(&available[..read]);
        self.consume(read);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const LIMITS: LayerLimits = LayerLimits {
        compressed_bytes: 1 << 30,
        decoded_bytes: 1 << 30,
        ratio: 250,
    };

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn decoded(source: &[u8], limits: LayerLimits) -> Result<(Decoded, Vec<u8>)> {
        decode(source, limits, |pieces| {
            let mut all = Vec::new();
            pieces
                .read_to_end(&mut all)
                .map_err(|error| Error::io("layer", &error))?;
            Ok(all)
        })
    }

    #[test]
    fn every_compression_gives_both_digests() {
        let plain: Vec<u8> = (0..3_000_000_u32)
            .flat_map(|n| (n % 251).to_le_bytes())
            .collect();
        let two_members = [gzip(&plain[..1000]), gzip(&plain[1000..])].concat();
        for source in [
            plain.clone(),
            gzip(&plain),
            two_members,
            zstd::encode_all(&plain[..], 3).unwrap(),
        ] {
            let (found, content) = decoded(&source, LIMITS).unwrap();
            assert!(content == plain);
            assert_eq!(found.digest, Digest::of(&source));
            assert_eq!(found.compressed_bytes, source.len() as u64);
            assert_eq!(found.diff_id, Digest::of(&plain));
            assert_eq!(found.archive_bytes, plain.len() as u64);
        }
        assert_eq!(decoded(b"", LIMITS).unwrap().1, b"");
    }

    #[test]
    fn bytes_that_the_reader_ignores_belong_to_the_digests() {
        let plain = vec![7; 2_000_000];
        let (found, ()) = decode(&gzip(&plain)[..], LIMITS, |_| Ok(())).unwrap();
        assert_eq!(found.diff_id, Digest::of(&plain));
    }

    #[test]
    fn a_bomb_ends_at_the_ratio_or_at_the_absolute_limit() {
        let bomb = zstd::encode_all(io::repeat(0).take(1 << 30), 1).unwrap();
        let error = decoded(&bomb, LIMITS).unwrap_err();
        assert!(error.to_string().contains("ratio"), "{error}");
        let limits = LayerLimits {
            ratio: u64::MAX,
            decoded_bytes: 1 << 20,
            ..LIMITS
        };
        let error = decoded(&bomb, limits).unwrap_err();
        assert!(error.to_string().contains("decoded_bytes"), "{error}");
        let limits = LayerLimits {
            compressed_bytes: 100,
            ..LIMITS
        };
        let error = decoded(&bomb, limits).unwrap_err();
        assert!(error.to_string().contains("compressed_bytes"), "{error}");
        assert_eq!(error.code(), box_rpc::Code::TooLarge);
    }

    #[test]
    fn a_cut_or_broken_stream_is_corrupt() {
        let whole = gzip(&vec![3; 100_000]);
        let mut broken = whole.clone();
        let middle = broken.len() / 2;
        broken[middle] ^= 0xff;
        for source in [
            &whole[..whole.len() - 5],
            &broken,
            &zstd::encode_all(&whole[..], 3).unwrap()[..40],
        ] {
            let error = decoded(source, LIMITS).unwrap_err();
            assert!(matches!(error, Error::Corrupt(_)), "{error:?}");
        }
    }

    #[test]
    fn the_readers_error_is_the_cause() {
        let source = gzip(&vec![3; 50_000_000]);
        let limits = LayerLimits {
            ratio: u64::MAX,
            ..LIMITS
        };
        let refused = decode(&source[..], limits, |_| {
            Err::<(), _>(Error::invalid("mine"))
        });
        assert_eq!(refused.unwrap_err(), Error::invalid("mine"));
    }
}
