//! The threads that touch files: few, started when there is work, ended when there is none. The agent's own thread waits
//! for a disk only where it starts a command.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::BoxError;
use box_sys::GuestThread;
use tokio::sync::oneshot;

/// Threads at most. They count against the box's own limit of processes.
const THREADS: usize = 4;

/// How long a thread waits for work before it ends.
const PATIENCE: Duration = Duration::from_secs(10);

/// Enough for a search; trees are walked without recursion.
const STACK: usize = 1 << 20;

/// A step of a call. How many wait is bounded by the calls that one agent takes.
type Job = Box<dyn FnOnce() + Send>;

/// The threads.
#[derive(Debug, Clone)]
pub(super) struct Pool(Arc<Shared>);

struct Shared {
    guest: Option<GuestThread>,
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
    /// Of those, how many wait for work.
    idle: usize,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// Whether anybody still wants what a step does.
#[derive(Debug, Clone, Default)]
pub(super) struct Wanted(Arc<AtomicBool>);

impl Wanted {
    /// Nobody does any more.
    pub(super) fn withdraw(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// An error once nobody does.
    pub(super) fn check(&self) -> Result<(), BoxError> {
        if self.0.load(Ordering::Relaxed) {
            return Err(BoxError::cancelled("the call was cancelled"));
        }
        Ok(())
    }
}

/// Withdraws the step when the call is dropped.
struct Withdraw(Wanted);

impl Drop for Withdraw {
    fn drop(&mut self) {
        self.0.withdraw();
    }
}

impl Pool {
    /// No thread yet. Without a guest to be, threads stay who they are, which is for tests.
    pub(super) fn new(guest: Option<GuestThread>) -> Self {
        Self(Arc::new(Shared {
            guest,
            queue: Mutex::default(),
            work: Condvar::new(),
        }))
    }

    /// Does a step on one of the threads. Dropping the future lets the step end early.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        step: impl FnOnce(&Wanted) -> Result<T, BoxError> + Send + 'static,
    ) -> Result<T, BoxError> {
        let (reply, answer) = oneshot::channel();
        let withdraw = Withdraw(Wanted::default());
        let wanted = withdraw.0.clone();
        self.give(Box::new(move || {
            if wanted.check().is_ok() {
                let _ = reply.send(step(&wanted));
            }
        }))?;
        let failed = |_| BoxError::internal("the work on files failed");
        answer.await.map_err(failed)?
    }

    fn give(&self, job: Job) -> Result<(), BoxError> {
        let mut queue = self.0.queue();
        if queue.idle <= queue.jobs.len() && queue.threads < THREADS {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("files".into());
            match thread.stack_size(STACK).spawn(move || shared.serve()) {
                Ok(_) => queue.threads += 1,
                // The others will come to it.
                Err(_) if queue.threads > 0 => {}
                Err(_) => {
                    return Err(BoxError::capacity("the box has no room for another thread"));
                }
            }
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.0.work.notify_one();
        Ok(())
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        if let Some(guest) = &self.guest
            && guest.enter().is_err()
        {
            let mut queue = self.queue();
            queue.threads -= 1;
            if queue.threads == 0 {
                // Their callers are told that it failed.
                queue.jobs.clear();
            }
            return;
        }
        let mut queue = self.queue();
        loop {
            while let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                // The caller is told: the step's way to answer is dropped with it.
                let _ = catch_unwind(AssertUnwindSafe(job));
                queue = self.queue();
            }
            queue.idle += 1;
            let waited = self
                .work
                .wait_timeout_while(queue, PATIENCE, |queue| queue.jobs.is_empty());
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
            queue.idle -= 1;
            if queue.jobs.is_empty() {
                queue.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn steps_run_on_few_threads_and_a_panic_is_an_error() {
        let pool = Pool::new(None);
        let failed = pool.run(|_| -> Result<(), _> { panic!("on purpose") });
        assert_eq!(
            failed.await.unwrap_err().code(),
            box_protocol::Code::Internal
        );
        let steps: Vec<_> = (0..64)
            .map(|_| {
                let pool = pool.clone();
                tokio::spawn(async move {
                    pool.run(|_| {
                        std::thread::sleep(Duration::from_millis(1));
                        Ok(std::thread::current().id())
                    })
                    .await
                })
            })
            .collect();
        let mut threads = std::collections::HashSet::new();
        for step in steps {
            threads.insert(step.await.unwrap().unwrap());
        }
        assert!((1..=THREADS).contains(&threads.len()), "{}", threads.len());
    }

    #[tokio::test]
    async fn a_dropped_call_ends_its_step() {
        let pool = Pool::new(None);
        let (ended, mut end) = tokio::sync::mpsc::channel(1);
        let step = tokio::spawn({
            let pool = pool.clone();
            async move {
                pool.run(move |wanted| {
                    while wanted.check().is_ok() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    let _ = ended.blocking_send(());
                    Ok(())
                })
                .await
            }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        step.abort();
        end.recv().await.unwrap();
    }
}
