//! Bodies and queries of requests, with clear errors.

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use box_protocol::Invalid;
use http_body_util::LengthLimitError;
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;

use super::refusal::{Refusal, RefusalReason};

/// The maximum length of a JSON body or a form.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

/// The maximum number of parameters of a query or a form.
const MAX_PARAMS: usize = 4096;

/// Reads a body of limited length.
pub async fn read(body: Body, max_bytes: usize) -> Result<Bytes, Refusal> {
    to_bytes(body, max_bytes).await.map_err(|error| {
        let source = std::error::Error::source(&error);
        if source.is_some_and(<dyn std::error::Error>::is::<LengthLimitError>) {
            let message = format!("body: longer than {max_bytes} bytes");
            return Refusal::new(RefusalReason::TooLarge, message);
        }
        Refusal::new(RefusalReason::Malformed, "body: ended early")
    })
}

/// A JSON body. Its `Content-Type` does not matter.
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<S: Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let bytes = read(request.into_body(), MAX_BODY_BYTES).await?;
        Ok(Self(from_json(&bytes)?))
    }
}

/// A JSON body, or the default without one.
#[derive(Debug)]
pub struct OptionalJson<T>(pub T);

impl<S: Sync, T: DeserializeOwned + Default> FromRequest<S> for OptionalJson<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let bytes = read(request.into_body(), MAX_BODY_BYTES).await?;
        let text = bytes.trim_ascii();
        if text.is_empty() {
            return Ok(Self(T::default()));
        }
        // A type with members would read a list as their values in order.
        if text.starts_with(b"[") {
            return Err(Invalid::new("body", "must be an object, not a list").into());
        }
        Ok(Self(from_json(&bytes)?))
    }
}

/// Parses JSON; the error names the invalid member.
pub fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Invalid> {
    let mut decoder = serde_json::Deserializer::from_slice(bytes);
    let parsed = serde_path_to_error::deserialize(&mut decoder).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if inner.is_syntax() || inner.is_eof() {
            return Invalid::new("body", format!("not JSON: {inner}"));
        }
        match path.as_str() {
            // The parser's message would name a type of this program.
            _ if inner.to_string().contains("expected struct ") => {
                let field = if path == "." { "body".to_owned() } else { path };
                Invalid::new(field, "must be a JSON object")
            }
            "." => Invalid::from(inner),
            _ => Invalid::new(path, inner.to_string()),
        }
    })?;
    let ended = decoder.end();
    ended.map_err(|error| Invalid::new("body", format!("not JSON: {error}")))?;
    Ok(parsed)
}

/// The parameters of a query or a form, in order; a name may occur several times.
#[derive(Debug, Default)]
pub struct Params(Vec<(String, String)>);

impl Params {
    /// Parses `a=1&b=2`.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let decode = |part: &str| {
            let spaced = part.replace('+', " ");
            let decoded = percent_decode_str(&spaced).decode_utf8();
            decoded
                .map(Into::into)
                .map_err(|_| Invalid::new("query", "must be UTF-8"))
        };
        let mut params = Vec::new();
        for part in text.split('&').filter(|part| !part.is_empty()) {
            if params.len() == MAX_PARAMS {
                let rule = format!("must have at most {MAX_PARAMS} parameters");
                return Err(Invalid::new("query", rule));
            }
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            params.push((decode(name)?, decode(value)?));
        }
        Ok(Self(params))
    }

    /// Returns all names and values.
    pub fn into_pairs(self) -> Vec<(String, String)> {
        self.0
    }

    /// Returns the first value of a parameter; `None` if it is absent or empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(known, _)| known == name);
        found
            .map(|(_, value)| value.as_str())
            .filter(|value| !value.is_empty())
    }

    /// Returns all values of a parameter.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let matching = self.0.iter().filter(move |(known, _)| known == name);
        matching.map(|(_, value)| value.as_str())
    }

    /// Returns the value of a required parameter.
    pub fn required(&self, name: &'static str) -> Result<&str, Invalid> {
        self.get(name).ok_or_else(|| Invalid::new(name, "missing"))
    }

    /// Returns a parsed value; `None` if the parameter is absent or empty.
    pub fn parsed<T: std::str::FromStr>(
        &self,
        name: &'static str,
        rule: &'static str,
    ) -> Result<Option<T>, Invalid> {
        let parse = |value: &str| value.parse().map_err(|_| Invalid::new(name, rule));
        self.get(name).map(parse).transpose()
    }

    /// Returns whether a parameter is `true` or `1`; `false` if it is absent.
    pub fn flag(&self, name: &'static str) -> Result<bool, Invalid> {
        match self.get(name) {
            None => Ok(false),
            Some(value) if value == "1" || value.eq_ignore_ascii_case("true") => Ok(true),
            Some(value) if value == "0" || value.eq_ignore_ascii_case("false") => Ok(false),
            Some(_) => Err(Invalid::new(name, "must be true or false")),
        }
    }
}

/// The parameters of the query.
impl<S: Sync> FromRequestParts<S> for Params {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        Ok(Self::parse(parts.uri.query().unwrap_or_default())?)
    }
}

/// The parameters of a form body.
#[derive(Debug)]
pub struct Form(pub Params);

impl<S: Sync> FromRequest<S> for Form {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let bytes = read(request.into_body(), MAX_BODY_BYTES).await?;
        let text = std::str::from_utf8(&bytes);
        let text = text.map_err(|_| Invalid::new("body", "must be UTF-8"))?;
        Ok(Self(Params::parse(text)?))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_query_may_repeat_a_name() {
        let params = Params::parse("path=%2Fa+b&path=c&&flag&n=x&t=true").unwrap();
        assert_eq!(params.all("path").collect::<Vec<_>>(), ["/a b", "c"]);
        assert_eq!(params.get("flag"), None);
        assert!(params.flag("t").unwrap() && !params.flag("absent").unwrap());
        assert!(params.flag("n").is_err() && params.required("other").is_err());
        assert!(params.parsed::<u32>("n", "must be a number").is_err());
        assert!(Params::parse("a=%ff").is_err());
        assert!(Params::parse(&"a&".repeat(5000)).is_err());
    }

    #[test]
    fn an_invalid_member_is_named() {
        type Map = BTreeMap<String, Vec<u8>>;
        let refused = |text: &str| from_json::<Map>(text.as_bytes()).unwrap_err().to_string();
        assert!(refused(r#"{"a":[1,"x"]}"#).starts_with("a[1]: "));
        assert!(refused("{").starts_with("body: not JSON"));
        assert!(refused("{} {}").starts_with("body: not JSON"));
        assert_eq!(from_json::<Map>(b"{}").unwrap(), Map::new());
    }

    #[test]
    fn a_message_has_no_name_of_a_type() {
        #[derive(Debug, serde::Deserialize)]
        struct Body {
            _member: u8,
        }
        for text in ["\"text\"", "[]"] {
            let message = from_json::<Body>(text.as_bytes()).unwrap_err().to_string();
            assert_eq!(message, "body: must be a JSON object");
        }
    }

    #[tokio::test]
    async fn a_list_is_not_an_optional_body() {
        #[derive(Debug, Default, serde::Deserialize)]
        #[serde(default)]
        struct Body {
            _member: u8,
        }
        for (text, is_accepted) in [("", true), ("{}", true), (" []", false)] {
            let request = Request::new(axum::body::Body::from(text));
            let body = OptionalJson::<Body>::from_request(request, &()).await;
            assert_eq!(body.is_ok(), is_accepted, "{text:?}");
        }
    }

    #[tokio::test]
    async fn a_long_body_is_refused_by_its_length() {
        let refused = read(Body::from("12345"), 4).await.unwrap_err();
        assert_eq!(refused.reason, RefusalReason::TooLarge);
        assert_eq!(read(Body::from("1234"), 4).await.unwrap(), "1234");
    }
}
