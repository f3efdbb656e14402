//! Rules of the fields of a spec: decoding, validation and schema of a value.

#[cfg(feature = "schema")]
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{self, Deserialize, MapAccess};

use super::bounds::{self, MAX_ENTRIES, check_mounts};
use super::mount::BoxMountSpec;
use super::volume::{VolumeMount, check_volumes};
use crate::decode::{Decimal, Whole};
use crate::invalid::Invalid;
use crate::paths;

/// The rule of a field with values of type `T`.
pub(super) trait Rule<T> {
    /// Decodes the value of the member `field`; `null` counts as absent.
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

    /// Validates and normalizes a value; `None` if it counts as absent.
    fn check(&self, _: &'static str, value: T) -> Result<Option<T>, Invalid> {
        Ok(Some(value))
    }

    /// Returns the schema of the values that the decoder accepts.
    #[cfg(feature = "schema")]
    fn schema(&self, generator: &mut SchemaGenerator) -> Schema
    where
        T: JsonSchema,
    {
        generator.subschema_for::<Option<T>>()
    }

    /// Adds the limits of the rule to the schema of a value.
    #[cfg(feature = "schema")]
    fn bound(&self, _: &mut Schema) {}
}

/// The error text for a number that is not positive.
pub(super) const POSITIVE: &str = "must be greater than 0";

/// Accepts every value of the type.
pub(super) struct Any;

impl<T> Rule<T> for Any {}

/// A function that validates a value.
impl<T, F: Fn(&T) -> Result<(), Invalid>> Rule<T> for F {
    fn check(&self, _: &'static str, value: T) -> Result<Option<T>, Invalid> {
        self(&value)?;
        Ok(Some(value))
    }
}

/// Returns the value if the rule holds.
fn accept<T>(
    value: T,
    holds: bool,
    field: &'static str,
    rule: &'static str,
) -> Result<Option<T>, Invalid> {
    if holds {
        Ok(Some(value))
    } else {
        Err(Invalid::new(field, rule))
    }
}

/// A whole number with a minimum. The decoder also accepts `"999"` and `999.0`.
pub(super) struct AtLeast(pub(super) u64);

impl AtLeast {
    fn negative(&self) -> String {
        match self.0 {
            0 => "must not be negative".to_owned(),
            minimum => format!("a negative number is below the minimum of {minimum}"),
        }
    }
}

impl Rule<u64> for AtLeast {
    fn read<'de, A: MapAccess<'de>>(
        &self,
        field: &'static str,
        map: &mut A,
    ) -> Result<Option<u64>, A::Error> {
        match Any.read(field, map)? {
            Some(Whole::Of(number)) => Ok(Some(number)),
            Some(Whole::Negative) => Err(Invalid::new(field, self.negative()).decoding()),
            None => Ok(None),
        }
    }

    fn check(&self, field: &'static str, value: u64) -> Result<Option<u64>, Invalid> {
        if value >= self.0 {
            return Ok(Some(value));
        }
        let rule = format!("{value} is below the minimum of {}", self.0);
        Err(Invalid::new(field, rule))
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

/// A number greater than zero. The decoder also accepts it as text.
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
        accept(value, value.is_finite() && value > 0.0, field, POSITIVE)
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

/// Declares text rules: a function that validates and normalizes a value, and a schema pattern.
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
    /// Text without NUL, trimmed.
    NoNul, NO_NUL, |field, value| {
        if value.contains('\0') {
            return Err(Invalid::new(field, "must not contain NUL"));
        }
        Ok(filled(value))
    };

    /// A short text, trimmed; blank counts as absent.
    Word, NO_NUL, |field, value| {
        NoNul.check(field, value)?.map(|word| bounds::short(field, &word).map(|()| word)).transpose()
    };

    /// An absolute path inside the box.
    Inside, INSIDE, |field, value| paths::inside(field, &value).map(Some);

    /// An absolute host path.
    HostPath, OF_HOST, |field, value| paths::of_host(field, &value).map(Some);
}

/// Another rule, except that a blank text counts as absent.
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

/// Another rule for a value that may hold secrets, which errors do not show.
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

/// A list of at most [`MAX_ENTRIES`] values, each under another rule.
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

/// At most [`MAX_MOUNTS`](bounds::MAX_MOUNTS) mounts of volumes, each at its own path.
pub(super) struct Volumes;

impl Rule<Vec<VolumeMount>> for Volumes {
    fn check(
        &self,
        _: &'static str,
        volumes: Vec<VolumeMount>,
    ) -> Result<Option<Vec<VolumeMount>>, Invalid> {
        check_volumes(&volumes)?;
        Ok(Some(volumes))
    }

    #[cfg(feature = "schema")]
    fn bound(&self, schema: &mut Schema) {
        schema.insert("maxItems".to_owned(), bounds::MAX_MOUNTS.into());
    }
}

/// The error for a value that cannot be decoded, with its field.
fn malformed<E: de::Error>(field: &'static str, error: &E) -> E {
    Invalid::new(field, format!("malformed: {error}")).decoding()
}

/// Trims a text; `None` if nothing is left.
pub(super) fn filled(text: String) -> Option<String> {
    let trimmed = text.trim();
    match trimmed.len() {
        0 => None,
        all if all == text.len() => Some(text),
        _ => Some(trimmed.to_owned()),
    }
}
