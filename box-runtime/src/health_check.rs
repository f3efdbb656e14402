//! Detects an agent that does not answer while a call waits for it.

use std::pin::pin;
use std::time::Duration;

use box_protocol::BoxError;
use box_protocol::actions::{AgentHealth, AgentHealthParams};
use box_protocol::error::{Detail, Subject};
use box_rpc::Action;
use tokio::time::{sleep, timeout};

use crate::box_actor::agent_access::AgentLease;
use crate::box_actor::agents_error;

/// Interval between health checks during a call.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum time for the agent to answer a health check.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

impl AgentLease {
    /// Sends a call to the agent and waits while the agent answers health checks.
    pub(crate) async fn call<A: Action>(&self, params: &A::Params) -> Result<A::Result, BoxError> {
        let answer = self
            .with_health_checks(self.agent.call::<A>(params))
            .await?;
        answer.map_err(agents_error)
    }

    /// Waits for work of the agent while the agent answers health checks.
    ///
    /// The work may take any time. A frozen box does not have to answer.
    pub(crate) async fn with_health_checks<T>(
        &self,
        work: impl Future<Output = T>,
    ) -> Result<T, BoxError> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                () = sleep(CHECK_INTERVAL) => {}
            }
            let health = AgentHealthParams::default();
            let check = timeout(ANSWER_TIMEOUT, self.agent.call::<AgentHealth>(&health));
            let is_healthy = tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                answer = check => answer.is_ok(),
            };
            if !is_healthy && !self.entry().is_frozen() {
                return Err(self.unresponsive());
            }
        }
    }

    fn unresponsive(&self) -> BoxError {
        let (id, seconds) = (&self.spec().box_id, ANSWER_TIMEOUT.as_secs());
        let message = format!(
            "box {id}: its agent has not answered for {seconds} s; try again, or delete it with force"
        );
        BoxError::unavailable(message).with_detail(&Detail::about(Subject::Box))
    }
}
