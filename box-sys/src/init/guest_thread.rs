//! Threads of init with the guest's file access: rights, owner and Landlock rules.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use super::Init;
use crate::raw;

/// Converts a thread of init to the guest's file access.
#[derive(Debug)]
pub struct GuestThread {
    /// User and group id of the guest, if they differ from those of init.
    ids: Option<(u32, u32)>,
    landlock: Option<OwnedFd>,
}

impl Init {
    /// Prepares the conversion of threads.
    ///
    /// Rules that are added later apply to threads that convert later.
    pub fn guest_thread(&self) -> io::Result<GuestThread> {
        let landlock = self.landlock.as_ref();
        let guest = &self.plan.guest;
        Ok(GuestThread {
            ids: self.two_uids.then_some((guest.id, guest.group)),
            landlock: landlock.map(|fd| raw::duplicate(fd.as_fd())).transpose()?,
        })
    }
}

impl GuestThread {
    /// Gives the calling thread the guest's file access. It cannot be undone.
    ///
    /// The thread keeps init's ids for everything else, so the guest cannot signal it. After an
    /// error, the thread must not access files.
    pub fn enter(&self) -> io::Result<()> {
        // The first additional thread installs handlers of the C library.
        raw::reset_signal_handlers();
        if let Some(ids) = self.ids {
            raw::set_file_ids(ids)?;
        }
        if let Some(landlock) = &self.landlock {
            raw::landlock_restrict(landlock.as_raw_fd())?;
        }
        Ok(())
    }
}
