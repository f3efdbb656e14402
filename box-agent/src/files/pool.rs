//! The threads that touch files: started on demand, ended when idle.
//!
//! The agent's main thread waits for a disk only when it starts a command.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::BoxError;
use box_sys::GuestThread;
use tokio::sync::oneshot;

/// Maximum number of threads. They count against the process limit of the box.
const THREADS: usize = 4;

/// How long an idle thread waits for work before it ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Stack size of a thread.
///
/// It suffices for a search; trees are walked without recursion.
const STACK: usize = 1 << 20;

/// A step of a call. The limit on calls in flight bounds the queue.
type Job = Box<dyn FnOnce() + Send>;

/// The pool of threads.
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
    /// The number of threads that wait for work.
    idle: usize,
    /// Incremented when the access rules change. Threads of an earlier generation end.
    generation: u64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// Whether the call of a step was cancelled.
#[derive(Debug, Clone, Default)]
pub(super) struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Cancels the step.
    pub(super) fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns an error once the call is cancelled.
    pub(super) fn check(&self) -> Result<(), BoxError> {
        if self.0.load(Ordering::Relaxed) {
            return Err(BoxError::cancelled("the call was cancelled"));
        }
        Ok(())
    }
}

/// Cancels the step when the call is dropped.
struct CancelOnDrop(CancelFlag);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Pool {
    /// Creates a pool without threads.
    ///
    /// Without `guest`, as in tests, threads keep the rights of the process.
    pub(super) fn new(guest: Option<GuestThread>) -> Self {
        Self(Arc::new(Shared {
            guest,
            queue: Mutex::default(),
            work: Condvar::new(),
        }))
    }

    /// Runs a step on one of the threads. Dropping the future cancels the step.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        step: impl FnOnce(&CancelFlag) -> Result<T, BoxError> + Send + 'static,
    ) -> Result<T, BoxError> {
        let (reply, answer) = oneshot::channel();
        let guard = CancelOnDrop(CancelFlag::default());
        let cancel = guard.0.clone();
        self.submit(Box::new(move || {
            if cancel.check().is_ok() {
                let _ = reply.send(step(&cancel));
            }
        }))?;
        let failed = |_| BoxError::internal("file: the operation failed");
        answer.await.map_err(failed)?
    }

    /// Replaces the threads, so that later steps run under the current access rules.
    pub(super) fn replace_threads(&self) {
        let mut queue = self.0.queue();
        queue.generation += 1;
        // The old threads end after their current job and no longer count.
        (queue.threads, queue.idle) = (0, 0);
        while queue.threads < queue.jobs.len().min(THREADS) && self.spawn_thread(&mut queue) {}
        drop(queue);
        self.0.work.notify_all();
    }

    fn submit(&self, job: Job) -> Result<(), BoxError> {
        let mut queue = self.0.queue();
        let needs_thread = queue.idle <= queue.jobs.len() && queue.threads < THREADS;
        // Otherwise an existing thread takes the job later.
        if needs_thread && !self.spawn_thread(&mut queue) && queue.threads == 0 {
            return Err(BoxError::capacity(
                "file: the box cannot start a thread; end processes or raise its process limit",
            ));
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.0.work.notify_one();
        Ok(())
    }

    /// Starts another thread, if the system allows it.
    fn spawn_thread(&self, queue: &mut Queue) -> bool {
        let (shared, generation) = (Arc::clone(&self.0), queue.generation);
        let thread = std::thread::Builder::new().name("files".into());
        let thread = thread
            .stack_size(STACK)
            .spawn(move || shared.serve(generation));
        queue.threads += usize::from(thread.is_ok());
        thread.is_ok()
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, generation: u64) {
        if let Some(guest) = &self.guest
            && guest.enter().is_err()
        {
            let mut queue = self.queue();
            if queue.generation == generation {
                queue.threads -= 1;
                if queue.threads == 0 {
                    // Dropping the jobs returns an error to their callers.
                    queue.jobs.clear();
                }
            }
            return;
        }
        let mut queue = self.queue();
        while queue.generation == generation {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                // A panic drops the reply channel, which returns an error to the caller.
                let _ = catch_unwind(AssertUnwindSafe(job));
                queue = self.queue();
                continue;
            }
            queue.idle += 1;
            let is_idle =
                |queue: &mut Queue| queue.generation == generation && queue.jobs.is_empty();
            let waited = self.work.wait_timeout_while(queue, IDLE_TIMEOUT, is_idle);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
            if queue.generation == generation {
                queue.idle -= 1;
                if queue.jobs.is_empty() {
                    queue.threads -= 1;
                    return;
                }
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
    async fn replaced_threads_run_neither_waiting_nor_later_steps() {
        let pool = Pool::new(None);
        let thread_id =
            |pool: Pool| async move { pool.run(|_| Ok(std::thread::current().id())).await };
        // A step replies before its thread is idle again.
        let wait_idle = async |pool: &Pool| {
            while pool.0.queue().idle == 0 {
                tokio::task::yield_now().await;
            }
        };
        let before = thread_id(pool.clone()).await.unwrap();
        wait_idle(&pool).await;
        assert_eq!(thread_id(pool.clone()).await.unwrap(), before, "control");
        let (release, blocked) = std::sync::mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        let busy: Vec<_> = (0..THREADS)
            .map(|_| {
                let (pool, blocked) = (pool.clone(), Arc::clone(&blocked));
                tokio::spawn(async move {
                    pool.run(move |_| {
                        let _ = blocked.lock().unwrap().recv();
                        Ok(std::thread::current().id())
                    })
                    .await
                })
            })
            .collect();
        let all_busy =
            |queue: &Queue| queue.threads == THREADS && queue.idle == 0 && queue.jobs.is_empty();
        while !all_busy(&pool.0.queue()) {
            tokio::task::yield_now().await;
        }
        let waiting = tokio::spawn(thread_id(pool.clone()));
        while pool.0.queue().jobs.is_empty() {
            tokio::task::yield_now().await;
        }
        pool.replace_threads();
        let after = waiting.await.unwrap().unwrap();
        drop(release);
        for step in busy {
            assert_ne!(step.await.unwrap().unwrap(), after);
        }
        wait_idle(&pool).await;
        assert_eq!(thread_id(pool).await.unwrap(), after);
    }

    #[tokio::test]
    async fn a_dropped_call_cancels_its_step() {
        let pool = Pool::new(None);
        let (running, mut start) = tokio::sync::mpsc::channel(1);
        let (ended, mut end) = tokio::sync::mpsc::channel(1);
        let step = tokio::spawn({
            let pool = pool.clone();
            async move {
                pool.run(move |cancel| {
                    let _ = running.blocking_send(());
                    while cancel.check().is_ok() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    let _ = ended.blocking_send(());
                    Ok(())
                })
                .await
            }
        });
        start.recv().await.unwrap();
        step.abort();
        end.recv().await.unwrap();
    }
}
