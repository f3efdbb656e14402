//! Handshake: the first call on a connection that needs a token; optional elsewhere.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

use crate::action::{Action, Never};
use crate::caller::{Auth, Caller};
use crate::error::RpcError;
use crate::limits::Limits;

/// Contract versions this build supports, lowest and highest.
pub(crate) const CONTRACT: [u32; 2] = [1, 1];

/// Client, contract versions and token of a hello.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HelloParams {
    /// Name and version of the calling program, for logs.
    #[serde(default)]
    pub client: String,
    /// The token, if the transport needs one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Lowest and highest contract version the caller supports.
    #[serde(default = "contract")]
    pub contract: [u32; 2],
}

fn contract() -> [u32; 2] {
    CONTRACT
}

impl Default for HelloParams {
    fn default() -> Self {
        let client = concat!("box-rpc/", env!("CARGO_PKG_VERSION")).to_owned();
        Self {
            client,
            token: None,
            contract: CONTRACT,
        }
    }
}

impl fmt::Debug for HelloParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HelloParams")
            .field("client", &self.client)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("contract", &self.contract)
            .finish()
    }
}

/// Answer of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HelloResult {
    /// Name and version of the server.
    pub server: String,
    /// The contract version to use: the highest that both support.
    pub contract: u32,
    /// Limits that the caller has to keep.
    pub limits: HelloLimits,
    /// Features of this server beyond the contract's first version.
    pub features: Vec<String>,
}

/// Limits that a caller has to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HelloLimits {
    /// See [`Limits::message_bytes`].
    pub message_bytes: usize,
    /// See [`Limits::in_flight`].
    pub in_flight: usize,
    /// See [`Limits::open_streams`].
    pub open_streams: usize,
}

/// The action `hello`.
#[derive(Debug)]
pub struct Hello;

impl Action for Hello {
    const NAME: &'static str = "hello";
    type Params = HelloParams;
    type Result = HelloResult;
    type Chunk = Never;
}

/// Named tokens.
/// The name identifies the caller and may be logged; the token is never logged.
#[derive(Clone, Default)]
pub struct Tokens(Arc<[(Arc<str>, Box<str>)]>);

impl Tokens {
    /// Creates the set from names and tokens.
    pub fn new(tokens: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(
            tokens
                .into_iter()
                .map(|(name, token)| (name.into(), token.into_boxed_str()))
                .collect(),
        )
    }

    /// Returns the name of this token.
    /// The time does not depend on how much of the token is right.
    pub fn name_of(&self, token: &str) -> Option<Arc<str>> {
        let mut found = None;
        for (name, known) in self.0.iter() {
            if bool::from(known.as_bytes().ct_eq(token.as_bytes())) {
                found = Some(name);
            }
        }
        found.cloned()
    }
}

impl Tokens {
    /// Whether a text contains one of these tokens.
    /// The time does not depend on how much of a token is right.
    pub fn is_any_in(&self, text: &[u8]) -> bool {
        let mut found = false;
        for (_, token) in self.0.iter().filter(|(_, token)| !token.is_empty()) {
            for part in text.windows(token.len()) {
                found |= bool::from(token.as_bytes().ct_eq(part));
            }
        }
        found
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|(name, _)| name))
            .finish()
    }
}

/// Answers a hello: the caller, if a token identifies it, and the result.
pub(crate) fn answer(
    params: &HelloParams,
    auth: &Auth,
    limits: &Limits,
) -> Result<(Option<Caller>, HelloResult), RpcError> {
    let caller = match auth {
        Auth::Caller(_) => None,
        Auth::Tokens(tokens) => match params
            .token
            .as_deref()
            .and_then(|token| tokens.name_of(token))
        {
            Some(name) => Some(Caller::Token(name)),
            None => {
                return Err(RpcError::denied(
                    "token: missing or invalid; send a valid token in hello",
                ));
            }
        },
    };
    let [lowest, highest] = params.contract;
    let contract = highest.min(CONTRACT[1]);
    if contract < lowest.max(CONTRACT[0]) {
        return Err(RpcError::unsupported(format!(
            "contract: versions {lowest} to {highest} are not supported; the server supports {} to {}",
            CONTRACT[0], CONTRACT[1]
        )));
    }
    let limits = HelloLimits {
        message_bytes: limits.message_bytes,
        in_flight: limits.in_flight,
        open_streams: limits.open_streams,
    };
    let server = concat!("box/", env!("CARGO_PKG_VERSION")).to_owned();
    let features = ["chunks", "keys", "deadlines", "batches"]
        .map(str::to_owned)
        .to_vec();
    Ok((
        caller,
        HelloResult {
            server,
            contract,
            limits,
            features,
        },
    ))
}
