//! Template for the id of the box of a call that names none.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;

use box_protocol::{Invalid, is_invisible};

/// Default template.
pub const DEFAULT_SESSION_ID_TEMPLATE: &str = "{launcher_type}_{launcher_id}";

/// Origin of a call. Every member may be absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    /// Id of the query, as text.
    pub query_id: Option<String>,
    /// Type of the launcher, such as `person` or `group`.
    pub launcher_type: Option<String>,
    /// Id of the launcher.
    pub launcher_id: Option<String>,
    /// Id of the sender.
    pub sender_id: Option<String>,
    /// Further variables that templates may name.
    pub variables: BTreeMap<String, String>,
}

impl Query {
    /// Creates a query with only an id.
    #[allow(clippy::needless_pass_by_value, reason = "numbers and texts alike")]
    pub fn new(query_id: impl ToString) -> Self {
        Self {
            query_id: Some(query_id.to_string()),
            ..Self::default()
        }
    }

    /// Sets the launcher of the query.
    pub fn from_launcher(mut self, kind: impl Into<String>, id: impl Into<String>) -> Self {
        self.launcher_type = Some(kind.into());
        self.launcher_id = Some(id.into());
        self
    }

    fn variable(&self, name: &str) -> Option<&str> {
        let member = match name {
            "query_id" => self.query_id.as_deref(),
            "launcher_type" => self.launcher_type.as_deref(),
            "launcher_id" => self.launcher_id.as_deref(),
            "sender_id" => self.sender_id.as_deref(),
            "global" => Some("global"),
            _ => None,
        };
        member
            .or_else(|| self.variables.get(name).map(String::as_str))
            .filter(|value| !value.trim().is_empty())
    }
}

/// A text with `{variables}` in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionIdTemplate(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Variable(String),
}

impl SessionIdTemplate {
    /// Parses a template; refuses an unbalanced brace.
    pub fn parse(template: &str) -> Result<Self, Invalid> {
        let mut parts = Vec::new();
        let mut rest = template;
        while !rest.is_empty() {
            let (text, after) = match rest.split_once('{') {
                Some((text, after)) => (text, Some(after)),
                None => (rest, None),
            };
            if text.contains('}') {
                return Err(malformed());
            }
            if !text.is_empty() {
                parts.push(Part::Text(text.to_owned()));
            }
            let Some(after) = after else { break };
            let (name, after) = after.split_once('}').ok_or_else(malformed)?;
            if name.is_empty() || name.contains('{') {
                return Err(malformed());
            }
            parts.push(Part::Variable(name.to_owned()));
            rest = after;
        }
        Ok(Self(parts))
    }

    /// Returns the box id for this query.
    /// Expands the template if the query has all its variables. Otherwise it returns the id of the query, or `None`
    /// without one.
    pub fn session_id(&self, query: &Query) -> Option<String> {
        self.expand(query)
            .or_else(|| query.variable("query_id").map(|id| escape(id).into_owned()))
    }

    fn expand(&self, query: &Query) -> Option<String> {
        let mut id = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => id.push_str(text),
                Part::Variable(name) => id.push_str(&escape(query.variable(name)?)),
            }
        }
        (!id.trim().is_empty()).then_some(id)
    }
}

fn malformed() -> Invalid {
    Invalid::new(
        "session_id_template",
        "has unbalanced braces; write a variable as {name}",
    )
}

/// Escapes characters that an id may not contain, as `%` and hex.
/// Dropping them would let two launchers share a box.
fn escape(value: &str) -> Cow<'_, str> {
    let special = |character: char| is_invisible(character) || matches!(character, '/' | '%');
    if !value.contains(special) {
        return Cow::Borrowed(value);
    }
    let mut text = String::with_capacity(value.len() + 8);
    for character in value.chars() {
        if special(character) {
            for byte in character.encode_utf8(&mut [0; 4]).bytes() {
                let _ = write!(text, "%{byte:02X}");
            }
        } else {
            text.push(character);
        }
    }
    Cow::Owned(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use box_protocol::BoxId;

    fn id(template: &str, query: &Query) -> Option<String> {
        SessionIdTemplate::parse(template)
            .unwrap()
            .session_id(query)
    }

    fn person() -> Query {
        Query::new(7).from_launcher("person", "test_user")
    }

    #[test]
    fn launcher_type_and_id_by_default() {
        assert_eq!(
            id(DEFAULT_SESSION_ID_TEMPLATE, &person()).as_deref(),
            Some("person_test_user")
        );
    }

    #[test]
    fn a_query_without_a_launcher_has_a_separate_box() {
        assert_eq!(
            id(DEFAULT_SESSION_ID_TEMPLATE, &Query::new(42)).as_deref(),
            Some("42")
        );
        let half = Query {
            launcher_type: Some("person".into()),
            launcher_id: Some(" ".into()),
            ..Query::new(42)
        };
        assert_eq!(
            id(DEFAULT_SESSION_ID_TEMPLATE, &half).as_deref(),
            Some("42")
        );
    }

    #[test]
    fn a_query_without_values_has_no_id() {
        assert_eq!(id(DEFAULT_SESSION_ID_TEMPLATE, &Query::default()), None);
        assert_eq!(id("", &Query::default()), None);
    }

    #[test]
    fn templates_name_any_variable() {
        let mut query = person();
        query.sender_id = Some("s".into());
        query.variables.insert("team".into(), "blue".into());
        assert_eq!(id("{global}", &query).as_deref(), Some("global"));
        assert_eq!(
            id("box-{team}-{sender_id}-{query_id}", &query).as_deref(),
            Some("box-blue-s-7")
        );
    }

    #[test]
    fn different_launchers_never_share_an_id() {
        let of = |launcher: &str| {
            id(
                "{launcher_id}",
                &Query::default().from_launcher("p", launcher),
            )
        };
        let ids = [of("a/b"), of("a_b"), of("a%2Fb"), of("a\u{85}b")];
        assert_eq!(ids[0].as_deref(), Some("a%2Fb"));
        assert_eq!(ids[2].as_deref(), Some("a%252Fb"));
        assert_eq!(ids[3].as_deref(), Some("a%C2%85b"));
        for id in ids {
            BoxId::new(id.unwrap()).unwrap();
        }
    }

    #[test]
    fn unbalanced_braces_are_refused() {
        for bad in ["{a", "a}", "{}", "{a{b}}", "}{"] {
            let refused = SessionIdTemplate::parse(bad).unwrap_err();
            assert_eq!(refused.field(), "session_id_template", "{bad}");
        }
    }
}
