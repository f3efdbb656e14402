//! The download of one layer, and its reader.

use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::digest::Digest;
use crate::error::{At as _, Error, Result};
use crate::progress::{Event, Phase, Progress};
use crate::registry::{Answer, Registry, Source};
use crate::spec::Descriptor;
use crate::store::Partial;

/// Attempts without a byte before a source is given up.
const IDLE_ATTEMPTS: u32 = 5;
/// Attempts in all: a peer that sends a byte at a time does not keep us for ever.
const ATTEMPTS: u32 = 64;
/// Bytes that are collected before they are written.
const PIECE: usize = 256 << 10;

/// Download of one layer into a file. Its reader follows while bytes arrive.
#[derive(Debug)]
pub(super) struct Download {
    digest: Digest,
    size: u64,
    partial: Partial,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Bytes in the file.
    written: u64,
    failed: Option<Error>,
}

impl Download {
    pub(super) fn new(layer: &Descriptor, partial: Partial) -> Self {
        let state = State {
            written: partial.resumed,
            failed: None,
        };
        Self {
            digest: layer.digest,
            size: layer.size,
            partial,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Returns how many bytes came from an earlier attempt.
    pub(super) fn resumed(&self) -> u64 {
        self.partial.resumed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn written(&self) -> u64 {
        self.state().written
    }

    /// Ends the reader with an error.
    pub(super) fn fail(&self, error: Error) {
        self.state().failed.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Returns a reader that waits for bytes that have not arrived.
    pub(super) fn reader(self: &Arc<Self>) -> Reader {
        Reader {
            download: Arc::clone(self),
            position: 0,
        }
    }

    /// Downloads the rest of the layer.
    pub(super) async fn run(
        self: &Arc<Self>,
        registry: &Registry,
        sources: &[Source],
        progress: &Progress,
    ) -> Result<()> {
        let reporter = progress.layer(self.digest, Phase::Download, self.size);
        reporter.at(self.written());
        let mut last = Error::lost();
        let mut attempts = 0;
        for source in sources {
            let mut idle = 0;
            while self.written() < self.size {
                let before = self.written();
                attempts += 1;
                let answer = registry.layer(source, &self.digest, before, progress).await;
                let received = match answer {
                    Ok(answer) => self.receive(answer, before, |done| reporter.at(done)).await,
                    // The request was repeated as often as allowed.
                    Err(error) => {
                        last = error;
                        break;
                    }
                };
                match received {
                    Ok(()) => {}
                    Err(error @ Error::Unavailable(_)) => {
                        progress.report(Event::Retry {
                            reason: error.to_string(),
                            wait_ms: 0,
                        });
                        last = error;
                    }
                    Err(error) => return Err(error),
                }
                idle = if self.written() > before { 0 } else { idle + 1 };
                if idle >= IDLE_ATTEMPTS || attempts >= ATTEMPTS {
                    break;
                }
            }
            if self.written() == self.size {
                return Ok(());
            }
        }
        Err(last)
    }

    /// Writes the body of an answer, which must not exceed the layer.
    async fn receive(
        self: &Arc<Self>,
        mut answer: Answer,
        offset: u64,
        report: impl Fn(u64),
    ) -> Result<()> {
        let mut skip = self.check_head(&answer, offset)?;
        let mut collected = Vec::new();
        loop {
            let piece = answer.piece().await;
            // What arrived before a cut is kept.
            let (piece, ended) = match piece {
                Ok(Some(piece)) => (skipped(&piece, &mut skip), None),
                Ok(None) => (Bytes::new(), Some(Ok(()))),
                Err(error) => (Bytes::new(), Some(Err(error))),
            };
            collected.extend_from_slice(&piece);
            if self.written() + collected.len() as u64 > self.size {
                return Err(self.wrong_size("more"));
            }
            if collected.len() >= PIECE || (ended.is_some() && !collected.is_empty()) {
                self.write(std::mem::take(&mut collected)).await?;
                report(self.written());
            }
            match ended {
                None => {}
                Some(Ok(())) if self.written() < self.size => {
                    return Err(Error::unavailable(
                        "registry: the layer was cut; try again later",
                    ));
                }
                Some(ended) => return ended,
            }
        }
    }

    /// Checks what an answer states; returns how many of its bytes are known already.
    fn check_head(&self, answer: &Answer, offset: u64) -> Result<u64> {
        let (skip, rest) = if answer.status().as_u16() == 206 {
            let range = answer.header("content-range").unwrap_or_default();
            if content_range(range).is_none_or(|(start, total)| {
                start != offset || total.is_some_and(|t| t != self.size)
            }) {
                return Err(Error::corrupt(format!(
                    "layer {}: the registry sent another range than requested; try again",
                    self.digest.short()
                )));
            }
            (0, self.size - offset)
        } else {
            // The registry ignores ranges and sends everything.
            (offset, self.size)
        };
        match answer.length() {
            Some(length) if length > rest => Err(self.wrong_size("more")),
            Some(length) if length < rest => Err(self.wrong_size("less")),
            _ => Ok(skip),
        }
    }

    fn wrong_size(&self, which: &str) -> Error {
        Error::corrupt(format!(
            "layer {}: the registry sends {which} than the {} bytes of the manifest; push the image again",
            self.digest.short(),
            self.size
        ))
    }

    async fn write(self: &Arc<Self>, bytes: Vec<u8>) -> Result<()> {
        let this = Arc::clone(self);
        super::blocking(move || {
            let offset = this.written();
            this.partial
                .file
                .write_all_at(&bytes, offset)
                .at("image store")?;
            this.state().written = offset + bytes.len() as u64;
            this.changed.notify_all();
            Ok(())
        })
        .await
    }
}

fn skipped(piece: &Bytes, skip: &mut u64) -> Bytes {
    let known = usize::try_from(*skip)
        .unwrap_or(usize::MAX)
        .min(piece.len());
    *skip -= known as u64;
    piece.slice(known..)
}

/// Parses `bytes START-END/TOTAL`.
fn content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let start = range.split_once('-')?.0.parse().ok()?;
    Some((start, total.parse().ok()))
}

/// Reader of a layer that may still arrive.
#[derive(Debug)]
pub(super) struct Reader {
    download: Arc<Download>,
    position: u64,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let download = &*self.download;
        let mut state = download.state();
        let available = loop {
            if let Some(error) = &state.failed {
                return Err(error.clone().into());
            }
            let available = state.written - self.position;
            if available > 0 || self.position == download.size {
                break available;
            }
            state = download
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        let max = usize::try_from(available)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let read = download
            .partial
            .file
            .read_at(&mut buffer[..max], self.position)?;
        if read == 0 && max > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.position += read as u64;
        Ok(read)
    }
}

/// Ends the readers of all layers when the pull is dropped.
#[derive(Debug)]
pub(super) struct Cancel {
    downloads: Vec<Arc<Download>>,
}

impl Cancel {
    pub(super) fn new(downloads: Vec<Arc<Download>>) -> Self {
        Self { downloads }
    }

    /// Removes the files: their content is used or wrong.
    pub(super) fn remove_files(&self) {
        for download in &self.downloads {
            download.partial.remove();
        }
    }
}

impl Drop for Cancel {
    fn drop(&mut self) {
        for download in &self.downloads {
            download.fail(Error::Cancelled);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_range_is_read() {
        assert_eq!(content_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(content_range("bytes 5-9/*"), Some((5, None)));
        for text in ["", "bytes", "bytes */10", "bytes x-9/10", "items 5-9/10"] {
            assert_eq!(content_range(text), None, "{text}");
        }
    }
}
