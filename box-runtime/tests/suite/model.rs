//! The boxes against a small model: random calls and random pauses have the same outcomes.

use std::collections::BTreeMap;
use std::time::Duration;

use box_protocol::{BoxError, Code, ExecutionStatus, SpecDraft};
use box_runtime::fake::Reply;
use proptest::prelude::*;
use tokio::time::{Instant, sleep};

use super::fixture::{Fixture, fixture_with, spec};

const TTL: Duration = Duration::from_secs(100);
const MAX_BOXES: usize = 3;

#[derive(Debug, Clone)]
enum Step {
    Exec {
        box_id: u8,
        memory_mb: u64,
        takes: u64,
    },
    TimeOut {
        box_id: u8,
    },
    Create {
        box_id: u8,
        persistent: bool,
    },
    Delete {
        box_id: u8,
        force: bool,
    },
    Kill {
        box_id: u8,
    },
    CutAgent {
        box_id: u8,
    },
    Wait {
        seconds: u64,
    },
    Shutdown,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let box_id = 0..5_u8;
    let memory_mb = prop_oneof![4 => Just(512_u64), 1 => Just(1024_u64)];
    let step = prop_oneof![
        6 => (box_id.clone(), memory_mb, 0..150_u64)
            .prop_map(|(box_id, memory_mb, takes)| Step::Exec { box_id, memory_mb, takes }),
        1 => box_id.clone().prop_map(|box_id| Step::TimeOut { box_id }),
        2 => (box_id.clone(), any::<bool>())
            .prop_map(|(box_id, persistent)| Step::Create { box_id, persistent }),
        2 => (box_id.clone(), any::<bool>())
            .prop_map(|(box_id, force)| Step::Delete { box_id, force }),
        1 => box_id.clone().prop_map(|box_id| Step::Kill { box_id }),
        1 => box_id.prop_map(|box_id| Step::CutAgent { box_id }),
        3 => (1..120_u64).prop_map(|seconds| Step::Wait { seconds }),
        1 => Just(Step::Shutdown),
    ];
    proptest::collection::vec(step, 1..40)
}

/// A box in the model.
struct ModelBox {
    memory_mb: u64,
    persistent: bool,
    used: Instant,
    dead: bool,
    /// Dead, and the runtime knows it: then the box expires, even if it is persistent.
    failed: bool,
}

#[derive(Default)]
struct Model {
    boxes: BTreeMap<String, ModelBox>,
    starts: usize,
}

impl Model {
    fn reap(&mut self, now: Instant) {
        self.boxes
            .retain(|_, known| known.persistent && !known.failed || now < known.used + TTL);
    }

    /// The error of a call that needs this box, or `None` if the call is served.
    fn ask(&mut self, name: &str, memory_mb: u64, persistent: bool) -> Option<Code> {
        if let Some(known) = self.boxes.get_mut(name) {
            if (known.memory_mb, known.persistent) != (memory_mb, persistent) {
                return Some(Code::Conflict);
            }
            self.starts += usize::from(known.dead);
            (known.dead, known.failed) = (false, false);
            return None;
        }
        if self.boxes.len() >= MAX_BOXES {
            return Some(Code::Capacity);
        }
        self.starts += 1;
        let known = ModelBox {
            memory_mb,
            persistent,
            used: Instant::now(),
            dead: false,
            failed: false,
        };
        self.boxes.insert(name.to_owned(), known);
        None
    }

    fn touch(&mut self, name: &str) {
        if let Some(known) = self.boxes.get_mut(name) {
            known.used = Instant::now();
        }
    }
}

fn refused<T>(result: &Result<T, BoxError>) -> Option<Code> {
    result.as_ref().err().map(BoxError::code)
}

/// The runtime and its model, side by side.
struct Pair {
    fixture: Fixture,
    model: Model,
}

impl Pair {
    async fn exec(&mut self, name: &str, memory_mb: u64, takes: u64) {
        let reply = Reply::default().takes(Duration::from_secs(takes));
        self.fixture.backend.on_command("job", reply);
        let draft = spec(name, "job").memory_mb(memory_mb).timeout_sec(1000);
        let expected = self.model.ask(name, memory_mb, false);
        let result = self.fixture.exec_spec(draft).await;
        assert_eq!(refused(&result), expected);
        if let Ok(result) = result {
            assert_eq!(result.duration_ms, takes * 1000);
            self.model.touch(name);
        }
    }

    async fn time_out(&mut self, name: &str) {
        self.fixture.backend.on_command("hang", Reply::hang());
        let expected = self.model.ask(name, 512, false);
        let draft = spec(name, "hang").timeout_sec(5);
        let result = self.fixture.exec_spec(draft).await;
        assert_eq!(refused(&result), expected);
        if let Ok(result) = result {
            assert_eq!(result.status, ExecutionStatus::TimedOut);
            self.model.boxes.remove(name);
        }
    }

    async fn create(&mut self, name: &str, persistent: bool) {
        let known = self.model.boxes.get(name);
        let there = known.is_some_and(|known| !known.dead);
        let expected = self.model.ask(name, 512, persistent);
        let draft = SpecDraft::new(name).persistent(persistent);
        let result = self.fixture.create(draft).await;
        assert_eq!(refused(&result), expected);
        if let Ok(made) = result {
            assert_eq!(made.existed, there);
            self.model.touch(name);
        }
    }

    async fn delete(&mut self, name: &str, force: bool) {
        let known = self.model.boxes.remove(name);
        let result = if force {
            self.fixture.force_delete(name).await
        } else {
            self.fixture.delete(name).await
        };
        assert_eq!(refused(&result), known.is_none().then_some(Code::NotFound));
    }

    fn kill(&mut self, name: &str) {
        self.fixture.backend.kill_box(name);
        if let Some(known) = self.model.boxes.get_mut(name) {
            known.dead = true;
        }
    }

    fn cut_agent(&mut self, name: &str) {
        self.fixture.backend.cut_agent(name);
        let known = self.model.boxes.get_mut(name);
        if let Some(known) = known.filter(|known| !known.failed) {
            (known.dead, known.failed) = (true, true);
            known.used = Instant::now();
        }
    }

    async fn take(&mut self, step: Step) {
        let name = |number: u8| format!("s{number}");
        match step {
            Step::Exec {
                box_id,
                memory_mb,
                takes,
            } => self.exec(&name(box_id), memory_mb, takes).await,
            Step::TimeOut { box_id } => self.time_out(&name(box_id)).await,
            Step::Create { box_id, persistent } => self.create(&name(box_id), persistent).await,
            Step::Delete { box_id, force } => self.delete(&name(box_id), force).await,
            Step::Kill { box_id } => self.kill(&name(box_id)),
            Step::CutAgent { box_id } => self.cut_agent(&name(box_id)),
            Step::Wait { seconds } => sleep(Duration::from_secs(seconds)).await,
            Step::Shutdown => {
                let ended = self.model.boxes.len() as u64;
                assert_eq!(self.fixture.shutdown().await.ended, ended);
                self.model.boxes.clear();
            }
        }
    }
}

async fn check(steps: Vec<Step>) {
    let fixture = fixture_with(|config| {
        config.idle_ttl = TTL;
        config.max_boxes = MAX_BOXES;
    });
    let mut pair = Pair {
        fixture,
        model: Model::default(),
    };
    for step in steps {
        // Never exactly at the end of a box's idle time: that order is not specified.
        sleep(Duration::from_millis(7)).await;
        pair.model.reap(Instant::now());
        pair.take(step).await;
        pair.model.reap(Instant::now());
        let names: Vec<_> = pair.model.boxes.keys().cloned().collect();
        assert_eq!(pair.fixture.ids().await, names);
        assert_eq!(pair.fixture.backend.starts().len(), pair.model.starts);
    }
    pair.fixture.shutdown().await;
    assert_eq!(pair.fixture.backend.running(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 128,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn boxes_behave_like_the_model(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(check(steps));
    }
}
