//! The tokens of a box, and how a request names its box.
//!
//! A client gets two tokens with each box. Both are `UNIQUE-ID~SIGNATURE`, so that a server without any state finds the
//! box and checks the token.

use axum::http::HeaderMap;
use axum::http::request::Parts;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use box_protocol::actions::BoxListParams;
use box_protocol::{BoxError, BoxId, BoxInfo, UnixMs};
use box_rpc::Caller;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use super::GATEWAY;
use super::error::{EnvdError, gone};
use crate::http::body::Params;
use crate::http::capability::Scope;
use crate::http::context::Context;

/// The header of a caller's token.
pub(super) const API_KEY: &str = "x-api-key";

/// The header of the token for the inside of a box.
pub(super) const ACCESS_TOKEN: &str = "x-access-token";

/// The header of the token for the ports of a box.
pub(super) const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";

/// The header of the box.
pub(super) const SANDBOX_ID: &str = "e2b-sandbox-id";

/// Returns the token for the inside of a box. It lives as long as the box.
pub(super) fn access_token(context: &Context, info: &BoxInfo) -> String {
    token(context, info, Scope::E2b)
}

/// Returns the token for the ports of a box, which the code interpreter is one of.
pub(super) fn traffic_token(context: &Context, info: &BoxInfo) -> String {
    token(context, info, Scope::Ports)
}

fn token(context: &Context, info: &BoxInfo, scope: Scope<'_>) -> String {
    let signature = context.grant(info, scope, None);
    format!("{}~{signature}", info.unique_id)
}

/// Returns a header that has the form of a token.
fn token_in<'a>(parts: &'a Parts, name: &str) -> Option<&'a str> {
    let token = parts.headers.get(name)?.to_str().ok()?;
    token.contains('~').then_some(token)
}

/// Returns the box that a call names: the one of its token, else that of its header.
pub(super) fn envd_box(parts: &Parts) -> Option<&str> {
    let named = || parts.headers.get(SANDBOX_ID)?.to_str().ok();
    token_in(parts, ACCESS_TOKEN).or_else(named)
}

/// Returns the box of a request to the code interpreter. Clients send only the token for ports with some of them.
pub(super) fn code_box(parts: &Parts) -> Option<&str> {
    let traffic = token_in(parts, TRAFFIC_TOKEN).filter(|_| !has_access_token(parts));
    traffic.or_else(|| envd_box(parts))
}

/// Returns what a request to the code interpreter needs.
#[expect(clippy::unnecessary_wraps, reason = "the type of all such functions")]
pub(super) fn code_scope(parts: &Parts) -> Option<Scope<'_>> {
    Some(if has_access_token(parts) {
        Scope::E2b
    } else {
        Scope::Ports
    })
}

fn has_access_token(parts: &Parts) -> bool {
    token_in(parts, ACCESS_TOKEN).is_some()
}

/// How the signature of a file begins, and its length.
const SIGNATURE_START: &str = "v1_";
const SIGNATURE_CHARS: usize = 46;

/// What a signed address of a file permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileAccess {
    /// To read the file.
    Read,
    /// To write it.
    Write,
}

/// Returns the context of the box whose token signed the address of a file.
///
/// Below the host name of a box, only that box may have signed it. Other addresses do not name the box, so the server
/// tries all of them.
pub(super) async fn signed(
    context: Context,
    headers: &HeaderMap,
    params: &Params,
    access: FileAccess,
) -> Result<(Context, BoxId), EnvdError> {
    let refused =
        || EnvdError::unauthenticated("signature: invalid or expired; sign a new address");
    let signature = params.get("signature").ok_or_else(|| {
        EnvdError::unauthenticated(
            "signature: missing; send X-Access-Token or use a signed address",
        )
    })?;
    // A malformed signature must not cost a search.
    if signature.len() != SIGNATURE_CHARS || !signature.starts_with(SIGNATURE_START) {
        return Err(refused());
    }
    let expiry = params.get("signature_expiration");
    if let Some(expiry) = expiry {
        let until: u64 = expiry.parse().map_err(|_| refused())?;
        if UnixMs::now().0 / 1000 > until {
            return Err(EnvdError::unauthenticated("signature is already expired"));
        }
    }
    let (all, boxes) = every_box(context).await?;
    let named = headers.get(SANDBOX_ID);
    let of = |info: &BoxInfo| {
        if named.is_some_and(|id| !is_named(info, id.as_bytes())) {
            return false;
        }
        let token = access_token(&all, info);
        let made = file_signature(params, access, &token, expiry);
        bool::from(made.as_bytes().ct_eq(signature.as_bytes()))
    };
    let found = boxes.iter().find(|info| of(info)).ok_or_else(refused)?;
    holder(all, found)
}

/// Returns the boxes of all callers, for a request that does not name its caller.
pub(super) async fn every_box(context: Context) -> Result<(Context, Vec<BoxInfo>), EnvdError> {
    let listed = BoxListParams {
        gateway: Some(GATEWAY),
        ..BoxListParams::default()
    };
    let all = Context {
        caller: Caller::Local,
        ..context
    };
    let boxes = all.list(listed).await?;
    Ok((all, boxes))
}

/// Returns whether a box has this id among those of its caller.
pub(super) fn is_named(info: &BoxInfo, id: &[u8]) -> bool {
    // Boxes of other callers than this one are `ID@OWNER`.
    let own = info.box_id.as_str().split('@').next();
    own.is_some_and(|own| own.as_bytes() == id)
}

/// Returns the context of a caller that sees only this box, and its id there.
pub(super) fn holder(context: Context, info: &BoxInfo) -> Result<(Context, BoxId), EnvdError> {
    let id = BoxId::new(&info.unique_id).map_err(|_| gone())?;
    let caller = Caller::only(id.as_str());
    Ok((Context { caller, ..context }, id))
}

/// Returns the signature of an address to upload a file to.
pub(super) fn upload_signature(context: &Context, info: &BoxInfo, path: &str) -> String {
    let token = access_token(context, info);
    signature_of(path, FileAccess::Write, "", &token, None)
}

fn file_signature(
    params: &Params,
    access: FileAccess,
    token: &str,
    expiry: Option<&str>,
) -> String {
    let (path, user) = (params.get("path"), params.get("username"));
    let (path, user) = (path.unwrap_or_default(), user.unwrap_or_default());
    signature_of(path, access, user, token, expiry)
}

fn signature_of(
    path: &str,
    access: FileAccess,
    user: &str,
    token: &str,
    expiry: Option<&str>,
) -> String {
    let operation = match access {
        FileAccess::Read => "read",
        FileAccess::Write => "write",
    };
    let mut text = format!("{path}:{operation}:{user}:{token}");
    if let Some(expiry) = expiry {
        text.extend([":", expiry]);
    }
    let digest = Sha256::digest(text.as_bytes());
    format!("{SIGNATURE_START}{}", STANDARD_NO_PAD.encode(digest))
}

/// Returns the id of a box that a repeated request creates again.
pub(super) fn id_of_key(caller: &Caller, key: &str) -> Result<BoxId, BoxError> {
    let mut hash = Sha256::new();
    for part in ["e2b create", &*caller.name(), key] {
        hash.update(part.as_bytes());
        hash.update(b"\0");
    }
    let digest = hash.finalize();
    let first = digest.first_chunk().copied().unwrap_or_default();
    Ok(BoxId::new(format!("{:032x}", u128::from_be_bytes(first)))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_of_a_file_is_that_of_the_sdk() {
        let params = Params::parse("path=/home/user/a%20b&username=user").unwrap();
        let plain = file_signature(&params, FileAccess::Read, "token", None);
        assert_eq!(plain, "v1_TSJwifP1c3h1e/g2bPbsdv5Pqss5b5u2FRO9nL0h0WU");
        assert_eq!(plain.len(), SIGNATURE_CHARS);
        let written = file_signature(&params, FileAccess::Write, "token", None);
        let limited = file_signature(&params, FileAccess::Read, "token", Some("17"));
        assert!(plain != written && plain != limited);
    }

    #[test]
    fn a_key_gives_each_caller_its_own_id() {
        let (ann, bob) = (Caller::token("ann"), Caller::token("bob"));
        let id = id_of_key(&ann, "k").unwrap();
        assert_eq!(id, id_of_key(&ann, "k").unwrap());
        assert_ne!(id, id_of_key(&bob, "k").unwrap());
        assert_ne!(id, id_of_key(&ann, "l").unwrap());
        assert_eq!(id.as_str().len(), 32);
    }
}
