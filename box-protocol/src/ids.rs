//! Ids: opaque strings that the caller chooses or this crate generates.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

use crate::invalid::Invalid;
use crate::invisible::is_invisible;

/// Maximum length of an id in bytes.
pub const MAX_ID_BYTES: usize = 256;

/// Checks the rule of all ids and names.
///
/// Ids never become part of a path, but they appear in URLs and log lines.
fn check(field: &'static str, text: &str) -> Result<(), Invalid> {
    let is_plain = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    let is_plain = text.bytes().all(is_plain);
    let rule = if text.is_empty() {
        "must not be empty"
    } else if text.len() > MAX_ID_BYTES {
        let rule = format!("{} bytes; the limit is {MAX_ID_BYTES}", text.len());
        return Err(Invalid::new(field, rule));
    } else if !is_plain && text.chars().any(char::is_control) {
        "must not contain control characters"
    } else if !is_plain && text.chars().any(is_invisible) {
        "must not contain text direction marks, invisible characters, or white space other than a space"
    } else if text.contains('/') {
        "must not contain /"
    } else if text == "." || text == ".." {
        "must not be . or .."
    } else {
        return Ok(());
    };
    Err(Invalid::new(field, rule))
}

/// Generates an id: a UUID of version 7 as 32 hex digits, so that ids sort by age.
fn fresh_text() -> Arc<str> {
    let mut buffer = Uuid::encode_buffer();
    Arc::from(&*Uuid::now_v7().simple().encode_lower(&mut buffer))
}

macro_rules! ids {
    ($($(#[doc = $doc:literal])* $name:ident, $field:literal;)*) => {$(
        $(#[doc = $doc])*
        ///
        /// 1 to 256 bytes without control characters, text direction marks, invisible characters,
        /// white space other than a space, and `/`; not `.` or `..`. Clones share the memory.
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Validates a text.
            pub fn new(text: impl AsRef<str>) -> Result<Self, Invalid> {
                let text = text.as_ref();
                check($field, text)?;
                Ok(Self(Arc::from(text)))
            }

            /// Generates an id of 32 hex digits that sorts after earlier ones.
            pub fn fresh() -> Self {
                Self(fresh_text())
            }

            /// Returns the text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = Invalid;

            fn from_str(text: &str) -> Result<Self, Invalid> {
                Self::new(text)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = Arc::<str>::deserialize(deserializer)?;
                check($field, &text).map_err(|invalid| invalid.decoding())?;
                Ok(Self(text))
            }
        }

        #[cfg(feature = "schema")]
        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                crate::schema::id(concat!($($doc),*))
            }
        }
    )*};
}

ids! {
    /// Identifies a box. Called `box_id` on every wire.
    BoxId, "box_id";
    /// The name of a box or item of the catalog, which its owner can change.
    Name, "name";
    /// Identifies a command within its box.
    CommandId, "command_id";
    /// Identifies a shell within its box.
    ShellId, "shell_id";
    /// Identifies an open connection to a port within its box.
    ConnId, "conn_id";
    /// Identifies an upload in pieces within its box.
    UploadId, "upload_id";
    /// Identifies an item of the catalog.
    ItemId, "id";
    /// Refers to an item of the catalog by its id, its name or one of its tags.
    ItemRef, "item";
    /// Identifies a layer: the private files of a box at one moment.
    LayerId, "layer";
}

#[cfg(test)]
mod tests {
    use super::*;

    const INVISIBLE: &str = "box_id: must not contain text direction marks, invisible characters, or white space other than a space";

    #[test]
    fn rule_holds_on_construction_and_on_decode() {
        let longest = "x".repeat(256);
        for good in [
            "a",
            "person_test_user",
            "42",
            "...",
            "a b",
            "…",
            longest.as_str(),
        ] {
            assert_eq!(BoxId::new(good).unwrap().as_str(), good);
            let json = serde_json::to_string(good).unwrap();
            assert_eq!(serde_json::from_str::<BoxId>(&json).unwrap().as_str(), good);
        }
        let long = "x".repeat(257);
        for (bad, rule) in [
            ("", "box_id: must not be empty"),
            (long.as_str(), "box_id: 257 bytes; the limit is 256"),
            ("a\nb", "box_id: must not contain control characters"),
            ("a\u{85}b", "box_id: must not contain control characters"),
            ("a\u{202e}b", INVISIBLE),
            ("a\u{200b}b", INVISIBLE),
            ("a\u{a0}b", INVISIBLE),
            ("a/b", "box_id: must not contain /"),
            (".", "box_id: must not be . or .."),
            ("..", "box_id: must not be . or .."),
        ] {
            assert_eq!(BoxId::new(bad).unwrap_err().to_string(), rule);
            let json = serde_json::to_string(bad).unwrap();
            let error = serde_json::from_str::<BoxId>(&json).unwrap_err();
            assert_eq!(Invalid::from(error).to_string(), rule);
        }
    }

    #[test]
    fn each_id_names_its_own_field() {
        assert_eq!(CommandId::new("").unwrap_err().field(), "command_id");
        assert_eq!(ShellId::new("/").unwrap_err().field(), "shell_id");
    }

    #[test]
    fn fresh_ids_are_hex_distinct_and_sorted_by_age() {
        let ids: Vec<_> = (0..100).map(|_| CommandId::fresh()).collect();
        assert!(ids.iter().all(|id| id.as_str().len() == 32));
        assert!(
            ids.iter()
                .all(|id| id.as_str().bytes().all(|b| b.is_ascii_hexdigit()))
        );
        assert!(ids.is_sorted());
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(&ids[0].as_str()[12..13], "7");
    }
}
