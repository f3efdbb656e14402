//! The caller at the other end of a connection.

use std::fmt;
use std::sync::{Arc, LazyLock};

use crate::handshake::Tokens;

/// Identity of the peer of a connection.
/// The engine passes it to handlers, which decide about permissions.
///
/// A connection cannot be started without one:
///
/// ```compile_fail,E0599
/// let options = box_rpc::Options::default();
/// ```
///
/// ```compile_fail,E0063
/// let options = box_rpc::Options { limits: box_rpc::Limits::default() };
/// ```
///
/// ```
/// use box_rpc::{Caller, Options, Tokens};
///
/// let socket = Options::new(Caller::Local);
/// let network = Options::new(Tokens::new([("ann".to_owned(), "a secret".to_owned())]));
/// # let _ = (socket, network);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Caller {
    /// This process, or a program of its user: a queue, a pipe, a Unix socket.
    Local,
    /// The holder of the token with this name.
    Token(Arc<str>),
    /// A client with a certificate signed by the operator's authority.
    Certificate,
    /// A program of this machine, over a loopback address without a token.
    Loopback,
    /// The holder of a capability for the box with this unique id, and for no other.
    Only(Arc<str>),
    /// A peer without identity: before its hello, or if this side connected to it.
    Anonymous,
}

/// How the name of a capability's holder begins.
const ONLY: &str = "box:";

/// How the name of a token's holder begins if another caller has the name of the token.
const TOKEN: &str = "token:";

impl Caller {
    /// Names of callers that have no token.
    pub const RESERVED: [&str; 4] = ["local", "certificate", "loopback", "anonymous"];

    /// Returns whether a token with this name needs a prefix in the name of its caller.
    fn is_reserved(name: &str) -> bool {
        Self::RESERVED.contains(&name) || name.starts_with(ONLY) || name.starts_with(TOKEN)
    }

    /// Creates the holder of the token with this name.
    pub fn token(name: impl Into<Arc<str>>) -> Self {
        Self::Token(name.into())
    }

    /// Creates the holder of a capability for the box with this unique id.
    pub fn only(id: impl Into<Arc<str>>) -> Self {
        Self::Only(id.into())
    }

    /// Returns the caller with this [`name`](Self::name).
    pub fn named(name: &str) -> Self {
        if let Some(id) = name.strip_prefix(ONLY) {
            return Self::only(id);
        }
        match name {
            "local" => Self::Local,
            "certificate" => Self::Certificate,
            "loopback" => Self::Loopback,
            "anonymous" => Self::Anonymous,
            _ => Self::token(name.strip_prefix(TOKEN).unwrap_or(name)),
        }
    }

    /// Returns the unique name of the caller. A log may show it.
    pub fn name(&self) -> Arc<str> {
        static NAMES: LazyLock<[Arc<str>; 4]> = LazyLock::new(|| Caller::RESERVED.map(Arc::from));
        let [local, certificate, loopback, anonymous] = &*NAMES;
        Arc::clone(match self {
            Self::Only(id) => return format!("{ONLY}{id}").into(),
            Self::Token(name) if Self::is_reserved(name) => {
                return format!("{TOKEN}{name}").into();
            }
            Self::Token(name) => name,
            Self::Local => local,
            Self::Certificate => certificate,
            Self::Loopback => loopback,
            Self::Anonymous => anonymous,
        })
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// How a connection identifies its caller.
#[derive(Debug, Clone)]
pub enum Auth {
    /// Every peer that can open the connection is this caller.
    Caller(Caller),
    /// The first call is a hello with one of these tokens, which identifies the peer.
    Tokens(Tokens),
}

impl From<Caller> for Auth {
    fn from(caller: Caller) -> Self {
        Self::Caller(caller)
    }
}

impl From<Tokens> for Auth {
    fn from(tokens: Tokens) -> Self {
        Self::Tokens(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_token_has_the_name_of_another_caller() {
        let others = [
            Caller::Local,
            Caller::Certificate,
            Caller::Loopback,
            Caller::Anonymous,
        ];
        for (caller, name) in others.iter().zip(Caller::RESERVED) {
            assert_eq!(&*caller.name(), name);
            let token = Caller::token(name);
            assert_ne!(&token, caller);
            assert_ne!(token.name(), caller.name());
        }
        assert_eq!(&*Caller::token("ann").name(), "ann");
        assert_eq!(&*Caller::only("1f").name(), "box:1f");
        assert_ne!(Caller::token("box:1f").name(), Caller::only("1f").name());
        let tokens = ["ann", "local", "box:1f", "token:box:1f"].map(Caller::token);
        for caller in others.into_iter().chain(tokens).chain([Caller::only("1f")]) {
            assert_eq!(Caller::named(&caller.name()), caller);
        }
    }
}
