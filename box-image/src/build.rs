//! Makes an image from its layers, for pulls and imports.

use std::io::{self, Read};

use crate::decode::{Decoded, LayerLimits, decode};
use crate::digest::{Digest, mismatch};
use crate::error::{Error, Result};
use crate::limits::Limits;
use crate::progress::{Event, LayerProgress, Phase, Progress};
use crate::spec::ConfigFile;
use crate::store::{Image, LayerInfo, Name, Work};
use crate::unpack::{Unpacked, Unpacker};

/// What is known of a layer before it is read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expected {
    /// Digest and size of the compressed bytes.
    pub(crate) content: Option<(Digest, u64)>,
    /// Digest of the archive.
    pub(crate) diff_id: Option<Digest>,
}

/// The layers, unpacked into the directory of an operation.
#[derive(Debug)]
pub(crate) struct Layers {
    pub(crate) decoded: Vec<Decoded>,
    unpacked: Unpacked,
}

impl Layers {
    /// Returns whether the layers contain no entry.
    pub(crate) fn is_empty(&self) -> bool {
        self.unpacked.entries == 0
    }
}

/// The documents of an image.
#[derive(Debug)]
pub(crate) struct Documents {
    pub(crate) manifest: Vec<u8>,
    pub(crate) config: Vec<u8>,
    pub(crate) parsed: ConfigFile,
}

/// Unpacks layers in order; `open` returns the bytes of each.
///
/// The digests are compared at the end of each layer. Nothing is visible before the image is complete.
pub(crate) fn unpack<R: Read + Send>(
    work: &Work,
    limits: Limits,
    layers: &[Expected],
    progress: &Progress,
    mut open: impl FnMut(usize) -> Result<R>,
) -> Result<Layers> {
    let mut unpacker = Unpacker::new(work.rootfs()?, limits);
    let mut decoded: Vec<Decoded> = Vec::with_capacity(layers.len());
    for (number, expected) in layers.iter().enumerate() {
        let used = |size: fn(&Decoded) -> u64| decoded.iter().map(size).sum::<u64>();
        let layer_limits = LayerLimits {
            compressed_bytes: limits
                .compressed_bytes
                .saturating_sub(used(|d| d.compressed_bytes)),
            decoded_bytes: limits
                .decoded_bytes
                .saturating_sub(used(|d| d.archive_bytes)),
            ratio: limits.ratio,
        };
        let reporter = expected
            .content
            .map(|(digest, size)| progress.layer(digest, Phase::Unpack, size));
        let source = Reporting {
            inner: open(number)?,
            done: 0,
            reporter,
        };
        let (found, ()) = decode(source, layer_limits, |pieces| unpacker.apply(pieces))?;
        check(expected, &found)?;
        progress
            .layer(found.digest, Phase::Done, found.compressed_bytes)
            .at(found.compressed_bytes);
        decoded.push(found);
    }
    Ok(Layers {
        decoded,
        unpacked: unpacker.finish()?,
    })
}

fn check(expected: &Expected, found: &Decoded) -> Result<()> {
    if let Some((digest, size)) = &expected.content {
        if found.compressed_bytes != *size {
            return Err(Error::corrupt(format!(
                "layer {}: it has {} bytes instead of {size}; fetch it again or from another source",
                digest.short(),
                found.compressed_bytes
            )));
        }
        if found.digest != *digest {
            return Err(mismatch("layer", digest, &found.digest));
        }
    }
    match &expected.diff_id {
        Some(diff_id) if *diff_id != found.diff_id => {
            Err(mismatch("layer's archive", diff_id, &found.diff_id))
        }
        _ => Ok(()),
    }
}

/// Saves a complete image.
pub(crate) fn save(
    work: Work,
    layers: &Layers,
    documents: Documents,
    source: Option<String>,
    name: Option<&Name>,
    progress: &Progress,
) -> Result<Digest> {
    progress.report(Event::Saving);
    work.write("manifest.json", &documents.manifest)?;
    work.write("config.json", &documents.config)?;
    let digest = Digest::of(&documents.manifest);
    let image = Image {
        digest,
        names: Vec::new(),
        source,
        platform: documents.parsed.platform(),
        config: documents.parsed.settings(),
        layers: layers
            .decoded
            .iter()
            .map(|layer| LayerInfo {
                digest: layer.digest,
                size: layer.compressed_bytes,
            })
            .collect(),
        unpacked: layers.unpacked,
        disk_bytes: work.disk_bytes()?,
        created_at: crate::store::now(),
        used_at: 0,
    };
    work.commit(&image, name)?;
    Ok(digest)
}

/// Reader that reports the bytes that pass.
struct Reporting<R> {
    inner: R,
    done: u64,
    reporter: Option<LayerProgress>,
}

impl<R: Read> Read for Reporting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.done += read as u64;
        if let Some(reporter) = &self.reporter {
            reporter.at(self.done);
        }
        Ok(read)
    }
}
