//! Process group of a child: always ended, and never confused with another.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::{net::unix::pipe, process::Child, sync::watch};

/// Time a group has to react to a request before the next, stronger one.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// A running group, led by a child of this process.
#[derive(Debug)]
pub(super) struct Group {
    /// The leader, until it is reaped.
    /// The kernel may reuse its process id, which is also the group id, after that.
    leader: Mutex<Option<Pid>>,
    reaped: watch::Sender<bool>,
}

impl Group {
    /// Takes over `child`, the leader of its group, and reaps it when it ends.
    pub(super) fn watch(child: Child) -> Arc<Self> {
        let leader = child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .and_then(Pid::from_raw);
        let group = Arc::new(Self {
            leader: Mutex::new(leader),
            reaped: watch::Sender::new(false),
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
            // Fails if the whole group is gone, which is the intended state.
            let _ = rustix::process::kill_process_group(leader, signal);
        }
    }

    /// Ends the group with increasing force; returns when its leader is reaped.
    /// Closing its input was the first request.
    pub(super) async fn end(&self) {
        for signal in [Signal::TERM, Signal::KILL] {
            if self.reaped_in_time().await {
                return;
            }
            self.signal(signal);
        }
        self.reaped_in_time().await;
    }

    /// Whether the leader is reaped within the grace period.
    async fn reaped_in_time(&self) -> bool {
        let mut reaped = self.reaped.subscribe();
        tokio::time::timeout(GRACE, reaped.wait_for(|reaped| *reaped))
            .await
            .is_ok()
    }

    /// Kills the rest of the group and forgets its id.
    /// The caller must do this before it reaps the leader.
    fn kill_and_forget(&self) {
        self.signal(Signal::KILL);
        *self.leader.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Waits for the leader. If the async runtime drops it, it kills the group as well.
struct Reaper {
    child: Child,
    group: Arc<Group>,
}

impl Reaper {
    async fn run(mut self, leader: Option<Pid>) {
        if let Some(leader) = leader {
            wait_for_exit(leader).await;
        }
        // Where the kernel cannot watch a leader without reaping it, the leader is reaped first. In theory, the kernel
        // may reuse the id in between.
        if self.is_running() {
            let _ = self.child.wait().await;
        }
        self.group.kill_and_forget();
        let _ = self.child.wait().await;
        self.group.reaped.send_replace(true);
    }

    /// Checks the leader without reaping it.
    fn is_running(&self) -> bool {
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
        self.group.kill_and_forget();
    }
}

/// Waits until `leader` has ended, without reaping it.
/// Returns at once if the kernel does not support this.
async fn wait_for_exit(leader: Pid) {
    let Ok(pidfd) = rustix::process::pidfd_open(leader, PidfdFlags::NONBLOCK) else {
        return;
    };
    // Tokio offers no other safe way to wait for an arbitrary descriptor. The pidfd is never read.
    if let Ok(pidfd) = pipe::Receiver::from_owned_fd_unchecked(pidfd) {
        let _ = pidfd.readable().await;
    }
}
