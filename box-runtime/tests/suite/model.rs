//! The sessions against a small model of them: random calls, random pauses, the same outcomes.

use std::collections::BTreeMap;
use std::time::Duration;

use box_protocol::{Code, ExecutionStatus, SpecDraft};
use box_runtime::fake::Reply;
use proptest::prelude::*;
use tokio::time::{Instant, sleep};

use super::world::{spec, world_with};

const TTL: Duration = Duration::from_secs(100);
const MAX_SESSIONS: usize = 3;

#[derive(Debug, Clone)]
enum Step {
    Exec {
        session: u8,
        memory_mb: u64,
        takes: u64,
    },
    TimeOut {
        session: u8,
    },
    Create {
        session: u8,
        persistent: bool,
    },
    Delete {
        session: u8,
        force: bool,
    },
    Kill {
        session: u8,
    },
    CutAgent {
        session: u8,
    },
    Wait {
        seconds: u64,
    },
    Shutdown,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let session = 0..5_u8;
    let memory_mb = prop_oneof![4 => Just(512_u64), 1 => Just(1024_u64)];
    let step = prop_oneof![
        6 => (session.clone(), memory_mb, 0..150_u64)
            .prop_map(|(session, memory_mb, takes)| Step::Exec { session, memory_mb, takes }),
        1 => session.clone().prop_map(|session| Step::TimeOut { session }),
        2 => (session.clone(), any::<bool>())
            .prop_map(|(session, persistent)| Step::Create { session, persistent }),
        2 => (session.clone(), any::<bool>())
            .prop_map(|(session, force)| Step::Delete { session, force }),
        1 => session.clone().prop_map(|session| Step::Kill { session }),
        1 => session.prop_map(|session| Step::CutAgent { session }),
        3 => (1..120_u64).prop_map(|seconds| Step::Wait { seconds }),
        1 => Just(Step::Shutdown),
    ];
    proptest::collection::vec(step, 1..40)
}

/// A session as the model knows it.
struct Known {
    memory_mb: u64,
    persistent: bool,
    used: Instant,
    dead: bool,
}

#[derive(Default)]
struct Model {
    sessions: BTreeMap<String, Known>,
    starts: usize,
}

impl Model {
    fn reap(&mut self, now: Instant) {
        self.sessions
            .retain(|_, known| known.persistent || now < known.used + TTL);
    }

    /// What a call that needs this box meets; `None` if it is served.
    fn ask(&mut self, name: &str, memory_mb: u64, persistent: bool) -> Option<Code> {
        if let Some(known) = self.sessions.get_mut(name) {
            if (known.memory_mb, known.persistent) != (memory_mb, persistent) {
                return Some(Code::Conflict);
            }
            self.starts += usize::from(known.dead);
            known.dead = false;
            return None;
        }
        if self.sessions.len() >= MAX_SESSIONS {
            return Some(Code::Capacity);
        }
        self.starts += 1;
        let known = Known {
            memory_mb,
            persistent,
            used: Instant::now(),
            dead: false,
        };
        self.sessions.insert(name.to_owned(), known);
        None
    }

    fn touch(&mut self, name: &str) {
        if let Some(known) = self.sessions.get_mut(name) {
            known.used = Instant::now();
        }
    }
}

async fn check(steps: Vec<Step>) {
    let w = world_with(|config| {
        config.session_ttl = TTL;
        config.max_sessions = MAX_SESSIONS;
    });
    let mut model = Model::default();
    for step in steps {
        // Never exactly at the end of a session's time: which comes first then is nobody's promise.
        sleep(Duration::from_millis(7)).await;
        model.reap(Instant::now());
        match step.clone() {
            Step::Exec {
                session,
                memory_mb,
                takes,
            } => {
                let name = format!("s{session}");
                w.backend
                    .on_command("job", Reply::default().takes(Duration::from_secs(takes)));
                let draft = spec(&name, "job")
                    .memory_mb(memory_mb)
                    .timeout_sec(1000_u64);
                let expected = model.ask(&name, memory_mb, false);
                let result = w.exec_spec(draft).await;
                assert_eq!(
                    result.as_ref().err().map(box_protocol::BoxError::code),
                    expected,
                    "{step:?}"
                );
                if let Ok(result) = result {
                    assert_eq!(result.duration_ms, takes * 1000);
                    model.touch(&name);
                }
            }
            Step::TimeOut { session } => {
                let name = format!("s{session}");
                w.backend.on_command("hang", Reply::hang());
                let expected = model.ask(&name, 512, false);
                let result = w.exec_spec(spec(&name, "hang").timeout_sec(5_u64)).await;
                assert_eq!(
                    result.as_ref().err().map(box_protocol::BoxError::code),
                    expected,
                    "{step:?}"
                );
                if let Ok(result) = result {
                    assert_eq!(result.status, ExecutionStatus::TimedOut);
                    model.sessions.remove(&name);
                }
            }
            Step::Create {
                session,
                persistent,
            } => {
                let name = format!("s{session}");
                let there = model.sessions.get(&name).is_some_and(|known| !known.dead);
                let expected = model.ask(&name, 512, persistent);
                let result = w
                    .create(SpecDraft::new(&*name).persistent(persistent))
                    .await;
                assert_eq!(
                    result.as_ref().err().map(box_protocol::BoxError::code),
                    expected,
                    "{step:?}"
                );
                if let Ok(made) = result {
                    assert_eq!(made.existed, there, "{step:?}");
                    model.touch(&name);
                }
            }
            Step::Delete { session, force } => {
                let name = format!("s{session}");
                let expected = model
                    .sessions
                    .remove(&name)
                    .is_none()
                    .then_some(Code::NotFound);
                let result = if force {
                    w.force_delete(&name).await
                } else {
                    w.delete(&name).await
                };
                assert_eq!(result.err().map(|error| error.code()), expected, "{step:?}");
            }
            Step::Kill { session } | Step::CutAgent { session } => {
                let name = format!("s{session}");
                if matches!(step, Step::Kill { .. }) {
                    w.backend.kill_box(&name);
                } else {
                    w.backend.cut_agent(&name);
                }
                if let Some(known) = model.sessions.get_mut(&name) {
                    known.dead = true;
                }
            }
            Step::Wait { seconds } => sleep(Duration::from_secs(seconds)).await,
            Step::Shutdown => {
                let ended = model.sessions.len() as u64;
                assert_eq!(w.shutdown().await.ended, ended);
                model.sessions.clear();
            }
        }
        model.reap(Instant::now());
        let names: Vec<_> = model.sessions.keys().cloned().collect();
        assert_eq!(w.ids().await, names, "after {step:?}");
        assert_eq!(w.backend.starts().len(), model.starts, "after {step:?}");
    }
    w.shutdown().await;
    assert_eq!(w.backend.running(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn sessions_do_what_the_model_does(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(check(steps));
    }
}
