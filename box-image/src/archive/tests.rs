//! Archives that other readers would understand differently.

use super::*;

/// An archive under construction, byte by byte.
#[derive(Default)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Bytes {
    pub(crate) fn entry(mut self, kind: u8, path: &str, stated: u64, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(EntryType::new(kind));
        header.set_size(stated);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        if kind == 0 {
            header.as_mut_bytes()[156] = 0;
        }
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(BLOCK), 0);
        self
    }

    fn records(self, kind: u8, records: &[(&str, &str)]) -> Self {
        let text: String = records
            .iter()
            .map(|(key, value)| record(key, value))
            .collect();
        self.entry(kind, "pax", text.len() as u64, text.as_bytes())
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 2 * BLOCK, 0);
        self.0
    }
}

fn record(key: &str, value: &str) -> String {
    let mut length = key.len() + value.len() + 4;
    length += (length.to_string().len()) - 1;
    let text = format!("{length} {key}={value}\n");
    assert_eq!(text.len(), length);
    text
}

fn read(bytes: &[u8]) -> Result<Vec<(String, Kind)>> {
    let mut archive = Archive::new(bytes);
    let mut entries = Vec::new();
    while let Some(entry) = archive.next()? {
        entries.push((String::from_utf8(entry.path).unwrap(), entry.kind));
    }
    Ok(entries)
}

fn refused(bytes: &[u8], words: &str) {
    let error = read(bytes).unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
}

fn file(name: &str, size: u64) -> (String, Kind) {
    (name.to_owned(), Kind::File(size, None))
}

/// CVE-2025-62518 and CVE-2026-33055: the size of the extended header counts, whatever the other header states.
#[test]
fn the_size_of_an_extended_header_is_final() {
    let inner = Bytes::default().entry(b'0', "hidden", 0, b"").0;
    let size = inner.len().to_string();
    for stated in [0, 1, 512] {
        let bytes = Bytes::default()
            .records(b'x', &[("size", &size)])
            .entry(b'0', "outer", stated, &inner)
            .entry(b'0', "after", 0, b"")
            .end();
        let entries = read(&bytes).unwrap();
        assert_eq!(entries, [file("outer", 512), file("after", 0)]);
    }
    // And the reverse: the header states contents that the extended header denies.
    let bytes = Bytes::default()
        .records(b'x', &[("size", "0")])
        .entry(b'0', "outer", 512, b"")
        .entry(b'0', "shown", 0, b"")
        .end();
    assert_eq!(read(&bytes).unwrap(), [file("outer", 0), file("shown", 0)]);
}

/// GHSA-3pv8-6f4r-ffg2 and GHSA-3cv2-h65g-fgmm: an extended header never applies to another header.
#[test]
fn headers_that_readers_apply_differently_are_refused() {
    let name = b"long-name\0";
    let size = name.len() as u64;
    let mixed = Bytes::default().records(b'x', &[("size", "1024")]);
    refused(
        &mixed
            .entry(b'L', "l", size, name)
            .entry(b'0', "f", 0, b"")
            .end(),
        "two formats",
    );
    let twice = Bytes::default()
        .records(b'x', &[("mtime", "1")])
        .records(b'x', &[("mtime", "1")]);
    refused(
        &twice.entry(b'0', "f", 0, b"").end(),
        "two extended headers",
    );
    let twice = Bytes::default()
        .entry(b'L', "l", size, name)
        .entry(b'L', "l", size, name);
    refused(&twice.entry(b'0', "f", 0, b"").end(), "two long names");
    for key in ["size", "path", "linkpath", "uid", "SCHILY.xattr.user.a"] {
        let global = Bytes::default().records(b'g', &[(key, "1")]);
        refused(&global.entry(b'0', "f", 0, b"").end(), "global header");
    }
    let comment = Bytes::default().records(b'g', &[("comment", "1")]);
    assert_eq!(
        read(&comment.entry(b'0', "f", 0, b"").end()).unwrap(),
        [file("f", 0)]
    );
    let double = Bytes::default().records(b'x', &[("size", "1"), ("size", "2")]);
    refused(&double.entry(b'0', "f", 1, b"1").end(), "twice");
    refused(
        &Bytes::default().records(b'x', &[("path", "a")]).end(),
        "ends after",
    );
    for value in ["-1", "+1", " 1", "1 ", "0x1", "", "99999999999999999999"] {
        let bytes = Bytes::default().records(b'x', &[("size", value)]);
        refused(&bytes.entry(b'0', "f", 0, b"").end(), "extended header");
    }
}

#[test]
fn contents_of_entries_that_have_none_are_refused() {
    for kind in [b'1', b'2', b'3', b'4', b'5', b'6'] {
        let bytes = Bytes::default();
        let mut bytes = bytes.entry(kind, "e", 512, &Bytes::default().entry(b'0', "x", 0, b"").0);
        // A link requires a target.
        bytes.0[157] = b't';
        let mut header = Header::from_byte_slice(&bytes.0[..512]).clone();
        header.set_cksum();
        bytes.0[..512].copy_from_slice(header.as_bytes());
        refused(&bytes.end(), "contents");
    }
    refused(
        &Bytes::default().entry(0, "dir/", 5, b"12345").end(),
        "contents",
    );
    refused(
        &Bytes::default().entry(b'0', "file/", 0, b"").end(),
        "slash",
    );
    refused(
        &Bytes::default().entry(b'Z', "e", 0, b"").end(),
        "unknown type `Z`",
    );
    assert_eq!(
        read(&Bytes::default().entry(0, "dir/", 0, b"").end()).unwrap(),
        [("dir/".to_owned(), Kind::Directory)]
    );
}

#[test]
fn an_archive_that_is_cut_or_damaged_is_refused() {
    let whole = Bytes::default().entry(b'0', "f", 600, &[7; 600]).end();
    assert_eq!(read(&whole).unwrap(), [file("f", 600)]);
    for length in [100, 512, 1000, 1500] {
        refused(&whole[..length], "middle");
    }
    // Without the blocks of zeros, as some writers do.
    assert_eq!(read(&whole[..1536]).unwrap().len(), 1);
    let mut damaged = whole.clone();
    damaged[0] ^= 1;
    refused(&damaged, "checksum");
    let mut single = Bytes::default().entry(b'0', "f", 0, b"").0;
    single.resize(1024, 0);
    single.extend(Bytes::default().entry(b'0', "g", 0, b"").end());
    refused(&single, "single block");
    assert_eq!(read(&[]).unwrap(), []);
}

#[test]
fn sizes_and_names_of_terabytes_are_not_read() {
    for (kind, limit) in [
        (b'L', "path_bytes"),
        (b'K', "path_bytes"),
        (b'x', "attribute_bytes"),
        (b'g', "attribute_bytes"),
    ] {
        let bytes = Bytes::default().entry(kind, "n", 1 << 40, b"").end();
        let error = read(&bytes).unwrap_err();
        assert_eq!(error.code(), box_rpc::Code::TooLarge);
        assert!(error.to_string().contains(limit), "{error}");
    }
    refused(
        &Bytes::default().entry(b'0', "f", u64::MAX, b"").end(),
        "size",
    );
}

#[test]
fn long_names_are_read_in_both_formats() {
    let long = "d/".repeat(100) + "f";
    let name = format!("{long}\0");
    let gnu = Bytes::default().entry(b'L', "././@LongLink", name.len() as u64, name.as_bytes());
    assert_eq!(
        read(&gnu.entry(b'0', "cut", 0, b"").end()).unwrap(),
        [file(&long, 0)]
    );
    let pax = Bytes::default().records(b'x', &[("path", &long)]);
    assert_eq!(
        read(&pax.entry(b'0', "cut", 0, b"").end()).unwrap(),
        [file(&long, 0)]
    );
    let link = Bytes::default().records(b'x', &[("linkpath", &long)]);
    let entries = read(&link.entry(b'2', "l", 0, b"").end()).unwrap();
    assert_eq!(
        entries,
        [("l".to_owned(), Kind::Symlink(long.into_bytes()))]
    );
    refused(&Bytes::default().entry(b'2', "l", 0, b"").end(), "target");
}

#[test]
fn sparse_files_keep_their_parts() {
    let mut map = b"2\n0\n3\n1024\n2\n".to_vec();
    map.resize(512, 0);
    map.extend(b"abcde");
    let keys = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", "real"),
        ("GNU.sparse.realsize", "2000"),
    ];
    let sparse = |map: &[u8], keys: &[(&str, &str)]| {
        let bytes = Bytes::default().records(b'x', keys);
        bytes
            .entry(b'0', "GNUSparseFile.0/x", map.len() as u64, map)
            .entry(b'0', "after", 0, b"")
            .end()
    };
    let segments = vec![
        Segment {
            offset: 0,
            length: 3,
        },
        Segment {
            offset: 1024,
            length: 2,
        },
    ];
    let entries = read(&sparse(&map, &keys)).unwrap();
    assert_eq!(
        entries[0],
        ("real".to_owned(), Kind::File(2000, Some(segments)))
    );
    assert_eq!(entries[1], file("after", 0));
    for (text, words) in [
        ("2\n0\n3\n1\n2\n", "overlap"),
        ("2\n0\n3\n1999\n2\n", "overlap"),
        ("1\n0\n3\n", "two sizes"),
        ("9999999\n", "segments"),
        ("x\n", "extended"),
        ("1111111111111111111111111\n", "sparse"),
    ] {
        let mut map = text.as_bytes().to_vec();
        map.resize(512, 0);
        map.extend(b"abcde");
        refused(&sparse(&map, &keys), words);
    }
    refused(&sparse(&map, &[("GNU.sparse.map", "0,1")]), "old format");
    refused(&sparse(b"1", &keys), "sparse");
}
