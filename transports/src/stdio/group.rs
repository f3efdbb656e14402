//! A process group that is never left behind, and never mistaken for another one.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::{net::unix::pipe, process::Child, sync::watch};

/// How long a group may take to follow a request before the next, ruder one.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// A running group, led by a child of ours.
#[derive(Debug)]
pub(super) struct Group {
    /// The leader, until it is reaped: only so long is its number, which is also the group's,
    /// certain not to belong to somebody else.
    leader: Mutex<Option<Pid>>,
    gone: watch::Sender<bool>,
}

impl Group {
    /// Takes over `child`, which leads a group of its own, and reaps it whenever it ends.
    pub(super) fn watch(child: Child) -> Arc<Self> {
        let leader = child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .and_then(Pid::from_raw);
        let group = Arc::new(Self {
            leader: Mutex::new(leader),
            gone: watch::Sender::new(false),
        });
        let reaper = Reaper {
            child,
            group: Arc::clone(&group),
        };
        tokio::spawn(reaper.run(leader));
        group
    }

    /// Sends `signal` to every process of the group, if it still exists.
    pub(super) fn signal(&self, signal: Signal) {
        let leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(leader) = *leader {
            // Fails when all of the group is gone, which is what is wanted.
            let _ = rustix::process::kill_process_group(leader, signal);
        }
    }

    /// Asks the group to end, with rising force, and returns when its leader is reaped. Closing its
    /// input was the first request.
    pub(super) async fn end(&self) {
        for signal in [Signal::TERM, Signal::KILL] {
            if self.gone_in_time().await {
                return;
            }
            self.signal(signal);
        }
        self.gone_in_time().await;
    }

    /// Whether the leader is reaped within the grace.
    async fn gone_in_time(&self) -> bool {
        let mut gone = self.gone.subscribe();
        tokio::time::timeout(GRACE, gone.wait_for(|gone| *gone))
            .await
            .is_ok()
    }

    /// Kills what is left of the group and forgets its number. Must happen before the leader is
    /// reaped.
    fn bury(&self) {
        self.signal(Signal::KILL);
        *self.leader.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Waits for the leader. Dropped with the runtime it buries the group as well.
struct Reaper {
    child: Child,
    group: Arc<Group>,
}

impl Reaper {
    async fn run(mut self, leader: Option<Pid>) {
        if let Some(leader) = leader {
            wait_for_exit(leader).await;
        }
        // A leader that cannot be watched without reaping it is reaped first, and the number may
        // in theory have been given away in between.
        if self.still_runs() {
            let _ = self.child.wait().await;
        }
        self.group.bury();
        let _ = self.child.wait().await;
        self.group.gone.send_replace(true);
    }

    /// Looks without reaping.
    fn still_runs(&self) -> bool {
        let leader = self
            .group
            .leader
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        leader.is_some_and(|leader| {
            let options = rustix::process::WaitIdOptions::EXITED
                | rustix::process::WaitIdOptions::NOHANG
                | rustix::process::WaitIdOptions::NOWAIT;
            matches!(
                rustix::process::waitid(rustix::process::WaitId::Pid(leader), options),
                Ok(None)
            )
        })
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.group.bury();
    }
}

/// Returns when `leader` has ended, without reaping it; or at once where the system cannot say.
async fn wait_for_exit(leader: Pid) {
    let Ok(pidfd) = rustix::process::pidfd_open(leader, PidfdFlags::NONBLOCK) else {
        return;
    };
    // Tokio has no safe way to wait for an arbitrary descriptor but this one; it is never read.
    if let Ok(pidfd) = pipe::Receiver::from_owned_fd_unchecked(pidfd) {
        let _ = pidfd.readable().await;
    }
}
