//! Uploaded archives, which nobody vouches for: everything an archive says of itself is checked before the first byte is
//! written, and what comes out of it is counted again.

use std::collections::HashSet;
use std::fs::{self, File, Permissions};
use std::io::{Cursor, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use zip::ZipArchive;
use zip::read::ZipFile;

use super::Why;
use super::tree::normal;

const COMPRESSED: u64 = 20 * 1024 * 1024;
const ENTRIES: usize = 512;
const ENTRY: u64 = 16 * 1024 * 1024;
const TOTAL: u64 = 64 * 1024 * 1024;
const RATIO: u64 = 100;

/// Bits of a mode that say what an entry is.
const KIND: u32 = 0o170_000;
const LINK: u32 = 0o120_000;
const REGULAR: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;

/// What is to be written for an entry.
struct Planned {
    index: usize,
    name: String,
    path: PathBuf,
    size: u64,
    executable: bool,
    is_dir: bool,
}

fn no_archive() -> Why {
    "Uploaded file must be a valid .zip archive".to_owned()
}

/// Unpacks an archive into a directory of its own, and returns its root: the one directory in it, if there is just one.
pub(super) fn unpack(archive: &[u8], into: &Path) -> Result<PathBuf, Why> {
    if archive.is_empty() {
        return Err("Uploaded file is empty".to_owned());
    }
    if archive.len() as u64 > COMPRESSED {
        return Err(format!(
            "Uploaded archive exceeds the compressed size limit ({COMPRESSED} bytes)"
        ));
    }
    let mut opened = ZipArchive::new(Cursor::new(archive)).map_err(|_| no_archive())?;
    let plan = plan(&mut opened)?;
    let failed =
        |error: std::io::Error| format!("the archive cannot be unpacked: {}", error.kind());
    let mut left = TOTAL;
    for entry in &plan {
        let place = into.join(&entry.path);
        if entry.is_dir {
            fs::create_dir_all(&place).map_err(failed)?;
            continue;
        }
        if let Some(parent) = place.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        let member = opened.by_index(entry.index).map_err(|_| no_archive())?;
        let most = entry.size.min(left) + 1;
        let mut file = File::create_new(&place).map_err(failed)?;
        let mut member = member.take(most);
        let (mut piece, mut written) = (vec![0; 64 * 1024], 0);
        loop {
            let length = member.read(&mut piece).map_err(|_| no_archive())?;
            if length == 0 {
                break;
            }
            written += length as u64;
            file.write_all(&piece[..length]).map_err(failed)?;
        }
        if written != entry.size {
            let name = &entry.name;
            return Err(format!(
                "Archive entry size changed while extracting: {name}"
            ));
        }
        left -= written;
        let mode = if entry.executable { 0o755 } else { 0o644 };
        let permissions = Permissions::from_mode(mode);
        file.set_permissions(permissions).map_err(failed)?;
    }
    let all: Vec<_> = fs::read_dir(into).map_err(failed)?.flatten().collect();
    match &all[..] {
        [one] if one.path().is_dir() => Ok(one.path()),
        _ => Ok(into.to_owned()),
    }
}

/// Checks everything that an archive says of its entries.
fn plan(archive: &mut ZipArchive<Cursor<&[u8]>>) -> Result<Vec<Planned>, Why> {
    if archive.len() > ENTRIES {
        return Err(format!(
            "Archive contains too many entries (maximum {ENTRIES})"
        ));
    }
    let mut plan = Vec::new();
    let mut paths = HashSet::new();
    let (mut compressed, mut total) = (0, 0);
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index);
        let entry = entry.map_err(|_| no_archive())?;
        let planned = planned(index, &entry)?;
        let name = &planned.name;
        if !paths.insert(planned.path.clone()) {
            return Err(format!("Archive contains a duplicate path: {name}"));
        }
        if !planned.is_dir {
            let (size, packed) = (entry.size(), entry.compressed_size());
            if size > ENTRY {
                return Err(format!(
                    "Archive entry exceeds the uncompressed size limit: {name}"
                ));
            }
            if too_dense(size, packed) {
                return Err(format!(
                    "Archive entry exceeds the compression ratio limit: {name}"
                ));
            }
            compressed += packed;
            total += size;
            if compressed > COMPRESSED {
                return Err("Archive exceeds the compressed size limit".to_owned());
            }
            if total > TOTAL {
                return Err("Archive exceeds the total uncompressed size limit".to_owned());
            }
        }
        plan.push(planned);
    }
    if too_dense(total, compressed) {
        return Err("Archive exceeds the aggregate compression ratio limit".to_owned());
    }
    Ok(plan)
}

fn too_dense(size: u64, packed: u64) -> bool {
    size > 0 && size > packed.saturating_mul(RATIO)
}

/// Where an entry goes, if it may go anywhere.
fn planned(index: usize, entry: &ZipFile<'_, Cursor<&[u8]>>) -> Result<Planned, Why> {
    let name = entry.name().map_err(|_| no_archive())?.into_owned();
    if name.is_empty() || name.contains('\0') {
        return Err("Archive contains an unsafe empty or NUL path".to_owned());
    }
    let portable = name.replace('\\', "/");
    let drive = portable.as_bytes().get(1) == Some(&b':');
    let path = normal(&portable).filter(|path| !path.as_os_str().is_empty() && !drive);
    let Some(path) = path else {
        return Err(format!("Archive contains an unsafe path: {name}"));
    };
    let mode = entry.unix_mode().unwrap_or_default();
    let is_dir = entry.is_dir() || portable.ends_with('/');
    match mode & KIND {
        LINK => return Err(format!("Archive contains a symbolic link: {name}")),
        0 | REGULAR | DIRECTORY => {}
        _ => return Err(format!("Archive contains a non-regular entry: {name}")),
    }
    if is_dir && entry.size() != 0 {
        return Err(format!("Archive directory has unexpected content: {name}"));
    }
    Ok(Planned {
        index,
        path,
        size: entry.size(),
        executable: mode & 0o111 != 0,
        is_dir,
        name,
    })
}
