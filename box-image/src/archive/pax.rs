//! Extended headers (pax) of an entry.

use super::{bad, sparse::PaxSparse};
use crate::error::Result;

/// The fields of an extended header that change an entry.
#[derive(Debug, Default)]
pub(super) struct Extended {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) attributes: Vec<(String, Vec<u8>)>,
    pub(super) sparse: Option<PaxSparse>,
}

/// The fields about holes, before they are known to be complete.
#[derive(Default)]
struct Holes {
    major: Option<u64>,
    minor: Option<u64>,
    size: Option<u64>,
    name: Option<Vec<u8>>,
    others: bool,
}

impl Extended {
    pub(super) fn parse(text: &[u8]) -> Result<Self> {
        let mut found = Self::default();
        let mut holes = Holes::default();
        let mut rest = text;
        while !rest.is_empty() {
            let (key, value, after) = record(rest).ok_or_else(invalid)?;
            rest = after;
            match key {
                // An empty value removes the field, which no writer of images does.
                "path" => once(&mut found.path, name(value)?)?,
                "linkpath" => once(&mut found.link, name(value)?)?,
                "size" => once(&mut found.size, number(value)?)?,
                "uid" => once(&mut found.uid, number(value)?)?,
                "gid" => once(&mut found.gid, number(value)?)?,
                "mtime" => once(&mut found.mtime, time(value)?)?,
                "GNU.sparse.major" => once(&mut holes.major, number(value)?)?,
                "GNU.sparse.minor" => once(&mut holes.minor, number(value)?)?,
                "GNU.sparse.realsize" => once(&mut holes.size, number(value)?)?,
                "GNU.sparse.name" => once(&mut holes.name, name(value)?)?,
                key if key.starts_with("GNU.sparse.") => holes.others = true,
                key => {
                    if let Some(name) = key.strip_prefix("SCHILY.xattr.") {
                        found.attributes.push((name.to_owned(), value.to_vec()));
                    }
                }
            }
        }
        found.sparse = holes.complete()?;
        Ok(found)
    }

    /// Returns whether the fields concern more than a comment.
    pub(super) fn changes_entries(&self) -> bool {
        self.path.is_some()
            || self.link.is_some()
            || self.size.is_some()
            || self.uid.is_some()
            || self.gid.is_some()
            || self.sparse.is_some()
            || !self.attributes.is_empty()
    }
}

impl Holes {
    fn complete(self) -> Result<Option<PaxSparse>> {
        match (self.major, self.minor, self.size) {
            (None, None, None) if !self.others && self.name.is_none() => Ok(None),
            (Some(1), Some(0), Some(size)) if !self.others => Ok(Some(PaxSparse {
                size,
                name: self.name,
            })),
            _ => Err(bad("has a sparse file of an old format")),
        }
    }
}

/// Splits `LENGTH KEY=VALUE\n` from the rest.
fn record(text: &[u8]) -> Option<(&str, &[u8], &[u8])> {
    let space = text.iter().take(8).position(|c| *c == b' ')?;
    let length = usize::try_from(number(&text[..space]).ok()?).ok()?;
    let (record, rest) = text.split_at_checked(length)?;
    let (last, record) = record.split_last()?;
    let record = record.get(space + 1..)?;
    let equals = record.iter().position(|c| *c == b'=')?;
    let key = std::str::from_utf8(&record[..equals]).ok()?;
    (*last == b'\n').then_some((key, &record[equals + 1..], rest))
}

fn once<T>(slot: &mut Option<T>, value: T) -> Result<()> {
    if slot.replace(value).is_some() {
        return Err(bad("has an extended header that states a field twice"));
    }
    Ok(())
}

fn name(value: &[u8]) -> Result<Vec<u8>> {
    if value.is_empty() || value.contains(&0) {
        return Err(invalid());
    }
    Ok(value.to_vec())
}

/// Parses decimal digits only: no sign, no space.
pub(super) fn number(value: &[u8]) -> Result<u64> {
    let text = std::str::from_utf8(value).map_err(|_| invalid())?;
    if !text.bytes().all(|c| c.is_ascii_digit()) {
        return Err(invalid());
    }
    text.parse().map_err(|_| invalid())
}

/// Parses `[-]SECONDS[.FRACTION]`.
fn time(value: &[u8]) -> Result<(i64, u32)> {
    let text = std::str::from_utf8(value).map_err(|_| invalid())?;
    let (digits, negative) = match text.strip_prefix('-') {
        Some(digits) => (digits, true),
        None => (text, false),
    };
    let (seconds, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let seconds = i64::try_from(number(seconds.as_bytes())?).map_err(|_| invalid())?;
    let mut nanoseconds = 0;
    for digit in fraction.bytes().chain(std::iter::repeat(b'0')).take(9) {
        if !digit.is_ascii_digit() {
            return Err(invalid());
        }
        nanoseconds = nanoseconds * 10 + u32::from(digit - b'0');
    }
    Ok(match (negative, nanoseconds) {
        (false, _) => (seconds, nanoseconds),
        (true, 0) => (-seconds, 0),
        (true, _) => (-seconds - 1, 1_000_000_000 - nanoseconds),
    })
}

fn invalid() -> crate::Error {
    bad("has an invalid extended header")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_split_by_their_length() {
        assert_eq!(record(b"7 a=b=c\n"), None);
        assert_eq!(record(b"8 a=b=c\nx"), Some(("a", &b"b=c"[..], &b"x"[..])));
        for text in [
            "", "8", "8 ", "99 a=b\n", "6 a=b ", "0 a=b\n", "-6 a=b\n", "+6 a=b\n", "5 ab\n",
            "1 \n",
        ] {
            assert_eq!(record(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn times_have_fractions_and_signs() {
        for (text, parsed) in [
            ("1", (1, 0)),
            ("1.5", (1, 500_000_000)),
            ("1.1234567891", (1, 123_456_789)),
            ("-1.25", (-2, 750_000_000)),
            ("-3", (-3, 0)),
        ] {
            assert_eq!(time(text.as_bytes()).unwrap(), parsed, "{text}");
        }
        for text in ["", "x", "1.x", "--1", "99999999999999999999"] {
            assert!(time(text.as_bytes()).is_err(), "{text}");
        }
    }
}
