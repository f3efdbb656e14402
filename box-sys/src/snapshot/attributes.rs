//! Copies owner, mode, extended attributes and times of a file.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::fs::{AtFlags, Gid, Mode, Stat, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use super::{Owners, VersionTimes};
use crate::mounts::chown;

/// Id for files of other users.
const UNMAPPED: u32 = 65_534;

/// Largest list and largest value of extended attributes that the kernel has.
const XATTR_MAX: usize = 64 << 10;

/// Names of access control lists, which contain ids.
const LISTS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// Attributes of an overlay that describe a file without the layers below. The last one is of Box.
const OVERLAY_MARKS: [&[u8]; 4] = [b"opaque", b"whiteout", b"whiteouts", b"taken"];

/// Attributes of an overlay without which a file is incomplete. Boxes never have them.
const OVERLAY_PARTS: [&[u8]; 2] = [b"metacopy", b"redirect"];

/// Copies attributes.
#[derive(Debug)]
pub(super) struct Attributes {
    owners: Owners,
    made: VersionTimes,
}

impl Attributes {
    pub(super) fn new(owners: Owners) -> Self {
        let made = VersionTimes::new(matches!(owners, Owners::OfBox { .. }));
        Self { owners, made }
    }

    /// How the times of the box's versions are read and stored.
    pub(super) fn made(&self) -> VersionTimes {
        self.made
    }

    /// Copies all attributes of an open file, and stores when the box made its version.
    pub(super) fn copy(
        &self,
        from: &OwnedFd,
        to: &OwnedFd,
        stat: &Stat,
        made_at: Option<i64>,
    ) -> io::Result<()> {
        if let Some(ids) = self.ids(stat) {
            chown(to, "", ids)?;
        }
        // After the owner, whose change clears bits of the mode.
        rustix::fs::fchmod(to, Mode::from_raw_mode(stat.st_mode))?;
        self.copy_extended(from, to)?;
        if let Some(made_at) = made_at {
            self.made.store(to, made_at)?;
        }
        Ok(rustix::fs::futimens(to, &times(stat))?)
    }

    /// Copies owner, mode and times of a link or a special file.
    pub(super) fn copy_to_name(&self, dir: &OwnedFd, name: &CStr, stat: &Stat) -> io::Result<()> {
        if let Some((user, group)) = self.ids(stat) {
            let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
            rustix::fs::chownat(dir, name, user, group, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_symlink() {
            // The name is new, and only this process knows the directory.
            let mode = Mode::from_raw_mode(stat.st_mode);
            rustix::fs::chmodat(dir, name, mode, AtFlags::empty())?;
        }
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        Ok(rustix::fs::utimensat(dir, name, &times(stat), flags)?)
    }

    /// The ids of a copy, unless they are those of this process.
    fn ids(&self, stat: &Stat) -> Option<(u32, u32)> {
        match self.owners {
            Owners::Same => None,
            Owners::OfBox { .. } => Some((self.id(stat.st_uid), self.id(stat.st_gid))),
        }
    }

    /// The id in a box.
    pub(super) fn id(&self, id: u32) -> u32 {
        match self.owners {
            Owners::Same => id,
            // The server made the file. In a box, that is root.
            Owners::OfBox { .. } if id == 0 => 0,
            Owners::OfBox { base, count } => {
                let inside = id.checked_sub(base).filter(|inside| *inside < count);
                inside.unwrap_or(UNMAPPED)
            }
        }
    }

    /// Name of a mark of the overlay.
    pub(super) fn mark(&self, mark: &str) -> String {
        match self.owners {
            Owners::OfBox { .. } => format!("trusted.overlay.{mark}"),
            Owners::Same => format!("user.overlay.{mark}"),
        }
    }

    fn copy_extended(&self, from: &OwnedFd, to: &OwnedFd) -> io::Result<()> {
        let mut names = [0; 256];
        let names = match rustix::fs::flistxattr(from, &mut names) {
            // Most files have none.
            Ok(0) | Err(Errno::OPNOTSUPP) => return Ok(()),
            Ok(length) => names.get(..length).unwrap_or_default().to_vec(),
            Err(Errno::RANGE) => {
                let mut names = vec![0; XATTR_MAX];
                let length = rustix::fs::flistxattr(from, &mut names)?;
                names.truncate(length);
                names
            }
            Err(error) => return Err(error.into()),
        };
        let names = names.split(|byte| *byte == 0);
        for name in names.filter(|name| !name.is_empty()) {
            if !self.is_copied(name)? {
                continue;
            }
            let mut value = vec![0; XATTR_MAX];
            let length = match rustix::fs::fgetxattr(from, name, &mut value) {
                Err(Errno::NODATA) => continue,
                length => length?,
            };
            value.truncate(length);
            if LISTS.contains(&name) {
                self.map_list(&mut value);
            }
            rustix::fs::fsetxattr(to.as_fd(), name, &value, XattrFlags::empty())?;
        }
        Ok(())
    }

    /// Whether a snapshot has this extended attribute.
    ///
    /// The kernel's own attributes of this machine stay out, as labels and the origin of a copied
    /// file.
    fn is_copied(&self, name: &[u8]) -> io::Result<bool> {
        let overlay: &[u8] = match self.owners {
            Owners::OfBox { .. } => b"trusted.overlay.",
            Owners::Same => b"user.overlay.",
        };
        if let Some(mark) = name.strip_prefix(overlay) {
            // A guest can set attributes of users, but not trusted ones.
            let is_trusted = matches!(self.owners, Owners::OfBox { .. });
            if is_trusted && OVERLAY_PARTS.contains(&mark) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            return Ok(OVERLAY_MARKS.contains(&mark) || mark.starts_with(b"overlay."));
        }
        Ok(name.starts_with(b"user.") || name.starts_with(b"trusted.") || LISTS.contains(&name))
    }

    /// Maps the ids in an access control list.
    fn map_list(&self, list: &mut [u8]) {
        /// Tags of entries with an id, in the kernel's layout: tag, permissions, id.
        const USER: [u8; 2] = 2_u16.to_le_bytes();
        const GROUP: [u8; 2] = 8_u16.to_le_bytes();
        /// Version of the layout, before the entries.
        const VERSION: usize = 4;
        for entry in list
            .get_mut(VERSION..)
            .unwrap_or_default()
            .chunks_exact_mut(8)
        {
            let [t0, t1, _, _, id @ ..] = entry else {
                continue;
            };
            if let ([t0, t1], Ok(bytes)) = ([*t0, *t1], <[u8; 4]>::try_from(&*id))
                && ([t0, t1] == USER || [t0, t1] == GROUP)
            {
                id.copy_from_slice(&self.id(u32::from_le_bytes(bytes)).to_le_bytes());
            }
        }
    }
}

fn times(stat: &Stat) -> Timestamps {
    let time = |seconds, nanos: u64| Timespec {
        tv_sec: seconds,
        tv_nsec: i64::try_from(nanos).unwrap_or(0),
    };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    }
}
