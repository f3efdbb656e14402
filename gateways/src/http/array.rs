//! JSON arrays that are sent part by part, so that a long list needs the memory of one part.

use std::io;

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::response::Response;
use futures::{Stream, StreamExt as _, stream};
use serde::Serialize;

use super::refusal::text_response;

/// Answers with the items of all parts as one JSON array. Dropping the body drops `parts`.
///
/// An error cuts the response: the client must not take a part for all.
pub fn array_response<T, E>(
    parts: impl Stream<Item = Result<Vec<T>, E>> + Send + 'static,
) -> Response
where
    T: Serialize + Send + 'static,
    E: std::fmt::Display + Send + 'static,
{
    let mut is_first = true;
    let texts = parts.map(move |part| {
        let items = part.map_err(|error| {
            tracing::debug!(%error, "cut a list");
            io::Error::other(error.to_string())
        })?;
        let mut text = Vec::new();
        for item in &items {
            if !std::mem::take(&mut is_first) {
                text.push(b',');
            }
            serde_json::to_writer(&mut text, item)?;
        }
        Ok::<_, io::Error>(Bytes::from(text))
    });
    let bracket =
        |text: &'static str| stream::once(async move { Ok(Bytes::from_static(text.as_bytes())) });
    let body: Body = Body::from_stream(bracket("[").chain(texts).chain(bracket("]")));
    text_response(StatusCode::OK, "application/json", body)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    async fn text(response: Response) -> Result<String, axum::Error> {
        let bytes = axum::body::to_bytes(response.into_body(), 1000).await?;
        Ok(String::from_utf8(bytes.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn parts_become_one_array() {
        let parts: [Result<_, Infallible>; 4] =
            [Ok(vec![]), Ok(vec![1, 2]), Ok(vec![]), Ok(vec![3])];
        let response = array_response(stream::iter(parts));
        assert_eq!(text(response).await.unwrap(), "[1,2,3]");
        let none: [Result<Vec<u8>, Infallible>; 0] = [];
        let response = array_response(stream::iter(none));
        assert_eq!(text(response).await.unwrap(), "[]");
    }

    #[tokio::test]
    async fn an_error_cuts_the_response() {
        let response = array_response(stream::iter([Ok(vec![1]), Err("gone"), Ok(vec![2])]));
        assert!(text(response).await.is_err());
    }
}
