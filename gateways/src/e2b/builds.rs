//! The builds that run in this server.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The builds that run in this server.
#[derive(Debug, Default)]
pub(super) struct Builds(Mutex<HashSet<String>>);

impl Builds {
    /// Returns the ids of all of them.
    pub(super) fn running(&self) -> HashSet<String> {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        running.clone()
    }

    /// Adds a build until the result is dropped; `None` if it runs already.
    pub(super) fn begin(self: &Arc<Self>, build: &str) -> Option<RunningBuild> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let build = build.to_owned();
        running.insert(build.clone()).then(|| RunningBuild {
            builds: Arc::clone(self),
            build,
        })
    }
}

/// A build that counts as running.
pub(super) struct RunningBuild {
    builds: Arc<Builds>,
    build: String,
}

impl Drop for RunningBuild {
    fn drop(&mut self) {
        let running = self.builds.0.lock();
        let mut running = running.unwrap_or_else(PoisonError::into_inner);
        running.remove(&self.build);
    }
}
