//! The boxes that are visible to a caller.

use box_protocol::BoxId;
use box_rpc::Caller;

/// The rights of a caller.
///
/// A box belongs to the caller that created it. It does not exist for other callers, except for
/// those that see all boxes.
pub(crate) trait Rights {
    /// Returns whether the caller sees all boxes and may ask the server to exit.
    fn sees_all(&self) -> bool;

    /// Returns whether boxes of this owner are visible to the caller.
    fn sees(&self, owner: &str) -> bool;

    /// Returns the id of a box for this caller: `ID@OWNER` for other owners' boxes.
    ///
    /// The result is `None` if that is longer than an id may be.
    fn knows(&self, owner: &str, id: &BoxId) -> Option<BoxId>;
}

impl Rights for Caller {
    fn sees_all(&self) -> bool {
        match self {
            Self::Local => true,
            Self::Token(_) | Self::Certificate | Self::Loopback | Self::Anonymous => false,
        }
    }

    fn sees(&self, owner: &str) -> bool {
        self.sees_all() || &*self.name() == owner
    }

    fn knows(&self, owner: &str, id: &BoxId) -> Option<BoxId> {
        if &*self.name() == owner {
            return Some(id.clone());
        }
        BoxId::new(format!("{id}@{owner}")).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_sees_all_and_every_other_caller_its_own() {
        let others = [
            Caller::token("alice"),
            Caller::token("local"),
            Caller::Certificate,
            Caller::Loopback,
            Caller::Anonymous,
        ];
        for (at, caller) in others.iter().enumerate() {
            assert!(Caller::Local.sees(&caller.name()));
            assert!(
                !caller.sees_all() && !caller.sees(&Caller::Local.name()),
                "{caller}"
            );
            for (other_at, other) in others.iter().enumerate() {
                assert_eq!(
                    caller.sees(&other.name()),
                    at == other_at,
                    "{caller} {other}"
                );
            }
        }
    }
}
