//! Writes tar archives that have the same bytes for the same content.

use std::fs::Metadata;
use std::io::Write;
use std::os::unix::fs::MetadataExt as _;

use tar::{EntryType, Header};

use crate::error::{At as _, Result};

const BLOCK: usize = 512;
const NAME_BYTES: usize = 100;
/// The largest size and time that a header's octal digits can hold.
const OCTAL_MAX: u64 = 0o77_777_777_777;

/// An entry of a tree.
pub(super) struct TreeEntry {
    pub(super) name: Vec<u8>,
    pub(super) target: Vec<u8>,
    pub(super) kind: EntryType,
    pub(super) found: Metadata,
    pub(super) keep_owners: bool,
}

/// Writer of archives that gives the same bytes for the same content.
pub(super) struct Writer<W> {
    pub(super) inner: W,
}

impl<W: Write> Writer<W> {
    /// Writes a small file of a layout.
    pub(super) fn file(&mut self, name: &str, content: &[u8]) -> Result<()> {
        self.begin(name, content.len() as u64)?;
        self.write(content)?;
        self.pad(content.len() as u64)
    }

    /// Writes an empty file, which is a mark of a layer.
    pub(super) fn mark(&mut self, name: &[u8]) -> Result<()> {
        let mut header = header(EntryType::Regular, 0o600, 0);
        if name.len() > NAME_BYTES {
            self.extended(&[("path".to_owned(), name.to_vec())])?;
        }
        set_bytes(&mut header, 0, &name[..name.len().min(NAME_BYTES)]);
        header.set_cksum();
        self.write(header.as_bytes())
    }

    /// Writes the header of a file of a layout.
    pub(super) fn begin(&mut self, name: &str, size: u64) -> Result<()> {
        let mut header = header(EntryType::Regular, 0o644, size);
        if size > OCTAL_MAX {
            self.extended(&[("size".to_owned(), size.to_string().into_bytes())])?;
        }
        set_bytes(&mut header, 0, name.as_bytes());
        header.set_cksum();
        self.write(header.as_bytes())
    }

    /// Writes the header of an entry, with everything that does not fit before it.
    pub(super) fn entry(
        &mut self,
        entry: &TreeEntry,
        attributes: &[(String, Vec<u8>)],
    ) -> Result<()> {
        let found = &entry.found;
        let size = if entry.kind == EntryType::Regular {
            found.len()
        } else {
            0
        };
        let mut records = attributes.to_vec();
        let mut header = header(entry.kind, found.mode() & 0o7777, size);
        if entry.keep_owners {
            header.set_uid(found.uid().into());
            header.set_gid(found.gid().into());
        }
        let mtime = u64::try_from(found.mtime())
            .ok()
            .filter(|time| *time <= OCTAL_MAX);
        header.set_mtime(mtime.unwrap_or(0));
        if mtime.is_none() || found.mtime_nsec() != 0 {
            let time = decimal_time(found.mtime(), found.mtime_nsec());
            records.push(("mtime".to_owned(), time.into_bytes()));
        }
        for (field, value, key) in [(0, &entry.name, "path"), (157, &entry.target, "linkpath")] {
            if value.len() > NAME_BYTES {
                records.push((key.to_owned(), value.clone()));
            }
            set_bytes(&mut header, field, &value[..value.len().min(NAME_BYTES)]);
        }
        if size > OCTAL_MAX {
            records.push(("size".to_owned(), size.to_string().into_bytes()));
        }
        self.extended(&records)?;
        header.set_cksum();
        self.write(header.as_bytes())
    }

    fn extended(&mut self, records: &[(String, Vec<u8>)]) -> Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let mut text = Vec::new();
        for (key, value) in records {
            // The length counts its own digits.
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while length != rest + length.to_string().len() {
                length = rest + length.to_string().len();
            }
            text.extend_from_slice(format!("{length} {key}=").as_bytes());
            text.extend_from_slice(value);
            text.push(b'\n');
        }
        let mut header = header(EntryType::XHeader, 0o644, text.len() as u64);
        set_bytes(&mut header, 0, b"pax");
        header.set_cksum();
        self.write(header.as_bytes())?;
        self.write(&text)?;
        self.pad(text.len() as u64)
    }

    pub(super) fn pad(&mut self, size: u64) -> Result<()> {
        let rest = usize::try_from(size % BLOCK as u64).unwrap_or(0);
        let zeros = [0; BLOCK];
        if rest > 0 {
            self.write(&zeros[rest..])
        } else {
            Ok(())
        }
    }

    pub(super) fn end(&mut self) -> Result<()> {
        self.write(&[0; 2 * BLOCK])?;
        self.inner.flush().at("export")
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.inner.write_all(bytes).at("export")
    }
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    // A larger size is in the extended header.
    header.set_size(if size > OCTAL_MAX { 0 } else { size });
    header
}

fn set_bytes(header: &mut Header, start: usize, value: &[u8]) {
    header.as_mut_bytes()[start..start + value.len()].copy_from_slice(value);
}

/// Returns a time as a decimal number, also before 1970.
fn decimal_time(seconds: i64, nanoseconds: i64) -> String {
    let total = i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    let sign = if total < 0 { "-" } else { "" };
    let total = total.unsigned_abs();
    format!(
        "{sign}{}.{:09}",
        total / 1_000_000_000,
        total % 1_000_000_000
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_decimal_numbers() {
        assert_eq!(decimal_time(1, 5), "1.000000005");
        assert_eq!(decimal_time(-2, 750_000_000), "-1.250000000");
        assert_eq!(decimal_time(-3, 0), "-3.000000000");
    }
}
