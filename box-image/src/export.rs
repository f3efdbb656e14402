//! Exports an image as an OCI layout in a tar archive.
//!
//! The layout has one uncompressed layer, because the store keeps one tree for each image. The same image always gives the
//! same bytes: names are sorted, times are those of the files, and the headers contain nothing of this machine.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Read as _, Write};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use serde_json::{Value, json};
use tar::{EntryType, Header};

use crate::digest::{Digest, Hashing};
use crate::error::{At as _, Error, Result};
use crate::reference::Reference;
use crate::spec::{
    self, Descriptor, Index, Manifest, OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST,
};
use crate::store::Store;

const BLOCK: usize = 512;
const NAME_BYTES: usize = 100;
/// The largest size and time that a header's octal digits can hold.
const OCTAL_MAX: u64 = 0o77_777_777_777;

/// Options of an export.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// Name of the image in the layout.
    pub name: Option<Reference>,
}

impl Store {
    /// Writes an image as an archive of an OCI layout, and returns the digest of its manifest.
    ///
    /// The manifest differs from that of the pulled image, because its layer is another one.
    pub fn export(
        &self,
        query: &str,
        writer: impl Write,
        options: &ExportOptions,
    ) -> Result<Digest> {
        let image = self.get(query)?;
        let lease = self.lease(&image.digest)?;
        let root = lease.rootfs();
        // The header of a blob contains its size, and its name the digest; so the tree is read twice.
        let mut hashing = Hashing::new(io::sink());
        write_tree(&root, &mut hashing)?;
        let (layer, layer_size) = hashing.finish();
        let config = flat_config(&self.raw_config(&image.digest)?, layer)?;
        let manifest = Manifest {
            schema_version: 2,
            media_type: Some(OCI_MANIFEST.to_owned()),
            config: Descriptor::new(OCI_CONFIG, Digest::of(&config), config.len() as u64),
            layers: vec![Descriptor::new(OCI_LAYER, layer, layer_size)],
        };
        let manifest = spec::to_json(&manifest, "manifest")?;
        let digest = Digest::of(&manifest);
        let mut descriptor = Descriptor::new(OCI_MANIFEST, digest, manifest.len() as u64);
        descriptor.platform = image.platform;
        if let Some(name) = &options.name {
            let key = "org.opencontainers.image.ref.name".to_owned();
            descriptor.annotations = BTreeMap::from([(key, name.to_string())]);
        }
        let index = Index {
            schema_version: 2,
            media_type: Some(OCI_INDEX.to_owned()),
            manifests: vec![descriptor],
        };
        let mut archive = Writer { inner: writer };
        archive.file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        archive.file("index.json", &spec::to_json(&index, "index")?)?;
        let mut blobs = BTreeMap::from([(digest, manifest), (Digest::of(&config), config)]);
        // An empty blob could not be written twice.
        blobs.remove(&layer);
        for (digest, content) in blobs {
            archive.file(&blob(&digest), &content)?;
        }
        archive.begin(&blob(&layer), layer_size)?;
        let mut hashing = Hashing::new(&mut archive.inner);
        write_tree(&root, &mut hashing)?;
        let (written, size) = hashing.finish();
        if (written, size) != (layer, layer_size) {
            return Err(Error::Storage(
                "export: the image changed meanwhile; remove and pull it again".to_owned(),
            ));
        }
        archive.pad(size)?;
        archive.end()?;
        Ok(digest)
    }
}

fn blob(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Replaces the layers of a configuration by one.
fn flat_config(original: &[u8], diff_id: Digest) -> Result<Vec<u8>> {
    let mut config: serde_json::Map<String, Value> = spec::json(original, "configuration")?;
    config.remove("history");
    config.insert(
        "rootfs".to_owned(),
        json!({"type": "layers", "diff_ids": [diff_id]}),
    );
    spec::to_json(&config, "configuration")
}

/// Writes a tree as an archive.
fn write_tree(root: &Path, writer: impl Write) -> Result<()> {
    let mut archive = Writer { inner: writer };
    let keep_owners = rustix::process::geteuid().is_root();
    let mut links: HashMap<u64, Vec<u8>> = HashMap::new();
    // Names in reverse order; the root is first.
    let mut stack = vec![OsString::new()];
    while let Some(name) = stack.pop() {
        let path = root.join(&name);
        let found = fs::symlink_metadata(&path).at("export")?;
        let mut name = name.into_vec();
        if found.is_dir() {
            let mut below = Vec::new();
            for entry in fs::read_dir(&path).at("export")? {
                let entry = entry.at("export")?.file_name();
                let prefix: &[u8] = if name.is_empty() { b"" } else { b"/" };
                below.push([&name, prefix, entry.as_bytes()].concat());
            }
            below.sort_by(|a, b| b.cmp(a));
            stack.extend(below.into_iter().map(OsString::from_vec));
            name.extend(if name.is_empty() { &b"./"[..] } else { b"/" });
        }
        let mut entry = TreeEntry {
            name,
            target: Vec::new(),
            kind: EntryType::Regular,
            found,
            keep_owners,
        };
        let first = (!entry.found.is_dir() && entry.found.nlink() > 1)
            .then(|| links.get(&entry.found.ino()))
            .flatten();
        if let Some(first) = first {
            entry.kind = EntryType::Link;
            entry.target.clone_from(first);
            archive.entry(&entry, &[])?;
            continue;
        }
        if !entry.found.is_dir() && entry.found.nlink() > 1 {
            links.insert(entry.found.ino(), entry.name.clone());
        }
        let kind = entry.found.file_type();
        if kind.is_dir() {
            entry.kind = EntryType::Directory;
        } else if kind.is_symlink() {
            entry.kind = EntryType::Symlink;
            entry.target = fs::read_link(&path)
                .at("export")?
                .into_os_string()
                .into_vec();
        } else if kind.is_fifo() {
            entry.kind = EntryType::Fifo;
        }
        let attributes = if kind.is_dir() || kind.is_file() {
            attributes(&path)?
        } else {
            Vec::new()
        };
        archive.entry(&entry, &attributes)?;
        if kind.is_file() {
            let mut options = File::options();
            options
                .read(true)
                .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
            let file = options.open(&path).at("export")?;
            let size = entry.found.len();
            let copied = io::copy(&mut file.take(size), &mut archive.inner)
                .map_err(|error| Error::io("export", &error))?;
            if copied != size {
                return Err(Error::Storage(
                    "export: a file of the image is damaged; remove and pull it again".to_owned(),
                ));
            }
            archive.pad(size)?;
        }
    }
    archive.end()
}

/// Returns the extended attributes of users, sorted.
fn attributes(path: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let mut names = vec![0; 64 << 10];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        length => length.at("export")?,
    };
    let names = names[..length].split(|byte| *byte == 0);
    let mut found = Vec::new();
    for name in names
        .filter_map(|name| std::str::from_utf8(name).ok())
        .filter(|name| name.starts_with("user."))
    {
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::lgetxattr(path, name, &mut value[..]).at("export")?;
        value.truncate(length);
        found.push((format!("SCHILY.xattr.{name}"), value));
    }
    found.sort();
    Ok(found)
}

struct TreeEntry {
    name: Vec<u8>,
    target: Vec<u8>,
    kind: EntryType,
    found: Metadata,
    keep_owners: bool,
}

/// Writer of archives that gives the same bytes for the same content.
struct Writer<W> {
    inner: W,
}

impl<W: Write> Writer<W> {
    /// Writes a small file of a layout.
    fn file(&mut self, name: &str, content: &[u8]) -> Result<()> {
        self.begin(name, content.len() as u64)?;
        self.write(content)?;
        self.pad(content.len() as u64)
    }

    /// Writes the header of a file of a layout.
    fn begin(&mut self, name: &str, size: u64) -> Result<()> {
        let mut header = header(EntryType::Regular, 0o644, size);
        if size > OCTAL_MAX {
            self.extended(&[("size".to_owned(), size.to_string().into_bytes())])?;
        }
        set_bytes(&mut header, 0, name.as_bytes());
        header.set_cksum();
        self.write(header.as_bytes())
    }

    /// Writes the header of an entry, with everything that does not fit before it.
    fn entry(&mut self, entry: &TreeEntry, attributes: &[(String, Vec<u8>)]) -> Result<()> {
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

    fn pad(&mut self, size: u64) -> Result<()> {
        let rest = usize::try_from(size % BLOCK as u64).unwrap_or(0);
        let zeros = [0; BLOCK];
        if rest > 0 {
            self.write(&zeros[rest..])
        } else {
            Ok(())
        }
    }

    fn end(&mut self) -> Result<()> {
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
