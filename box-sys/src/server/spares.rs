//! Spare boxes: prepared boxes that wait for a plan, by shape.
//!
//! A shape is what a prepared box cannot change any more. The server keeps spares for the last few
//! shapes, because programs use few kinds of boxes.

use std::os::fd::OwnedFd;
use std::path::Path;

use super::layers::{self, Identity};
use crate::cgroup::Group;
use crate::plan::SandboxPlan;

/// Most shapes with spares. A spare takes about 200 kB.
const SHAPES_MAX: usize = 4;

/// A prepared box that waits for its plan.
#[derive(Debug)]
pub(super) struct Spare {
    /// Connection to the spare. It exits when this closes.
    pub(super) socket: OwnedFd,
    pub(super) pid: i32,
    /// Its cgroup, for the limits of the plan.
    pub(super) group: Option<Group>,
    /// What the paths of its layers named, as [`layers::sources`].
    pub(super) sources: Vec<Option<Identity>>,
}

/// Spares of one shape.
#[derive(Debug)]
struct Shape {
    /// Only the fields that `same_shape` compares are valid.
    plan: SandboxPlan,
    spares: Vec<Spare>,
    /// Whether a plan of this shape has arrived.
    used: bool,
}

/// The last shapes, the last used first.
#[derive(Debug)]
pub(super) struct Shapes {
    all: Vec<Shape>,
    /// Number of spares for each shape.
    wanted: usize,
}

/// Whether a spare for one plan can become a box for the other.
///
/// The finish request carries all other fields.
fn same_shape(one: &SandboxPlan, other: &SandboxPlan) -> bool {
    one.root == other.root
        && one.layers == other.layers
        && one.guest == other.guest
        && one.scratch.same_shape(&other.scratch)
        && one.network == other.network
}

impl Shapes {
    /// Begins with the shape of the default plan.
    pub(super) fn new(wanted: usize) -> Self {
        let default = Shape {
            plan: SandboxPlan::default(),
            spares: Vec::new(),
            used: false,
        };
        Self {
            all: vec![default],
            wanted,
        }
    }

    /// Takes a spare for this plan, and keeps spares of its shape from now on.
    ///
    /// The spares of forgotten shapes exit, because their sockets close.
    pub(super) fn take(&mut self, plan: &SandboxPlan) -> Option<Spare> {
        let known = self
            .all
            .iter()
            .position(|shape| same_shape(&shape.plan, plan));
        let mut shape = if let Some(at) = known {
            self.all.remove(at)
        } else {
            self.all.retain(|shape| shape.used);
            self.all.truncate(SHAPES_MAX - 1);
            Shape {
                plan: plan.clone(),
                spares: Vec::new(),
                used: true,
            }
        };
        shape.used = true;
        let spare = shape.spares.pop();
        self.all.insert(0, shape);
        spare
    }

    /// Ends the spares on a layer.
    pub(super) fn forget_layer(&mut self, path: &Path) {
        self.all.retain(|shape| !layers::has(&shape.plan, path));
    }

    /// Ends the spares of a plan's shape that have other layers than its paths name now.
    pub(super) fn end_replaced(&mut self, plan: &SandboxPlan, sources: &[Option<Identity>]) {
        let mut all = self.all.iter_mut();
        if let Some(shape) = all.find(|shape| same_shape(&shape.plan, plan)) {
            shape.spares.retain(|spare| spare.sources == sources);
        }
    }

    /// A shape that has too few spares.
    pub(super) fn short(&self) -> Option<&SandboxPlan> {
        let short = |shape: &&Shape| shape.spares.len() < self.wanted;
        self.all.iter().find(short).map(|shape| &shape.plan)
    }

    /// Adds a spare for the plan that [`Self::short`] returned.
    pub(super) fn add(&mut self, plan: &SandboxPlan, spare: Spare) {
        let shape = self
            .all
            .iter_mut()
            .find(|shape| same_shape(&shape.plan, plan));
        if let Some(shape) = shape {
            shape.spares.push(spare);
        }
    }

    /// Removes a spare that has ended, with its shape.
    ///
    /// A root that cannot be built would otherwise get spares again and again. The next plan of the
    /// shape brings it back.
    pub(super) fn forget(&mut self, pid: i32) {
        let ended = |shape: &Shape| shape.spares.iter().any(|spare| spare.pid == pid);
        self.all.retain(|shape| !ended(shape));
    }

    /// Removes a shape for which no spare can be made.
    pub(super) fn give_up(&mut self, plan: &SandboxPlan) {
        self.all.retain(|shape| !same_shape(&shape.plan, plan));
    }

    /// Ends all spares.
    pub(super) fn clear(&mut self) {
        self.all.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Caps, Network, Scratch};
    use crate::wire::socket_pair;

    fn spare(pid: i32) -> Spare {
        let (socket, _) = socket_pair().unwrap();
        Spare {
            socket,
            pid,
            group: None,
            sources: Vec::new(),
        }
    }

    fn plan(bytes: u64) -> SandboxPlan {
        SandboxPlan {
            scratch: Scratch::Memory(Caps { bytes, inodes: 64 }),
            ..SandboxPlan::default()
        }
    }

    #[test]
    fn each_shape_has_its_own_spares_and_the_oldest_is_forgotten() {
        let mut shapes = Shapes::new(1);
        assert_eq!(shapes.short(), Some(&SandboxPlan::default()));
        assert!(shapes.take(&plan(1)).is_none());
        shapes.add(&plan(1), spare(1));
        assert!(shapes.short().is_none(), "no plan used the default shape");
        assert!(shapes.take(&plan(2)).is_none());
        shapes.add(&plan(2), spare(2));
        assert_eq!(shapes.take(&plan(1)).unwrap().pid, 1);
        shapes.add(&plan(1), spare(3));
        for bytes in 3..6 {
            assert!(shapes.take(&plan(bytes)).is_none());
        }
        assert_eq!(shapes.take(&plan(1)).unwrap().pid, 3);
        assert!(shapes.take(&plan(2)).is_none(), "forgotten");
    }

    #[test]
    fn an_ended_spare_is_not_taken() {
        let mut shapes = Shapes::new(2);
        shapes.add(&SandboxPlan::default(), spare(7));
        shapes.forget(7);
        assert!(shapes.take(&SandboxPlan::default()).is_none());
    }

    #[test]
    fn a_spare_on_a_replaced_layer_is_not_taken() {
        let mut shapes = Shapes::new(3);
        for (pid, number) in [(1, 20), (2, 10), (3, 20)] {
            let sources = vec![Some((1, number))];
            let spare = Spare {
                sources,
                ..spare(pid)
            };
            shapes.add(&SandboxPlan::default(), spare);
        }
        shapes.end_replaced(&SandboxPlan::default(), &[Some((1, 10))]);
        assert_eq!(shapes.take(&SandboxPlan::default()).unwrap().pid, 2);
        assert!(shapes.take(&SandboxPlan::default()).is_none());
    }

    #[test]
    fn the_name_of_a_disk_is_not_part_of_a_shape() {
        let disk = |name: Option<&str>, bytes, network| SandboxPlan {
            scratch: Scratch::FileSystem {
                caps: Caps { bytes, inodes: 64 },
                shm: Caps::default(),
                name: name.map(Into::into),
            },
            network,
            ..SandboxPlan::default()
        };
        let one = disk(Some("a/disk"), 1, Network::Loopback);
        assert!(same_shape(&one, &disk(None, 1, Network::Loopback)));
        assert!(!same_shape(
            &one,
            &disk(Some("a/disk"), 2, Network::Loopback)
        ));
        assert!(!same_shape(&one, &disk(Some("a/disk"), 1, Network::Down)));
        assert!(!same_shape(&one, &SandboxPlan::default()));
    }
}
