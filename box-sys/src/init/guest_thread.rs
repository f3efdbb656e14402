//! Threads of init that touch files as the guest would: same rights, same owner of what they make, same Landlock rules.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use super::Init;
use crate::raw;

/// What turns a thread of init into one that touches files as the guest.
#[derive(Debug)]
pub struct GuestThread {
    /// The guest's id, where init is somebody else.
    id: Option<u32>,
    landlock: Option<OwnedFd>,
}

impl Init {
    /// What threads to come need for that. Rules that are added later reach those that enter later.
    pub fn guest_thread(&self) -> io::Result<GuestThread> {
        let landlock = self.landlock.as_ref();
        Ok(GuestThread {
            id: self.two_uids.then_some(self.plan.guest.id),
            landlock: landlock.map(|fd| raw::duplicate(fd.as_fd())).transpose()?,
        })
    }
}

impl GuestThread {
    /// Lets the calling thread, and no other, touch files as the guest, for good. It keeps init's ids for everything else, so
    /// that the guest cannot signal it. An error leaves it unfit for any file.
    pub fn enter(&self) -> io::Result<()> {
        // It may be init's first thread after its own.
        raw::reset_signal_handlers();
        if let Some(id) = self.id {
            raw::set_file_ids(id)?;
        }
        if let Some(landlock) = &self.landlock {
            raw::landlock_restrict(landlock.as_raw_fd())?;
        }
        Ok(())
    }
}
