//! Reads a request's body, with limits on its size, its time, and the size of all bodies together.

use super::error::ApiError;
use super::limits::Limits;
use super::state::Shared;
use axum::body::{Body, BodyDataStream};
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;
use taskgraph::json::plain;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

/// How long the rest of an oversized body is read, so that its sender gets to see the answer.
const POLITENESS: Duration = Duration::from_secs(5);

/// A value read from a body. Holds the body's share of memory.
pub struct Read<T> {
    /// The value.
    pub value: T,
    /// Bytes of the body.
    pub bytes: usize,
    /// Held as long as the value may be in memory.
    pub memory: Option<OwnedSemaphorePermit>,
}

/// Reads `request`'s body as JSON. Unknown fields are ignored.
///
/// # Errors
/// It is not JSON, has wrong fields, is too long, or does not arrive.
pub async fn read_json<T: DeserializeOwned>(app: &Shared, request: Request) -> Result<Read<T>, ApiError> {
    if !declares_json(request.headers()) {
        return Err(ApiError::not_json());
    }
    let (bytes, memory) = read(app, request).await?;
    Ok(Read { value: parse(&bytes)?, bytes: bytes.len(), memory })
}

/// Parses `bytes` as JSON. An error names its place.
fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let place = error.path().to_string();
        let inner = error.into_inner();
        if inner.is_data() && place != "." {
            ApiError::field(place.clone(), format!("`{place}`: {}", plain(&inner.to_string())))
        } else if inner.is_data() {
            ApiError::invalid(format!("the body is not a request: {}", plain(&inner.to_string())))
        } else {
            ApiError::invalid(format!("the body is not valid JSON: {inner}"))
        }
    })?;
    deserializer.end().map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")))?;
    Ok(value)
}

/// Requires the JSON content type. Any web page can make a browser send other types to this server. For JSON, the
/// browser asks the server first.
fn declares_json(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    value.split(';').next().unwrap_or("").trim().eq_ignore_ascii_case("application/json")
}

/// Refuses compressed or otherwise encoded bodies, which could grow without limit when decoded.
fn check_codings(headers: &HeaderMap) -> Result<(), ApiError> {
    let other = |name: header::HeaderName, known: &str| {
        let values = headers.get_all(name).iter();
        let codings = values.flat_map(|value| value.as_bytes().split(|&byte| byte == b','));
        let mut codings = codings.map(|coding| String::from_utf8_lossy(coding.trim_ascii()).into_owned());
        codings.find(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(known))
    };
    if let Some(coding) = other(header::TRANSFER_ENCODING, "chunked") {
        return Err(ApiError::transfer_coding(&coding));
    }
    other(header::CONTENT_ENCODING, "identity")
        .map_or(Ok(()), |coding| Err(ApiError::content_coding(&coding)))
}

async fn read(app: &Shared, request: Request) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ApiError> {
    let limits = &app.limits;
    let (head, body) = request.into_parts();
    check_codings(&head.headers)?;
    let length = head.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let mut stream = body.into_data_stream();
    if length.is_some_and(|length: u64| length > limits.body_bytes as u64) {
        // A client that waits for permission to send has sent nothing yet.
        if !head.headers.contains_key(header::EXPECT) {
            discard(stream).await;
        }
        return Err(ApiError::body_too_long(limits.body_bytes));
    }
    match timeout(limits.body_time, collect(app, &mut stream)).await {
        Err(_) => Err(ApiError::body_too_late()),
        Ok(Err(Problem::TooLong)) => {
            discard(stream).await;
            Err(ApiError::body_too_long(limits.body_bytes))
        }
        Ok(Err(Problem::NoMemory)) => {
            Err(ApiError::unavailable("the server is reading too many requests at once", "busy"))
        }
        Ok(Err(Problem::Broken(problem))) => {
            Err(ApiError::invalid(format!("the body cannot be read: {problem}")))
        }
        Ok(Ok(read)) => Ok(read),
    }
}

enum Problem {
    TooLong,
    NoMemory,
    Broken(String),
}

async fn collect(
    app: &Shared,
    stream: &mut BodyDataStream,
) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), Problem> {
    let Limits { body_bytes, .. } = app.limits;
    let mut bytes = Vec::new();
    let mut memory: Option<OwnedSemaphorePermit> = None;
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| Problem::Broken(error.to_string()))?;
        if bytes.len() + chunk.len() > body_bytes {
            return Err(Problem::TooLong);
        }
        let held = memory.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = (bytes.len() + chunk.len()).div_ceil(1024).saturating_sub(held);
        if more > 0 {
            let more =
                Arc::clone(&app.bodies).try_acquire_many_owned(more as u32).map_err(|_| Problem::NoMemory)?;
            match &mut memory {
                Some(memory) => memory.merge(more),
                None => memory = Some(more),
            }
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok((bytes, memory))
}

/// Reads and drops the rest, for a limited time.
async fn discard(mut stream: BodyDataStream) {
    let all = async { while let Some(Ok(_)) = stream.next().await {} };
    let _ = timeout(POLITENESS, all).await;
}

/// A body of `text`, which is JSON.
pub fn json_body(text: String) -> axum::response::Response {
    let mut response = axum::response::Response::new(Body::from(text));
    let json = axum::http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
