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
    /// How often the rules have changed that threads enter under. Those of an earlier time go.
    age: u64,
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

    /// Has every step from here on done under the rules there are now.
    pub(super) fn renew(&self) {
        let mut queue = self.0.queue();
        queue.age += 1;
        // What there is goes when its work is done, and is not counted among the threads any more.
        (queue.threads, queue.idle) = (0, 0);
        while queue.threads < queue.jobs.len().min(THREADS) && self.grow(&mut queue) {}
        drop(queue);
        self.0.work.notify_all();
    }

    fn give(&self, job: Job) -> Result<(), BoxError> {
        let mut queue = self.0.queue();
        let wanting = queue.idle <= queue.jobs.len() && queue.threads < THREADS;
        // Otherwise the others will come to it.
        if wanting && !self.grow(&mut queue) && queue.threads == 0 {
            return Err(BoxError::capacity("the box has no room for another thread"));
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.0.work.notify_one();
        Ok(())
    }

    /// Starts another thread, if there is room for one.
    fn grow(&self, queue: &mut Queue) -> bool {
        let (shared, age) = (Arc::clone(&self.0), queue.age);
        let thread = std::thread::Builder::new().name("files".into());
        let thread = thread.stack_size(STACK).spawn(move || shared.serve(age));
        queue.threads += usize::from(thread.is_ok());
        thread.is_ok()
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, age: u64) {
        if let Some(guest) = &self.guest
            && guest.enter().is_err()
        {
            let mut queue = self.queue();
            if queue.age == age {
                queue.threads -= 1;
                if queue.threads == 0 {
                    // Their callers are told that it failed.
                    queue.jobs.clear();
                }
            }
            return;
        }
        let mut queue = self.queue();
        while queue.age == age {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                // The caller is told: the step's way to answer is dropped with it.
                let _ = catch_unwind(AssertUnwindSafe(job));
                queue = self.queue();
                continue;
            }
            queue.idle += 1;
            let rests = |queue: &mut Queue| queue.age == age && queue.jobs.is_empty();
            let waited = self.work.wait_timeout_while(queue, PATIENCE, rests);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
            if queue.age == age {
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
    async fn after_a_change_of_rules_other_threads_do_what_waits_and_what_comes() {
        let pool = Pool::new(None);
        let who = |pool: Pool| async move { pool.run(|_| Ok(std::thread::current().id())).await };
        // A step is answered before its thread is back.
        let is_back = async |pool: &Pool| {
            while pool.0.queue().idle == 0 {
                tokio::task::yield_now().await;
            }
        };
        let before = who(pool.clone()).await.unwrap();
        is_back(&pool).await;
        assert_eq!(who(pool.clone()).await.unwrap(), before, "control");
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let busy: Vec<_> = (0..THREADS)
            .map(|_| {
                let (pool, gate) = (pool.clone(), Arc::clone(&gate));
                tokio::spawn(async move {
                    pool.run(move |_| {
                        let _ = gate.lock().unwrap().recv();
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
        let waiting = tokio::spawn(who(pool.clone()));
        while pool.0.queue().jobs.is_empty() {
            tokio::task::yield_now().await;
        }
        pool.renew();
        let after = waiting.await.unwrap().unwrap();
        drop(go);
        for one in busy {
            assert_ne!(one.await.unwrap().unwrap(), after);
        }
        is_back(&pool).await;
        assert_eq!(who(pool).await.unwrap(), after);
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
