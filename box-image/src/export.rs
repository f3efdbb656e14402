//! Exports an image as an OCI layout in a tar archive.
//!
//! The layout has one uncompressed layer, because the store keeps one tree for each image, and a second one for the changes of
//! a box. The same image always gives the same bytes: names are sorted, times are those of the files, and the headers contain
//! nothing of this machine.

mod writer;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use tar::EntryType;

use self::writer::{TreeEntry, Writer};
use crate::digest::{Digest, Hashing};
use crate::error::{At as _, Error, Result};
use crate::reference::Reference;
use crate::spec::{
    self, Descriptor, Index, Manifest, OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST,
};
use crate::store::Store;

/// Options of an export.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// Name of the image in the layout.
    pub name: Option<Reference>,
    /// Directory of an overlay's changes, which become a second layer.
    pub changes: Option<PathBuf>,
    /// Reader of the files, if this process may lack the rights; this process if absent.
    pub archiver: Option<Arc<dyn Archiver>>,
}

/// Reader of trees with files that this process owns and may not read, such as those of mode 000.
pub trait Archiver: fmt::Debug + Send + Sync {
    /// Opens the archive of a tree that [`write_archive`] writes elsewhere.
    fn open(&self, root: &Path, tree: Tree) -> Result<Box<dyn Read>>;
}

/// Writes the changes of an overlay as an archive with the marks of an OCI layer.
pub fn write_changes(
    changes: &Path,
    archiver: Option<&dyn Archiver>,
    writer: impl Write,
) -> Result<()> {
    write_layer(changes, Tree::Changes, archiver, writer)
}

/// Writes a tree as an archive, for an [`Archiver`]. Owners are not kept.
pub fn write_archive(root: &Path, tree: Tree, writer: impl Write) -> Result<()> {
    write_tree(root, writer, tree, false)
}

/// What a tree contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tree {
    /// All files of an image.
    Image,
    /// The upper directory of an overlay, with its marks for removed files.
    Changes,
}

/// The layer of a layout.
struct LayerBlob<'a> {
    root: &'a Path,
    tree: Tree,
    archiver: Option<&'a dyn Archiver>,
    digest: Digest,
    size: u64,
}

impl<'a> LayerBlob<'a> {
    /// Reads a tree. The header of its blob contains the size, and the name the digest; so the tree is read twice.
    fn new(root: &'a Path, tree: Tree, archiver: Option<&'a dyn Archiver>) -> Result<Self> {
        let mut hashing = Hashing::new(io::sink());
        write_layer(root, tree, archiver, &mut hashing)?;
        let (digest, size) = hashing.finish();
        Ok(Self {
            root,
            tree,
            archiver,
            digest,
            size,
        })
    }

    fn write(&self, archive: &mut Writer<impl Write>) -> Result<()> {
        archive.begin(&blob(&self.digest), self.size)?;
        let mut hashing = Hashing::new(&mut archive.inner);
        write_layer(self.root, self.tree, self.archiver, &mut hashing)?;
        let (written, size) = hashing.finish();
        if (written, size) != (self.digest, self.size) {
            return Err(Error::Storage(
                "export: the files changed meanwhile; try again".to_owned(),
            ));
        }
        archive.pad(size)
    }
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
        let archiver = options.archiver.as_deref();
        let mut layers = vec![LayerBlob::new(&root, Tree::Image, archiver)?];
        if let Some(changes) = &options.changes {
            layers.push(LayerBlob::new(changes, Tree::Changes, archiver)?);
        }
        let digests: Vec<_> = layers.iter().map(|layer| layer.digest).collect();
        let config = flat_config(&self.raw_config(&image.digest)?, &digests)?;
        let descriptors = layers.iter();
        let manifest = Manifest {
            schema_version: 2,
            media_type: Some(OCI_MANIFEST.to_owned()),
            config: Descriptor::new(OCI_CONFIG, Digest::of(&config), config.len() as u64),
            layers: descriptors
                .map(|layer| Descriptor::new(OCI_LAYER, layer.digest, layer.size))
                .collect(),
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
        for layer in &layers {
            // A blob is written once.
            blobs.remove(&layer.digest);
        }
        for (digest, content) in blobs {
            archive.file(&blob(&digest), &content)?;
        }
        for (at, layer) in layers.iter().enumerate() {
            let is_first = layers[..at]
                .iter()
                .all(|other| other.digest != layer.digest);
            if is_first {
                layer.write(&mut archive)?;
            }
        }
        archive.end()?;
        Ok(digest)
    }
}

fn blob(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Replaces the layers of a configuration.
fn flat_config(original: &[u8], diff_ids: &[Digest]) -> Result<Vec<u8>> {
    let mut config: serde_json::Map<String, Value> = spec::json(original, "configuration")?;
    config.remove("history");
    config.insert(
        "rootfs".to_owned(),
        json!({"type": "layers", "diff_ids": diff_ids}),
    );
    spec::to_json(&config, "configuration")
}

/// Writes a layer with the rights of the archiver, or of this process.
fn write_layer(
    root: &Path,
    tree: Tree,
    archiver: Option<&dyn Archiver>,
    mut writer: impl Write,
) -> Result<()> {
    let Some(archiver) = archiver else {
        let is_root = rustix::process::geteuid().is_root();
        return write_tree(root, writer, tree, is_root);
    };
    let mut archive = archiver.open(root, tree)?;
    let copied = io::copy(&mut archive, &mut writer).and_then(|_| writer.flush());
    copied.map_err(|error| Error::io("export", &error))
}

/// Writes a tree as an archive.
fn write_tree(root: &Path, writer: impl Write, tree: Tree, keep_owners: bool) -> Result<()> {
    let mut archive = Writer { inner: writer };
    let mut links: HashMap<u64, Vec<u8>> = HashMap::new();
    // Names in reverse order; the root is first.
    let mut stack = vec![OsString::new()];
    while let Some(name) = stack.pop() {
        let path = root.join(&name);
        let found = fs::symlink_metadata(&path).at("export")?;
        let mut name = name.into_vec();
        if found.file_type().is_socket() {
            // An archive has no type for it, and no process listens any more.
            continue;
        }
        if tree == Tree::Changes && is_whiteout(&path, &found)? {
            archive.mark(&marked(&name))?;
            continue;
        }
        let hides_below = tree == Tree::Changes && found.is_dir() && is_opaque(&path)?;
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
        if hides_below {
            archive.mark(&[&entry.name, &b".wh..wh..opq"[..]].concat())?;
        }
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

/// Returns whether an entry of an overlay marks a removed file.
fn is_whiteout(path: &Path, found: &Metadata) -> Result<bool> {
    let is_device = found.file_type().is_char_device() && found.rdev() == 0;
    let is_empty = found.is_file() && found.len() == 0;
    Ok(is_device || (is_empty && has_attribute(path, &["user.overlay.whiteout"])?))
}

/// Returns whether a directory of an overlay hides the layers below.
fn is_opaque(path: &Path) -> Result<bool> {
    has_attribute(path, &["trusted.overlay.opaque", "user.overlay.opaque"])
}

fn has_attribute(path: &Path, names: &[&str]) -> Result<bool> {
    for name in names {
        let mut value = [0; 64];
        match rustix::fs::lgetxattr(path, *name, &mut value[..]) {
            // `x` only says that a directory may contain marks.
            Ok(length) if value[..length] != *b"x" => return Ok(true),
            Ok(_)
            | Err(
                rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::PERM,
            ) => {}
            Err(error) => return Err(error).at("export"),
        }
    }
    Ok(false)
}

/// Returns the name of the mark for a removed file.
fn marked(name: &[u8]) -> Vec<u8> {
    let start = name.iter().rposition(|byte| *byte == b'/');
    let (parent, last) = name.split_at(start.map_or(0, |slash| slash + 1));
    [parent, b".wh.", last].concat()
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
        .filter(|name| name.starts_with("user.") && !name.starts_with("user.overlay."))
    {
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::lgetxattr(path, name, &mut value[..]).at("export")?;
        value.truncate(length);
        found.push((format!("SCHILY.xattr.{name}"), value));
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_no_part_of_an_export() {
        let changes = tempfile::tempdir().unwrap();
        fs::write(changes.path().join("file"), "x").unwrap();
        let socket = changes.path().join("socket");
        drop(std::os::unix::net::UnixListener::bind(socket).unwrap());
        let mut archive = Vec::new();
        write_changes(changes.path(), None, &mut archive).unwrap();
        let mut archive = tar::Archive::new(&archive[..]);
        let entries = archive.entries().unwrap();
        let names: Vec<_> = entries
            .map(|entry| entry.unwrap().path().unwrap().into_owned())
            .collect();
        assert_eq!(names, [Path::new("./"), Path::new("file")]);
    }
}
