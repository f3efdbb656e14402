//! Parameters in the path of a request.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::http::refusal::{Refusal, RefusalReason};

/// The parameters in the path. An invalid one has an error in the format of AIO.
#[derive(Debug)]
pub(super) struct Path<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let found = axum::extract::Path::from_request_parts(parts, state).await;
        let invalid = |_| Refusal::new(RefusalReason::Malformed, "path: must be UTF-8");
        found.map(|found| Self(found.0)).map_err(invalid)
    }
}
