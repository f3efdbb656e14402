//! Digests of content: SHA-256 only.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result, shown};

/// SHA-256 digest of some content.
///
/// A value exists only if its text is valid, so it can name a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// Returns the digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Returns the 64 hexadecimal digits without the algorithm.
    pub fn hex(&self) -> String {
        use fmt::Write as _;
        self.0.iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// Returns the first twelve digits, for people.
    pub fn short(&self) -> String {
        self.hex()[..12].to_owned()
    }

    /// Parses 64 lower-case hexadecimal digits.
    pub(crate) fn from_hex(hex: &str) -> Option<Self> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        if hex.len() != 64 {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(bytes))
    }

    /// Checks that some bytes have this digest.
    pub(crate) fn check(&self, bytes: &[u8], what: &str) -> Result<()> {
        let found = Self::of(bytes);
        if found == *self {
            return Ok(());
        }
        Err(mismatch(what, self, &found))
    }
}

/// Error about content with another digest than stated.
pub(crate) fn mismatch(what: &str, wanted: &Digest, found: &Digest) -> Error {
    Error::corrupt(format!(
        "{what}: the content has the digest {found} instead of {wanted}; fetch it again or from another source"
    ))
}

impl FromStr for Digest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            Some(("sha256", hex)) => Self::from_hex(hex).ok_or_else(|| {
                Error::invalid(format!(
                    "digest: `{}` is invalid; use sha256: and 64 lower-case hexadecimal digits",
                    shown(text)
                ))
            }),
            Some((algorithm, _)) => Err(Error::unsupported(format!(
                "digest: the algorithm `{}` is not supported; use sha256",
                shown(algorithm)
            ))),
            None => Err(Error::invalid(format!(
                "digest: `{}` names no algorithm; use sha256:DIGITS",
                shown(text)
            ))),
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

/// Reader that computes the digest and the length of the bytes that pass.
#[derive(Debug)]
pub(crate) struct Hashing<R> {
    inner: R,
    state: Sha256,
    bytes: u64,
}

impl<R> Hashing<R> {
    pub(crate) fn new(inner: R) -> Self {
        let state = Sha256::new();
        Self {
            inner,
            state,
            bytes: 0,
        }
    }

    /// Returns the digest and the length.
    pub(crate) fn finish(self) -> (Digest, u64) {
        (Digest(self.state.finalize().into()), self.bytes)
    }

    /// Returns the inner reader or writer, the digest and the length.
    pub(crate) fn into_parts(self) -> (R, Digest, u64) {
        (self.inner, Digest(self.state.finalize().into()), self.bytes)
    }

    pub(crate) fn get_ref(&self) -> &R {
        &self.inner
    }

    pub(crate) fn count(&self) -> u64 {
        self.bytes
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.state.update(&buffer[..read]);
        self.bytes += read as u64;
        Ok(read)
    }
}

impl<W: io::Write> io::Write for Hashing<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(buffer)?;
        self.state.update(&buffer[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn a_digest_is_parsed_and_printed() {
        let digest: Digest = EMPTY.parse().unwrap();
        assert_eq!(digest, Digest::of(b""));
        assert_eq!(digest.to_string(), EMPTY);
        assert_eq!(digest.short(), "e3b0c44298fc");
    }

    /// CVE-2024-3727: a digest that was never checked became a path.
    #[test]
    fn a_digest_that_would_be_a_path_is_refused() {
        let upper = EMPTY.to_uppercase();
        for text in [
            "sha256:../../../etc/passwd",
            "sha256:",
            "../x",
            "",
            "sha256:e3b0",
            &format!("{EMPTY}0"),
            &format!("{}/", &EMPTY[..70]),
            &upper,
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }

    #[test]
    fn another_algorithm_is_refused_by_name() {
        let text = format!("sha512:{}", "0".repeat(128));
        let error = text.parse::<Digest>().unwrap_err();
        assert_eq!(error.code(), box_rpc::Code::Unsupported);
        assert!(error.to_string().contains("`sha512`"), "{error}");
    }
}
