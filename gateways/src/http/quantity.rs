//! Quantities of resources as Kubernetes writes them: `500m`, `2Gi`.

use box_protocol::Invalid;

/// The suffixes of quantities, and their values.
const SUFFIXES: [(&str, f64); 13] = [
    ("Ki", 1024.0),
    ("Mi", 1_048_576.0),
    ("Gi", 1_073_741_824.0),
    ("Ti", 1_099_511_627_776.0),
    ("Pi", 1_125_899_906_842_624.0),
    ("m", 0.001),
    ("k", 1e3),
    ("K", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
    ("P", 1e15),
    ("", 1.0),
];

/// Parses a quantity: a positive decimal number with an optional suffix.
pub fn quantity(field: &'static str, text: &str) -> Result<f64, Invalid> {
    let value = quantity_or_zero(field, text)?;
    if value > 0.0 {
        Ok(value)
    } else {
        Err(Invalid::new(field, "must be greater than 0"))
    }
}

/// Parses a quantity as above, or 0.
pub fn quantity_or_zero(field: &'static str, text: &str) -> Result<f64, Invalid> {
    let text = text.trim();
    let invalid = || {
        Invalid::new(
            field,
            format!("{text:?} must be a quantity such as 500m or 2Gi"),
        )
    };
    let (suffix, unit) = SUFFIXES
        .into_iter()
        .find(|(suffix, _)| text.ends_with(suffix))
        .ok_or_else(invalid)?;
    let number = text[..text.len() - suffix.len()].trim_end();
    let is_plain = |byte: u8| byte.is_ascii_digit() || byte == b'.';
    if number.is_empty() || !number.bytes().all(is_plain) {
        return Err(invalid());
    }
    let number: f64 = number.parse().map_err(|_| invalid())?;
    let value = number * unit;
    if value.is_finite() {
        Ok(value)
    } else {
        Err(invalid())
    }
}

/// Parses a quantity of bytes as whole MiB, rounded up.
pub fn megabytes(field: &'static str, text: &str) -> Result<u64, Invalid> {
    let bytes = quantity(field, text)?;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive, and the cast saturates"
    )]
    Ok((bytes / 1_048_576.0).ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_a_suffix_or_none() {
        for (text, value) in [
            ("500m", 0.5),
            ("1", 1.0),
            ("0.25", 0.25),
            (" 2 ", 2.0),
            ("2k", 2e3),
        ] {
            let parsed = quantity("cpu", text).unwrap();
            assert!((parsed - value).abs() < 1e-9, "{text}: {parsed}");
        }
        for (text, value) in [
            ("2Gi", 2048),
            ("512Mi", 512),
            ("1", 1),
            ("1G", 954),
            ("1048577", 2),
        ] {
            assert_eq!(megabytes("memory", text).unwrap(), value, "{text}");
        }
    }

    #[test]
    fn a_quantity_may_be_zero_where_none_is_asked() {
        for text in ["0", "0m", "0.0Gi"] {
            assert!(quantity_or_zero("gpu", text).is_ok_and(|value| value == 0.0));
        }
        assert!(quantity_or_zero("gpu", "none").is_err());
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "", "x", "1x", "-1", "1e3", "NaN", "inf", "1.2.3", "Gi", "0", "0m",
        ] {
            let refused = quantity("cpu", text).unwrap_err();
            assert_eq!(refused.field(), "cpu", "{text}");
        }
    }
}
