//! Lenient decoding of numbers.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, Unexpected, Visitor};

/// A whole number: `999`, `"999"` or `999.0`.
#[derive(Debug, PartialEq)]
pub(crate) enum Whole {
    Of(u64),
    Negative,
}

impl Whole {
    /// The largest value up to which every whole number is exact as `f64`.
    const EXACT: f64 = 9_007_199_254_740_992.0;

    fn from_float(number: f64) -> Option<Self> {
        if number.fract() != 0.0 || number.abs() > Self::EXACT {
            return None;
        }
        if number < 0.0 {
            return Some(Self::Negative);
        }
        // Converts through text, because a cast would accept values out of range.
        format!("{:.0}", number.abs()).parse().ok().map(Self::Of)
    }

    fn from_text(text: &str) -> Option<Self> {
        let text = text.trim();
        match text.parse::<i128>() {
            Ok(number) if number < 0 => Some(Self::Negative),
            Ok(number) => u64::try_from(number).ok().map(Self::Of),
            Err(_) => text.parse().ok().and_then(Self::from_float),
        }
    }
}

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WholeVisitor)
    }
}

struct WholeVisitor;

impl Visitor<'_> for WholeVisitor {
    type Value = Whole;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Whole, E> {
        Ok(Whole::Of(number))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Whole, E> {
        Ok(u64::try_from(number).map_or(Whole::Negative, Whole::Of))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Whole, E> {
        Whole::from_float(number).ok_or_else(|| E::invalid_value(Unexpected::Float(number), &self))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Whole, E> {
        Whole::from_text(text).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

/// A number, or its decimal text.
#[derive(Debug, PartialEq)]
pub(crate) struct Decimal(pub(crate) f64);

impl<'de> Deserialize<'de> for Decimal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DecimalVisitor)
    }
}

struct DecimalVisitor;

impl Visitor<'_> for DecimalVisitor {
    type Value = Decimal;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number")
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Decimal, E> {
        Ok(Decimal(number))
    }

    #[allow(clippy::cast_precision_loss)] // more than 2^53 processors are no more exact than that
    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Decimal, E> {
        Ok(Decimal(number as f64))
    }

    #[allow(clippy::cast_precision_loss)] // as above
    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Decimal, E> {
        Ok(Decimal(number as f64))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Decimal, E> {
        let number = text
            .trim()
            .parse()
            .ok()
            .filter(|number: &f64| number.is_finite());
        number
            .map(Decimal)
            .ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(json: &str) -> Option<Whole> {
        serde_json::from_str(json).ok()
    }

    #[test]
    fn whole_numbers_in_every_notation() {
        for json in [
            "999",
            "999.0",
            r#""999""#,
            r#"" 999 ""#,
            r#""999.0""#,
            "9.99e2",
        ] {
            assert_eq!(whole(json), Some(Whole::Of(999)), "{json}");
        }
        for json in ["-1", "-1.0", r#""-1""#] {
            assert_eq!(whole(json), Some(Whole::Negative), "{json}");
        }
        assert_eq!(whole("-0.0"), Some(Whole::Of(0)));
        assert_eq!(whole("18446744073709551615"), Some(Whole::Of(u64::MAX)));
    }

    #[test]
    fn other_values_are_not_whole_numbers() {
        for json in [
            "1.5",
            r#""1.5""#,
            r#""abc""#,
            r#""""#,
            "true",
            "[]",
            "{}",
            "1e300",
            r#""inf""#,
            r#""nan""#,
            "18446744073709551616",
            r#""18446744073709551616""#,
            r#""0x10""#,
        ] {
            assert_eq!(whole(json), None, "{json}");
        }
    }

    #[test]
    fn decimals_in_every_notation() {
        for (json, number) in [("1", 1.0), ("0.5", 0.5), (r#""0.5""#, 0.5), ("-2", -2.0)] {
            assert_eq!(
                serde_json::from_str::<Decimal>(json).ok(),
                Some(Decimal(number)),
                "{json}"
            );
        }
        for json in [r#""inf""#, r#""NaN""#, r#""x""#, "true", "[1]"] {
            assert!(serde_json::from_str::<Decimal>(json).is_err(), "{json}");
        }
    }
}
