//! The member `_meta` of JSON-RPC parameters: read beside the action's own parameters, and kept out
//! of their way when those refuse members they do not know.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use serde::de::value::{BorrowedStrDeserializer, StringDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde::{Deserialize, Serialize, forward_to_deserialize_any};
use serde_json::value::RawValue;

use crate::error::{Fault, RpcError};
use crate::message::Meta;

/// The member's name.
const NAME: &str = "_meta";

/// `_meta` as it is written.
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

/// Milliseconds for the wire; what is over 584 million years is for ever.
pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Whether `_meta` may be a member of these parameters.
pub(super) fn is_inside(params: &str) -> bool {
    memchr::memmem::find(params.as_bytes(), b"\"_meta\"").is_some()
}

/// Reads `_meta` of a parameter object. `None` if it has none.
pub(super) fn read(params: &str) -> Result<Option<Meta>, serde_json::Error> {
    if !params.starts_with('{') || !is_inside(params) {
        return Ok(None);
    }
    let outer: Outer<'_> = serde_json::from_str(params)?;
    Ok(outer.meta.map(|meta| Meta {
        deadline: meta.deadline_ms.map(Duration::from_millis),
        key: meta.key.map(Cow::into_owned),
        credit: meta.credit,
        context: meta.context.map(|context| context.get().into()),
    }))
}

/// Writes `_meta`'s value.
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

/// Parses an action's parameters, passing over `_meta` if it is inside. The error names the field.
pub(crate) fn parse_params<P: DeserializeOwned>(
    params: &str,
    meta_inside: bool,
) -> Result<P, RpcError> {
    let parsed = if meta_inside {
        let mut inner = serde_json::Deserializer::from_str(params);
        P::deserialize(Without(&mut inner)).and_then(|parsed| inner.end().map(|()| parsed))
    } else {
        serde_json::from_str(params)
    };
    parsed.map_err(|error| {
        RpcError::fault(
            Fault::InvalidParams,
            explain::<P>(params, meta_inside, &error),
        )
    })
}

/// What is wrong and where, without the position in a text that nobody sees. Only a failure pays
/// for the second look.
fn explain<P: DeserializeOwned>(
    params: &str,
    meta_inside: bool,
    error: &serde_json::Error,
) -> String {
    let mut inner = serde_json::Deserializer::from_str(params);
    let again = if meta_inside {
        serde_path_to_error::deserialize::<_, P>(Without(&mut inner))
    } else {
        serde_path_to_error::deserialize::<_, P>(&mut inner)
    };
    let what = error.to_string();
    let what = what
        .rsplit_once(" at line ")
        .map_or(what.as_str(), |(what, _)| what);
    match again.err().map(|error| error.path().to_string()) {
        Some(path) if path != "." && !path.is_empty() => format!("{path}: {what}"),
        _ => what.to_owned(),
    }
}

/// A deserializer, and all it leads to, that leaves `_meta` out of the outermost object.
struct Without<T>(T);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Without<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_map(Without(visitor))
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
        option unit unit_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Without<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(Without(map))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<V::Value, A::Error> {
        self.0.visit_seq(seq)
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Without<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        loop {
            let Some(Key(key)) = self.0.next_key()? else {
                return Ok(None);
            };
            if key == NAME {
                self.0.next_value::<IgnoredAny>()?;
                continue;
            }
            return match key {
                Cow::Borrowed(key) => seed.deserialize(BorrowedStrDeserializer::new(key)),
                Cow::Owned(key) => seed.deserialize(StringDeserializer::new(key)),
            }
            .map(Some);
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.0.next_value_seed(seed)
    }
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);
