//! The rules of a spec's fields: how a value is read, what it must be, and how the schema says so.

#[cfg(feature = "schema")]
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{self, Deserialize, MapAccess};

use super::bounds::{self, MAX_ENTRIES, check_mounts};
use super::mount::BoxMountSpec;
use crate::decode::{Decimal, Whole};
use crate::invalid::Invalid;
use crate::paths;

/// The rule of a field whose values are asked for as `T`.
pub(super) trait Rule<T> {
    /// Reads the value of the member `field`; `null` counts as absent.
    fn read<'de, A: MapAccess<'de>>(
        &self,
        field: &'static str,
        map: &mut A,
    ) -> Result<Option<T>, A::Error>
    where
        T: Deserialize<'de>,
    {
        map.next_value().map_err(|error| malformed(field, &error))
    }

    /// The value as a spec holds it; `None` if it counts as absent.
    fn check(&self, _: &'static str, value: T) -> Result<Option<T>, Invalid> {
        Ok(Some(value))
    }

    /// What the decoder of a draft takes.
    #[cfg(feature = "schema")]
    fn schema(&self, generator: &mut SchemaGenerator) -> Schema
    where
        T: JsonSchema,
    {
        generator.subschema_for::<Option<T>>()
    }

    /// Adds the bounds of the rule to the schema of a value.
    #[cfg(feature = "schema")]
    fn bound(&self, _: &mut Schema) {}
}

/// What an error says of a number that is not above zero.
pub(super) const POSITIVE: &str = "must be greater than 0";

/// Every value of the type.
pub(super) struct Any;

impl<T> Rule<T> for Any {}

/// What the function does not refuse.
impl<T, F: Fn(&T) -> Result<(), Invalid>> Rule<T> for F {
    fn check(&self, _: &'static str, value: T) -> Result<Option<T>, Invalid> {
        self(&value)?;
        Ok(Some(value))
    }
}

/// A whole number that is not smaller, and what an error says of one that is. It may also be written `"999"` or `999.0`.
pub(super) struct AtLeast(pub(super) u64, pub(super) &'static str);

impl Rule<u64> for AtLeast {
    fn read<'de, A: MapAccess<'de>>(
        &self,
        field: &'static str,
        map: &mut A,
    ) -> Result<Option<u64>, A::Error> {
        match Any.read(field, map)? {
            Some(Whole::Of(number)) => Ok(Some(number)),
            Some(Whole::Negative) => Err(Invalid::new(field, self.1).decoding()),
            None => Ok(None),
        }
    }

    fn check(&self, field: &'static str, value: u64) -> Result<Option<u64>, Invalid> {
        if value < self.0 {
            return Err(Invalid::new(field, self.1));
        }
        Ok(Some(value))
    }

    #[cfg(feature = "schema")]
    fn schema(&self, generator: &mut SchemaGenerator) -> Schema {
        generator.subschema_for::<Option<Whole>>()
    }

    #[cfg(feature = "schema")]
    fn bound(&self, schema: &mut Schema) {
        schema.insert("minimum".to_owned(), self.0.into());
    }
}

/// A number above zero; it may also be written as text.
pub(super) struct Positive;

impl Rule<f64> for Positive {
    fn read<'de, A: MapAccess<'de>>(
        &self,
        field: &'static str,
        map: &mut A,
    ) -> Result<Option<f64>, A::Error> {
        let number: Option<Decimal> = Any.read(field, map)?;
        Ok(number.map(|Decimal(number)| number))
    }

    fn check(&self, field: &'static str, value: f64) -> Result<Option<f64>, Invalid> {
        if !(value.is_finite() && value > 0.0) {
            return Err(Invalid::new(field, POSITIVE));
        }
        Ok(Some(value))
    }

    #[cfg(feature = "schema")]
    fn schema(&self, generator: &mut SchemaGenerator) -> Schema {
        generator.subschema_for::<Option<Decimal>>()
    }

    #[cfg(feature = "schema")]
    fn bound(&self, schema: &mut Schema) {
        schema.insert("exclusiveMinimum".to_owned(), 0.into());
    }
}

/// Texts: a check that gives the value as a spec holds it, and a pattern for the schema.
macro_rules! texts {
    ($($(#[$doc:meta])* $rule:ident, $pattern:ident, |$field:ident, $value:ident| $check:expr;)*) => {$(
        $(#[$doc])*
        pub(super) struct $rule;

        impl Rule<String> for $rule {
            fn check(&self, $field: &'static str, $value: String) -> Result<Option<String>, Invalid> {
                $check
            }

            #[cfg(feature = "schema")]
            fn bound(&self, schema: &mut Schema) {
                schema.insert("pattern".to_owned(), crate::schema::$pattern.into());
            }
        }
    )*};
}

texts! {
    /// Without NUL; trimmed.
    NoNul, NO_NUL, |field, value| {
        if value.contains('\0') {
            return Err(Invalid::new(field, "must not contain NUL"));
        }
        Ok(filled(value))
    };

    /// A short text; trimmed, and absent if it is blank.
    Word, NO_NUL, |field, value| {
        NoNul.check(field, value)?.map(|word| bounds::short(field, &word).map(|()| word)).transpose()
    };

    /// An absolute path inside the box.
    Inside, INSIDE, |field, value| paths::inside(field, &value).map(Some);

    /// An absolute path of the host.
    HostPath, OF_HOST, |field, value| paths::of_host(field, &value).map(Some);
}

/// The value of another rule, or a blank text, which counts as absent.
pub(super) struct Optional<R>(pub(super) R);

impl<R: Rule<String>> Rule<String> for Optional<R> {
    fn check(&self, field: &'static str, value: String) -> Result<Option<String>, Invalid> {
        match filled(value) {
            Some(value) => self.0.check(field, value),
            None => Ok(None),
        }
    }

    #[cfg(feature = "schema")]
    fn bound(&self, schema: &mut Schema) {
        self.0.bound(schema);
        if let Some(pattern) = schema.get("pattern").and_then(|pattern| pattern.as_str()) {
            let pattern = format!(r"^\s*$|{pattern}");
            schema.insert("pattern".to_owned(), pattern.into());
        }
    }
}

/// A value of another rule that may hold secrets, which errors must not quote.
pub(super) struct Secret<R>(pub(super) R);

impl<T, R: Rule<T>> Rule<T> for Secret<R> {
    fn read<'de, A: MapAccess<'de>>(
        &self,
        field: &'static str,
        map: &mut A,
    ) -> Result<Option<T>, A::Error>
    where
        T: Deserialize<'de>,
    {
        map.next_value().map_err(|error: A::Error| {
            // The decoder quotes a value of the wrong type.
            if error.to_string().contains("invalid type") {
                return Invalid::new(field, "must map names to texts").decoding();
            }
            malformed(field, &error)
        })
    }

    fn check(&self, field: &'static str, value: T) -> Result<Option<T>, Invalid> {
        self.0.check(field, value)
    }
}

/// A list of at most [`MAX_ENTRIES`], each of which keeps another rule.
pub(super) struct Few<R>(pub(super) R);

impl<R: Rule<String>> Rule<Vec<String>> for Few<R> {
    fn check(
        &self,
        field: &'static str,
        value: Vec<String>,
    ) -> Result<Option<Vec<String>>, Invalid> {
        bounds::few(field, value.len(), MAX_ENTRIES)?;
        for entry in &value {
            self.0.check(field, entry.clone())?;
        }
        Ok(Some(value))
    }

    #[cfg(feature = "schema")]
    fn bound(&self, schema: &mut Schema) {
        schema.insert("maxItems".to_owned(), MAX_ENTRIES.into());
        let mut items = schemars::json_schema!({"type": "string"});
        self.0.bound(&mut items);
        schema.insert("items".to_owned(), items.to_value());
    }
}

/// At most [`MAX_MOUNTS`](bounds::MAX_MOUNTS).
pub(super) struct Mounts;

impl Rule<Vec<BoxMountSpec>> for Mounts {
    fn check(
        &self,
        _: &'static str,
        mounts: Vec<BoxMountSpec>,
    ) -> Result<Option<Vec<BoxMountSpec>>, Invalid> {
        check_mounts(&mounts)?;
        Ok(Some(mounts))
    }

    #[cfg(feature = "schema")]
    fn bound(&self, schema: &mut Schema) {
        schema.insert("maxItems".to_owned(), bounds::MAX_MOUNTS.into());
    }
}

/// A value that cannot be read, as an error that names its field.
fn malformed<E: de::Error>(field: &'static str, error: &E) -> E {
    Invalid::new(field, format!("is malformed: {error}")).decoding()
}

/// Trimmed, and `None` if nothing is left.
pub(super) fn filled(text: String) -> Option<String> {
    let trimmed = text.trim();
    match trimmed.len() {
        0 => None,
        all if all == text.len() => Some(text),
        _ => Some(trimmed.to_owned()),
    }
}
