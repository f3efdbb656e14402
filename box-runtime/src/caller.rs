//! The boxes that are visible to a caller.

use box_protocol::{BoxError, BoxId};
use box_rpc::Caller;

/// The rights of a caller.
///
/// A box belongs to the caller that created it. It does not exist for other callers, except for
/// those that see all boxes.
pub(crate) trait Visibility {
    /// Returns whether the caller sees all boxes and may ask the server to exit.
    fn can_see_all(&self) -> bool;

    /// Returns whether all boxes of this owner are visible to the caller.
    fn can_see(&self, owner: &str) -> bool;

    /// Returns the unique id of the only box that the caller sees, if it sees one only.
    fn only_box(&self) -> Option<&str>;

    /// Refuses a caller that can own nothing: the holder of a capability for one box.
    fn check_may_own(&self) -> Result<(), BoxError>;

    /// Returns the id of a box for this caller: `ID@OWNER` for other owners' boxes.
    ///
    /// The result is `None` if that is longer than an id may be.
    fn id_for(&self, owner: &str, id: &BoxId) -> Option<BoxId>;
}

impl Visibility for Caller {
    fn can_see_all(&self) -> bool {
        match self {
            Self::Local => true,
            Self::Token(_)
            | Self::Certificate
            | Self::Loopback
            | Self::Only(_)
            | Self::Anonymous => false,
        }
    }

    fn can_see(&self, owner: &str) -> bool {
        self.can_see_all() || &*self.name() == owner
    }

    fn only_box(&self) -> Option<&str> {
        match self {
            Self::Only(id) => Some(id),
            _ => None,
        }
    }

    fn check_may_own(&self) -> Result<(), BoxError> {
        match self.only_box() {
            Some(_) => Err(BoxError::denied(
                "caller: the capability gives access to one box; use a token",
            )),
            None => Ok(()),
        }
    }

    fn id_for(&self, owner: &str, id: &BoxId) -> Option<BoxId> {
        if &*self.name() == owner {
            return Some(id.clone());
        }
        if let Some(only) = self.only_box() {
            return BoxId::new(only).ok();
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
            Caller::only("1f"),
        ];
        for (at, caller) in others.iter().enumerate() {
            assert!(Caller::Local.can_see(&caller.name()));
            assert!(
                !caller.can_see_all() && !caller.can_see(&Caller::Local.name()),
                "{caller}"
            );
            for (other_at, other) in others.iter().enumerate() {
                assert_eq!(
                    caller.can_see(&other.name()),
                    at == other_at,
                    "{caller} {other}"
                );
            }
        }
    }
}
