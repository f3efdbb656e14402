//! `file.stat` and `file.attributes`.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use box_protocol::actions::{
    FileAttributesParams, FileKind, FileOutcome, FileStatInfo, FileStatParams, FileStatResult,
};
use box_protocol::{BoxError, UnixMs};
use box_sys::Guest;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, StatxFlags, Uid};
use rustix::io::Errno;

use super::error::{PathContext, fault};
use super::guest_root::{GuestRoot, Step, too_large};
use super::xattrs;

/// Maximum number of paths in one call.
const PATHS_MAX: usize = 4096;

/// Maximum bytes of the extended attributes in one reply.
const XATTR_BYTES: usize = 2 << 20;

/// The permitted bits of a mode: no set-id and no sticky bit.
pub(super) const MODE_BITS: u32 = 0o777;

/// `file.stat`.
pub(super) fn stat(step: &Step<'_>, params: &FileStatParams) -> Result<FileStatResult, BoxError> {
    if params.paths.len() > PATHS_MAX {
        return Err(too_large("the number of paths", "paths", PATHS_MAX));
    }
    let (mut paths, mut xattr_bytes) = (BTreeMap::new(), 0);
    for requested in &params.paths {
        step.cancel.check()?;
        let result = step
            .guest_root
            .path(requested, params.expand)
            .and_then(|path| stat_path(step.guest_root, path, params.follow));
        let outcome = match result {
            Ok(info) => {
                xattr_bytes += xattrs::bytes(&info.xattrs);
                if xattr_bytes > XATTR_BYTES {
                    let what = "the extended attributes of the paths";
                    return Err(too_large(what, "xattr_bytes", XATTR_BYTES));
                }
                FileOutcome::Stat(info)
            }
            Err(error) => FileOutcome::Error(fault(&error)),
        };
        paths.insert(requested.clone(), outcome);
    }
    Ok(FileStatResult { paths })
}

fn stat_path(guest_root: &GuestRoot, path: String, follow: bool) -> Result<FileStatInfo, BoxError> {
    let link = if follow {
        OFlags::empty()
    } else {
        OFlags::NOFOLLOW
    };
    let found = guest_root
        .open(&path, OFlags::PATH | link)
        .with_path(&path)?;
    let stat = rustix::fs::fstat(&found).with_path(&path)?;
    let mut info = info(&guest_root.guest, path, &stat);
    info.created_at = created_at(&found, "");
    match info.kind {
        FileKind::Symlink => info.target = target(&found, ""),
        FileKind::File | FileKind::Directory => info.xattrs = xattrs::read(&found, ""),
        FileKind::Other => {}
    }
    Ok(info)
}

/// The target of a symbolic link.
pub(super) fn target(dir: &OwnedFd, name: &str) -> Option<String> {
    let target = rustix::fs::readlinkat(dir, name, Vec::new()).ok()?;
    Some(target.to_string_lossy().into_owned())
}

/// The public form of a file's status.
pub(super) fn info(guest: &Guest, path: String, stat: &Stat) -> FileStatInfo {
    FileStatInfo {
        path,
        kind: kind(stat),
        size: size(stat),
        mode: stat.st_mode & 0o7777,
        owner: name_of(guest, guest.id, stat.st_uid),
        group: name_of(guest, guest.group, stat.st_gid),
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified_at: UnixMs(modified(stat)),
        created_at: None,
        etag: etag(stat),
        target: None,
        xattrs: BTreeMap::new(),
    }
}

pub(super) fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

fn modified(stat: &Stat) -> u64 {
    let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
    let nanos: u64 = stat.st_mtime_nsec;
    seconds
        .saturating_mul(1000)
        .saturating_add(nanos / 1_000_000)
}

/// When a file was created, if its file system records it. An empty name means the descriptor itself.
pub(super) fn created_at(dir: impl AsFd, name: &str) -> Option<UnixMs> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
    let stat = rustix::fs::statx(dir, name, flags, StatxFlags::BTIME).ok()?;
    let is_recorded = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    let seconds = u64::try_from(stat.stx_btime.tv_sec).ok()?;
    let millis = u64::from(stat.stx_btime.tv_nsec) / 1_000_000;
    is_recorded.then(|| UnixMs(seconds.saturating_mul(1000).saturating_add(millis)))
}

/// Changes whenever the file, its contents or its mode change.
pub(super) fn etag(stat: &Stat) -> String {
    format!(
        "{:x}-{:x}-{:x}.{:x}-{:x}.{:x}",
        stat.st_ino,
        stat.st_size,
        stat.st_mtime,
        stat.st_mtime_nsec,
        stat.st_ctime,
        stat.st_ctime_nsec
    )
}

pub(super) fn kind(stat: &Stat) -> FileKind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        _ => FileKind::Other,
    }
}

fn name_of(guest: &Guest, guest_id: u32, id: u32) -> String {
    match id {
        0 => "root".to_owned(),
        // The kernel shows this id for every id that is not mapped in the box.
        65534 => "nobody".to_owned(),
        id if id == guest_id => guest.name.clone(),
        id => id.to_string(),
    }
}

/// A validated change of mode and owner.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttributeChange {
    pub(super) mode: Option<u32>,
    owner: bool,
    group: bool,
}

impl AttributeChange {
    /// Validates a change. Only the guest's own ids are mapped in the box.
    pub(super) fn new(
        guest_root: &GuestRoot,
        mode: Option<u32>,
        owner: Option<&str>,
        group: Option<&str>,
    ) -> Result<Self, BoxError> {
        if mode.is_some_and(|mode| mode & !MODE_BITS != 0) {
            return Err(BoxError::validation(
                "mode: only permission bits are allowed, no set-id or sticky bit",
            ));
        }
        let guest = &guest_root.guest;
        for (field, kind, requested, id) in [
            ("owner", "user", owner, guest.id),
            ("group", "group", group, guest.group),
        ] {
            if let Some(requested) = requested.filter(|requested| !is_guest(guest, id, requested)) {
                let name = &guest.name;
                return Err(BoxError::denied(format!(
                    "{field}: {requested:?} is not a {kind} of this box; its only {kind} is {name}"
                )));
            }
        }
        Ok(Self {
            mode,
            owner: owner.is_some(),
            group: group.is_some(),
        })
    }

    /// Applies the change to an open file.
    ///
    /// The file gets `default_mode` if no mode was requested.
    pub(super) fn apply(
        &self,
        guest_root: &GuestRoot,
        file: impl AsFd,
        default_mode: u32,
    ) -> Result<(), Errno> {
        let mode = self.mode.unwrap_or(default_mode);
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & MODE_BITS))?;
        self.change_owner(guest_root, file)
    }

    fn change_owner(&self, guest_root: &GuestRoot, file: impl AsFd) -> Result<(), Errno> {
        if !self.owner && !self.group {
            return Ok(());
        }
        let guest = &guest_root.guest;
        rustix::fs::chownat(
            file,
            "",
            self.owner.then(|| Uid::from_raw(guest.id)),
            self.group.then(|| Gid::from_raw(guest.group)),
            AtFlags::EMPTY_PATH,
        )
    }
}

/// Whether this is the name of the guest, or its user or group id.
pub(super) fn is_guest(guest: &Guest, id: u32, requested: &str) -> bool {
    requested == guest.name || requested.parse() == Ok(id)
}

/// `file.attributes`.
pub(super) fn attributes(
    step: &Step<'_>,
    params: &FileAttributesParams,
) -> Result<FileStatInfo, BoxError> {
    let guest_root = step.guest_root;
    let path = guest_root.path(&params.path, params.expand)?;
    let (owner, group) = (params.owner.as_deref(), params.group.as_deref());
    let change = AttributeChange::new(guest_root, params.mode, owner, group)?;
    let found = guest_root.open(&path, OFlags::PATH).with_path(&path)?;
    let before = rustix::fs::fstat(&found).with_path(&path)?;
    if !matches!(kind(&before), FileKind::File | FileKind::Directory) {
        return Err(Errno::NXIO).with_path(&path);
    }
    change.change_owner(guest_root, &found).with_path(&path)?;
    if let Some(mode) = change.mode {
        // The only path to change the mode of a file that cannot be opened: the agent's own descriptor.
        let fd_path = format!("/proc/self/fd/{}", found.as_raw_fd());
        let mode = Mode::from_raw_mode(mode);
        rustix::fs::chmod(fd_path, mode).with_path(&path)?;
    }
    let stat = rustix::fs::fstat(&found).with_path(&path)?;
    let created_at = created_at(&found, "");
    Ok(FileStatInfo {
        created_at,
        xattrs: xattrs::read(&found, ""),
        ..info(&guest_root.guest, path, &stat)
    })
}
