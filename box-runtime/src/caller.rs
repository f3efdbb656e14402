//! Who calls, and whose boxes they see.

use std::sync::Arc;

use box_protocol::SessionId;
use box_rpc::{Action, Call};

/// The name of whoever reaches the runtime without a token: in process, over a Unix socket or a pipe.
const LOCAL: &str = "local";

/// Who calls. A box belongs to the name that made it; to anybody else it does not exist, unless they
/// see all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The owner of what this caller makes.
    pub name: Arc<str>,
    /// Sees everybody's boxes, and may ask the server to exit.
    pub sees_all: bool,
    /// The most boxes it may have, in place of the runtime's `max_sessions_per_caller`.
    pub max_sessions: Option<usize>,
}

impl Caller {
    /// Whoever is on this machine and needs no token. Sees all.
    pub fn local() -> Self {
        Self::named(LOCAL)
    }

    /// The holder of the token with this name. Sees its own boxes; `local` sees all.
    pub fn named(name: impl Into<Arc<str>>) -> Self {
        let name = name.into();
        Self {
            sees_all: &*name == LOCAL,
            name,
            max_sessions: None,
        }
    }

    /// The same, with at most so many boxes.
    pub fn with_max_sessions(mut self, boxes: usize) -> Self {
        self.max_sessions = Some(boxes);
        self
    }

    /// Who made this call.
    pub fn of<A: Action>(call: &Call<A>) -> Self {
        Self::named(call.caller())
    }

    /// The id by which this caller knows a box: `ID@OWNER` for another owner's. `None` if that is longer than an id may be.
    pub(crate) fn knows(&self, owner: &str, id: &SessionId) -> Option<SessionId> {
        if *self.name == *owner {
            return Some(id.clone());
        }
        SessionId::new(format!("{id}@{owner}")).ok()
    }

    /// Whether boxes of this owner exist for the caller.
    pub fn sees(&self, owner: &str) -> bool {
        self.sees_all || &*self.name == owner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_sees_its_own_and_local_sees_all() {
        let alice = Caller::named("alice");
        assert!(alice.sees("alice") && !alice.sees("bob") && !alice.sees("local"));
        assert!(Caller::local().sees("alice"));
        assert_eq!(Caller::local(), Caller::named("local"));
    }
}
