//! Member `_meta` of JSON-RPC parameters.
//!
//! The codec reads it beside the parameters of the action. It removes it from the text that the action gets, whatever
//! type the action parses.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use super::Meta;
use crate::error::{Fault, RpcError};

/// Name of the member.
const NAME: &str = "_meta";

/// Wire format of `_meta`.
#[derive(Deserialize, Serialize)]
struct Wire<'a> {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deadline_ms: Option<u64>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    key: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "is_zero")]
    credit: u32,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    context: Option<&'a RawValue>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(number: &u32) -> bool {
    *number == 0
}

#[derive(Deserialize)]
struct Outer<'a> {
    #[serde(borrow, default, rename = "_meta")]
    meta: Option<Wire<'a>>,
}

/// Converts to milliseconds; more than 584 million years saturates.
pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Whether these parameters may contain `_meta`.
pub(super) fn is_present(params: &str) -> bool {
    memchr::memmem::find(params.as_bytes(), b"\"_meta\"").is_some()
}

/// Reads `_meta` of a parameter object; returns the default if it has none.
pub(super) fn read(params: &str) -> Result<Meta, serde_json::Error> {
    if !is_present(params) {
        return Ok(Meta::default());
    }
    let outer: Outer<'_> = serde_json::from_str(params)?;
    let meta = outer.meta.map(|wire| Meta {
        deadline: wire.deadline_ms.map(Duration::from_millis),
        key: wire.key.map(Cow::into_owned),
        credit: wire.credit,
        context: wire.context.map(|context| context.get().into()),
    });
    Ok(meta.unwrap_or_default())
}

/// Writes the value of `_meta`.
pub(super) fn write(out: &mut Vec<u8>, meta: &Meta) -> Result<(), serde_json::Error> {
    let context = meta
        .context
        .as_deref()
        .map(serde_json::from_str)
        .transpose()?;
    let wire = Wire {
        deadline_ms: meta.deadline.map(milliseconds),
        key: meta.key.as_deref().map(Cow::Borrowed),
        credit: meta.credit,
        context,
    };
    serde_json::to_writer(out, &wire)
}

/// Parses an action's parameters, without `_meta`. The error names the field.
pub(crate) fn parse_params<P: DeserializeOwned>(
    params: &str,
    has_meta: bool,
) -> Result<P, RpcError> {
    let without = has_meta.then(|| without_meta(params)).transpose();
    let without = without.map_err(|error| fault::<P>(params, &error))?;
    let params = without.as_deref().unwrap_or(params);
    serde_json::from_str(params).map_err(|error| fault::<P>(params, &error))
}

/// Returns a copy of the parameters without `_meta`.
/// It is a copy because an action may parse its parameters as one text.
fn without_meta(params: &str) -> Result<String, serde_json::Error> {
    let Members(members) = serde_json::from_str(params)?;
    let mut rest = String::with_capacity(params.len());
    rest.push('{');
    for (name, value) in members.iter().filter(|(name, _)| name != NAME) {
        if rest.len() > 1 {
            rest.push(',');
        }
        rest.push_str(&serde_json::to_string(name)?);
        rest.push(':');
        rest.push_str(value.get());
    }
    rest.push('}');
    Ok(rest)
}

/// Members of an object in order, including duplicates.
struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some((Key(name), value)) = map.next_entry()? {
                    members.push((name, value));
                }
                Ok(Members(members))
            }
        }

        from.deserialize_map(Collect)
    }
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// Describes a parse error by its field, without a position in the text.
/// The caller does not see that text. Only a failure pays for the second parse.
fn fault<P: DeserializeOwned>(params: &str, error: &serde_json::Error) -> RpcError {
    let mut inner = serde_json::Deserializer::from_str(params);
    let again = serde_path_to_error::deserialize::<_, P>(&mut inner);
    let what = error.to_string();
    let what = what
        .rsplit_once(" at line ")
        .map_or(what.as_str(), |(what, _)| what);
    let text = match again.err().map(|error| error.path().to_string()) {
        Some(path) if path != "." && !path.is_empty() => format!("{path}: {what}"),
        _ => what.to_owned(),
    };
    RpcError::fault(Fault::InvalidParams, text)
}
