//! Tests that an agent cannot write false entries to the audit log.

use std::sync::Mutex;

use box_protocol::actions::AgentEndsResult;
use box_protocol::{Exit, ExitWhy, PerStream, Role, SpecDraft, UnixMs};
use box_rpc::{Call, Caller, Handle, Limits, Options, Router, Session};
use box_transports::queue;
use tracing::span::{Attributes, Id, Record as Values};
use tracing::{Event, Metadata, Subscriber};

use super::*;

/// Counts the log lines about commands.
#[derive(Clone, Default)]
struct Lines(Arc<AtomicU64>);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "box_runtime::audit"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Values<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// An agent that computes its answer from the acknowledged count.
struct ScriptedAgent {
    answer: fn(u64) -> AgentEndsResult,
    acknowledged: Arc<Mutex<Vec<u64>>>,
}

impl Handle<AgentEnds> for ScriptedAgent {
    async fn handle(
        &self,
        params: AgentEndsParams,
        _: Call<AgentEnds>,
    ) -> Result<AgentEndsResult, BoxError> {
        self.acknowledged.lock().unwrap().push(params.acknowledged);
        Ok((self.answer)(params.acknowledged))
    }
}

fn ends(first: u64, count: usize) -> AgentEndsResult {
    let end = AgentEnd {
        command_id: CommandId::new("c").unwrap(),
        role: Role::Exec,
        exit: Exit::by_signal(9, ExitWhy::Killed),
        at: UnixMs(1),
        duration_ms: 1,
        size: PerStream::default(),
    };
    AgentEndsResult {
        first,
        ends: vec![end; count],
    }
}

/// Receives exits for ten seconds from an agent with `open` commands.
///
/// Returns the acknowledged counts, and the number of log lines.
async fn receive_from(answer: fn(u64) -> AgentEndsResult, open: u64) -> (Vec<u64>, u64) {
    let lines = Lines::default();
    let _counted = tracing::subscriber::set_default(lines.clone());
    let acknowledged = Arc::default();
    let agent = ScriptedAgent {
        answer,
        acknowledged: Arc::clone(&acknowledged),
    };
    let (near, far) = queue::pair(16);
    let router = Router::builder(Arc::new(agent)).on::<AgentEnds>().build();
    let _session = Session::start(far, router, Options::new(Caller::Local));
    let options = Options {
        limits: Limits::in_process(),
        ..Options::client()
    };
    let session = Session::start(near, Router::empty(), options);
    let entry = BoxEntry::new("me".into(), &SpecDraft::new("b").build().unwrap());
    let audit = Audit::default();
    audit.resume(
        Earlier {
            open,
            unreported: 0,
        },
        &session.peer(),
        &Arc::new(entry),
    );
    tokio::time::sleep(Duration::from_secs(10)).await;
    let acknowledged = acknowledged.lock().unwrap().clone();
    (acknowledged, lines.0.load(Ordering::Relaxed))
}

#[tokio::test(start_paused = true)]
async fn no_more_exits_are_logged_than_starts_and_excess_exits_cause_a_pause() {
    let (acknowledged, lines) = receive_from(|acknowledged| ends(acknowledged, 3), 7).await;
    assert_eq!(lines, 7);
    assert_eq!(
        acknowledged[..4],
        [0, 3, 6, 9],
        "reported exits are acknowledged"
    );
    assert!(acknowledged.len() < 15, "{}", acknowledged.len());
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_reports_no_or_repeated_exits_is_ignored() {
    // One line reports the commands without an observed exit.
    assert_eq!(receive_from(|_| ends(0, 0), 7).await, (vec![0], 1));
    assert_eq!(receive_from(|_| ends(0, 2), 7).await, (vec![0, 2], 3));
    assert_eq!(receive_from(|_| ends(u64::MAX, 2), 7).await, (vec![0], 1));
}

#[tokio::test(start_paused = true)]
async fn exits_that_the_agent_dropped_are_counted() {
    let (acknowledged, lines) = receive_from(|acknowledged| ends(acknowledged + 5, 1), 3).await;
    // The first answer defines where the exits begin, so none are missing before it.
    assert_eq!(acknowledged[..3], [0, 6, 12]);
    assert_eq!(lines, 3 + u64::try_from(acknowledged.len()).unwrap() - 1);
}
