//! The gateway through which a box was created.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::invalid::Invalid;

/// Maximum length of a name in bytes.
const MAX_BYTES: usize = 32;

/// The name of the gateway through which a box was created; `native` by default.
///
/// 1 to 32 lowercase letters, digits and `-`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(!try_from))]
#[serde(try_from = "String")]
pub struct GatewayName(
    #[cfg_attr(feature = "schema", schemars(regex(pattern = "^[a-z0-9-]{1,32}$")))]
    Cow<'static, str>,
);

impl GatewayName {
    /// This contract itself.
    pub const NATIVE: Self = Self(Cow::Borrowed("native"));

    /// Creates a gateway name, which must follow the rule.
    pub const fn of(name: &'static str) -> Self {
        Self(Cow::Borrowed(name))
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for GatewayName {
    fn default() -> Self {
        Self::NATIVE
    }
}

impl TryFrom<String> for GatewayName {
    type Error = Invalid;

    fn try_from(name: String) -> Result<Self, Invalid> {
        let is_letter =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if name.is_empty() || name.len() > MAX_BYTES || !name.bytes().all(is_letter) {
            let rule = "must be 1 to 32 lowercase letters, digits and -";
            return Err(Invalid::new("gateway", rule));
        }
        Ok(Self(Cow::Owned(name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_validated() {
        let read = |text: &str| serde_json::from_str::<GatewayName>(text);
        assert_eq!(read("\"native\"").unwrap(), GatewayName::default());
        assert_eq!(read("\"other-1\"").unwrap(), GatewayName::of("other-1"));
        let long = format!("\"{}\"", "a".repeat(33));
        for bad in ["\"\"", "\"Native\"", "\"a b\"", "\"a/b\"", &long, "7"] {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert_eq!(
            serde_json::to_string(&GatewayName::NATIVE).unwrap(),
            "\"native\""
        );
    }
}
