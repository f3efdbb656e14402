//! Removal of the server's tokens from requests that it forwards to a box.

use axum::http::HeaderMap;
use axum::http::header::{COOKIE, HeaderName, HeaderValue};
use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use box_rpc::Tokens;
use percent_encoding::percent_decode_str;

/// The minimum length of a word that can hold a token of 32 bytes.
const MIN_WORD_BYTES: usize = 40;

const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);

/// Both base64 alphabets, with optional padding.
const DECODERS: [GeneralPurpose; 2] = [
    GeneralPurpose::new(&alphabet::STANDARD, LENIENT),
    GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT),
];

/// The tokens of this server, and the headers that carry tokens only.
#[derive(Debug, Clone, Default)]
pub struct TokenFilter {
    tokens: Option<Tokens>,
    headers: Vec<HeaderName>,
}

impl TokenFilter {
    /// Creates a filter for these tokens, which always removes these headers.
    pub fn new(tokens: Option<Tokens>, headers: impl IntoIterator<Item = &'static str>) -> Self {
        let headers = headers.into_iter().map(HeaderName::from_static).collect();
        Self { tokens, headers }
    }

    /// Removes every token of this server from the headers of a request.
    ///
    /// A token may be in any header: plain, in base64 as in Basic authentication, or percent-encoded. Only the cookies
    /// that hold a token are removed. The token headers of protocols are always removed, because their values may open
    /// another port or box.
    pub fn clean_headers(&self, headers: &mut HeaderMap) {
        for name in &self.headers {
            headers.remove(name);
        }
        let Some(tokens) = &self.tokens else {
            return;
        };
        let cookies: Vec<_> = headers.get_all(COOKIE).iter().cloned().collect();
        headers.remove(COOKIE);
        for value in cookies {
            if let Some(remaining) = cookies_without_tokens(tokens, &value) {
                headers.append(COOKIE, remaining);
            }
        }
        let named: Vec<HeaderName> = headers
            .iter()
            .filter(|(_, value)| contains_token(tokens, value.as_bytes()))
            .map(|(name, _)| name.clone())
            .collect();
        for name in named {
            headers.remove(name);
        }
    }

    /// Returns a query without the parts that hold a token of this server.
    pub fn clean_query(&self, query: &str) -> String {
        let Some(tokens) = &self.tokens else {
            return query.to_owned();
        };
        let parts = query.split('&');
        let remaining: Vec<_> = parts
            .filter(|part| !contains_token(tokens, part.as_bytes()))
            .collect();
        remaining.join("&")
    }

    /// Returns whether a text holds a token of this server.
    pub fn has_token(&self, text: &str) -> bool {
        let tokens = self.tokens.as_ref();
        tokens.is_some_and(|tokens| contains_token(tokens, text.as_bytes()))
    }
}

/// Returns the cookies of a header that hold no token.
fn cookies_without_tokens(tokens: &Tokens, value: &HeaderValue) -> Option<HeaderValue> {
    if !contains_token(tokens, value.as_bytes()) {
        return Some(value.clone());
    }
    let text = std::str::from_utf8(value.as_bytes()).ok()?;
    let remaining: Vec<_> = text
        .split(';')
        .map(str::trim)
        .filter(|cookie| !contains_token(tokens, cookie.as_bytes()))
        .collect();
    let remaining = HeaderValue::try_from(remaining.join("; ")).ok()?;
    (!remaining.is_empty()).then_some(remaining)
}

/// Returns whether a text holds a token: plain, percent-encoded or in base64.
fn contains_token(tokens: &Tokens, text: &[u8]) -> bool {
    if tokens.is_any_in(text) {
        return true;
    }
    let Ok(text) = std::str::from_utf8(text) else {
        return false;
    };
    let decoded = percent_decode_str(text);
    let plain: Vec<u8> = decoded.collect();
    if plain.len() != text.len() && tokens.is_any_in(&plain) {
        return true;
    }
    let is_outside = |byte: &u8| !(byte.is_ascii_alphanumeric() || b"+/-_".contains(byte));
    let words = plain.split(is_outside);
    let mut long = words.filter(|word| word.len() >= MIN_WORD_BYTES);
    long.any(|word| {
        let mut decoded = DECODERS
            .iter()
            .filter_map(|decoder| decoder.decode(word).ok());
        decoded.any(|bytes| tokens.is_any_in(&bytes))
    })
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

    use super::*;

    const FACE_HEADER: &str = "x-token-of-a-protocol";
    const TOKEN: &str = "ann/0123456789+bcdef0123456789abcdef=";

    fn filter() -> TokenFilter {
        let tokens = Tokens::new([("ann".to_owned(), TOKEN.to_owned())]);
        TokenFilter::new(Some(tokens), [FACE_HEADER])
    }

    #[test]
    fn tokens_are_removed_from_all_headers_and_encodings() {
        let basic = STANDARD.encode(format!("user:{TOKEN}"));
        let other = STANDARD.encode(format!("user:{}", TOKEN.to_uppercase()));
        let mut passed = HeaderMap::new();
        for (name, value) in [
            ("authorization", format!("Bearer {TOKEN}")),
            ("proxy-authorization", format!("Basic {basic}")),
            (FACE_HEADER, "of another port".to_owned()),
            ("x-aio-api-key", TOKEN.to_owned()),
            ("x-anything", format!("a, b=\"{TOKEN}\"")),
            (
                "referer",
                "http://h/?t=ann%2F0123456789%2Bbcdef0123456789abcdef%3D".to_owned(),
            ),
            ("x-url-safe", URL_SAFE_NO_PAD.encode(TOKEN)),
            ("x-api-key", "the guest's own".to_owned()),
            ("x-other", format!("Basic {other}")),
            ("cookie", format!("mine=1; t={TOKEN}; b={basic}; last=2")),
            ("cookie", format!("t={TOKEN}")),
        ] {
            passed.append(name, value.parse().unwrap());
        }
        filter().clean_headers(&mut passed);
        let mut left: Vec<_> = passed.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["cookie", "x-api-key", "x-other"]);
        assert_eq!(passed.get_all(COOKIE).iter().count(), 1);
        assert_eq!(passed[COOKIE], "mine=1; last=2");
    }

    #[test]
    fn tokens_are_removed_from_a_query() {
        let query = format!("a=1&api_key={TOKEN}&b=2&ann%2F0123456789%2bbcdef0123456789abcdef%3D");
        assert_eq!(filter().clean_query(&query), "a=1&b=2");
        assert_eq!(filter().clean_query("a=1&&b"), "a=1&&b");
        assert!(filter().has_token(&format!("/x/{TOKEN}")) && !filter().has_token("/x"));
    }
}
