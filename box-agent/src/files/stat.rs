//! What is known of a file, and what may be changed about it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use box_protocol::actions::{
    FileAttributesParams, FileKind, FileOutcome, FileStatInfo, FileStatParams, FileStatResult,
};
use box_protocol::{BoxError, UnixMs};
use box_sys::Guest;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;

use super::error::{About, fault};
use super::ground::{Ground, Step, too_large};

/// Paths that one call may look at.
const PATHS: usize = 4096;

/// The bits of a mode that may be set through Box: no set-id, no sticky bit.
pub(super) const MODE_BITS: u32 = 0o777;

/// `file.stat`.
pub(super) fn stat(step: &Step<'_>, params: &FileStatParams) -> Result<FileStatResult, BoxError> {
    if params.paths.len() > PATHS {
        return Err(too_large("paths", "paths", PATHS));
    }
    let mut paths = BTreeMap::new();
    for asked in &params.paths {
        step.wanted.check()?;
        let looked = step
            .ground
            .path(asked, params.expand)
            .and_then(|path| look(step.ground, path, params.follow));
        let outcome = match looked {
            Ok(info) => FileOutcome::Stat(info),
            Err(error) => FileOutcome::Error(fault(&error)),
        };
        paths.insert(asked.clone(), outcome);
    }
    Ok(FileStatResult { paths })
}

fn look(ground: &Ground, path: String, follow: bool) -> Result<FileStatInfo, BoxError> {
    let link = if follow {
        OFlags::empty()
    } else {
        OFlags::NOFOLLOW
    };
    let found = ground.open(&path, OFlags::PATH | link).about(&path)?;
    let stat = rustix::fs::fstat(&found).about(&path)?;
    let mut info = info(&ground.guest, path, &stat);
    if info.kind == FileKind::Symlink {
        info.target = target(&found, "");
    }
    Ok(info)
}

/// Where a link leads.
pub(super) fn target(dir: &OwnedFd, name: &str) -> Option<String> {
    let target = rustix::fs::readlinkat(dir, name, Vec::new()).ok()?;
    Some(target.to_string_lossy().into_owned())
}

/// What is told of a file.
pub(super) fn info(guest: &Guest, path: String, stat: &Stat) -> FileStatInfo {
    FileStatInfo {
        path,
        kind: kind(stat),
        size: size(stat),
        mode: stat.st_mode & 0o7777,
        owner: name_of(guest, stat.st_uid),
        group: name_of(guest, stat.st_gid),
        modified_at: UnixMs(modified(stat)),
        etag: etag(stat),
        target: None,
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

/// Another one whenever the file is another one, or has other bytes or another mode.
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

fn name_of(guest: &Guest, id: u32) -> String {
    match id {
        0 => "root".to_owned(),
        // What the kernel shows for every id that is not the box's.
        65534 => "nobody".to_owned(),
        id if id == guest.id => guest.name.clone(),
        id => id.to_string(),
    }
}

/// Mode and owner, as they are asked for and allowed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Change {
    pub(super) mode: Option<u32>,
    owner: bool,
    group: bool,
}

impl Change {
    /// Checked: only the guest's own ids are mapped for anybody to give.
    pub(super) fn new(
        ground: &Ground,
        mode: Option<u32>,
        owner: Option<&str>,
        group: Option<&str>,
    ) -> Result<Self, BoxError> {
        if mode.is_some_and(|mode| mode & !MODE_BITS != 0) {
            return Err(BoxError::validation(
                "mode: only permissions, no set-id or sticky bit",
            ));
        }
        for (field, asked) in [("owner", owner), ("group", group)] {
            if asked.is_some_and(|asked| !is_guest(&ground.guest, asked)) {
                return Err(BoxError::denied(format!("{field}: not of this box")));
            }
        }
        Ok(Self {
            mode,
            owner: owner.is_some(),
            group: group.is_some(),
        })
    }

    /// Gives an open file these, or this mode if none was asked for.
    pub(super) fn apply(
        &self,
        ground: &Ground,
        file: impl AsFd,
        otherwise: u32,
    ) -> Result<(), Errno> {
        let mode = self.mode.unwrap_or(otherwise);
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & MODE_BITS))?;
        self.own(ground, file)
    }

    fn own(&self, ground: &Ground, file: impl AsFd) -> Result<(), Errno> {
        if !self.owner && !self.group {
            return Ok(());
        }
        let id = ground.guest.id;
        rustix::fs::chownat(
            file,
            "",
            self.owner.then(|| Uid::from_raw(id)),
            self.group.then(|| Gid::from_raw(id)),
            AtFlags::EMPTY_PATH,
        )
    }
}

/// Whether this name or number is the guest's.
pub(super) fn is_guest(guest: &Guest, asked: &str) -> bool {
    asked == guest.name || asked.parse() == Ok(guest.id)
}

/// `file.attributes`.
pub(super) fn attributes(
    step: &Step<'_>,
    params: &FileAttributesParams,
) -> Result<FileStatInfo, BoxError> {
    let ground = step.ground;
    let path = ground.path(&params.path, params.expand)?;
    let (owner, group) = (params.owner.as_deref(), params.group.as_deref());
    let change = Change::new(ground, params.mode, owner, group)?;
    let found = ground.open(&path, OFlags::PATH).about(&path)?;
    let before = rustix::fs::fstat(&found).about(&path)?;
    if !matches!(kind(&before), FileKind::File | FileKind::Directory) {
        return Err(Errno::NXIO).about(&path);
    }
    change.own(ground, &found).about(&path)?;
    if let Some(mode) = change.mode {
        // The one link through which the mode of a file can be changed that may not be opened: this process's own.
        let own = format!("/proc/self/fd/{}", found.as_raw_fd());
        let mode = Mode::from_raw_mode(mode);
        rustix::fs::chmod(own, mode).about(&path)?;
    }
    let stat = rustix::fs::fstat(&found).about(&path)?;
    Ok(info(&ground.guest, path, &stat))
}
