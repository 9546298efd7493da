//! Reads a request's body, with limits on its size, its time, and the size of all bodies together.

use super::error::ApiError;
use super::fields::Fields;
use super::memory::{Estimate, Memory, Unsent};
use super::state::Shared;
use axum::body::{Body, BodyDataStream};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::time::Duration;
use taskgraph::json::plain;
use tokio::time::timeout;

/// How long the rest of an oversized body is read, so that its sender gets to see the answer.
const POLITENESS: Duration = Duration::from_secs(5);

/// The text of a body, with its share of memory.
pub struct Received {
    bytes: Vec<u8>,
    memory: Memory,
}

impl Received {
    /// Bytes of the body.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Parses the fields. For a long body this takes a while, so it belongs into [`super::prompts::beside`]. The memory
    /// comes first, so that a `let` drops it after the fields.
    ///
    /// # Errors
    /// The body is not JSON, or not an object.
    pub fn fields(self) -> Result<(Memory, Fields), ApiError> {
        let fields = Fields(parse::<Map<String, Value>>(&self.bytes)?);
        Ok((self.memory, fields))
    }
}

/// Receives the body of `request`, which should be JSON, and reserves memory to parse it.
///
/// # Errors
/// It is declared as something else, is too long, or does not arrive.
pub async fn receive(app: &Shared, request: Request) -> Result<Received, ApiError> {
    if !declares_json(request.headers()) {
        return Err(ApiError::not_json());
    }
    let (bytes, mut memory, values) = read(app, request).await?;
    let reserved = memory.reserve_values(app, values).await;
    reserved.map_err(|error| ApiError::failed(error.to_string(), "internal_error"))?;
    Ok(Received { bytes, memory })
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

/// Returns the text, its memory, and the estimated size of its values.
async fn read(app: &Shared, request: Request) -> Result<(Vec<u8>, Memory, usize), ApiError> {
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
        Ok(Err(Problem::NoMemory)) => Err(no_memory()),
        Ok(Err(Problem::Broken(problem))) => {
            Err(ApiError::invalid(format!("the body cannot be read: {problem}")))
        }
        Ok(Ok(read)) => Ok(read),
    }
}

/// The error if others have the memory.
pub fn no_memory() -> ApiError {
    ApiError::unavailable("the server is reading too many requests at once", "busy")
}

enum Problem {
    TooLong,
    NoMemory,
    Broken(String),
}

async fn collect(app: &Shared, stream: &mut BodyDataStream) -> Result<(Vec<u8>, Memory, usize), Problem> {
    let mut bytes = Vec::new();
    let mut memory = Memory::default();
    let mut values = Estimate::default();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| Problem::Broken(error.to_string()))?;
        if bytes.len() + chunk.len() > app.limits.body_bytes {
            return Err(Problem::TooLong);
        }
        memory.grow(app, bytes.len() + chunk.len()).map_err(|_| Problem::NoMemory)?;
        values.add(&chunk);
        bytes.extend_from_slice(&chunk);
    }
    Ok((bytes, memory, values.bytes))
}

/// Reads and drops the rest, for a limited time.
async fn discard(mut stream: BodyDataStream) {
    let all = async { while let Some(Ok(_)) = stream.next().await {} };
    let _ = timeout(POLITENESS, all).await;
}

/// An answer of `text`, which is JSON.
pub fn json_body(text: String) -> Response {
    json(Body::from(text))
}

/// An answer of `text`, which is JSON. It keeps `memory` until it is sent.
pub fn kept_json_body(memory: Memory, text: String) -> Response {
    json(Body::new(Unsent::held(memory, text)))
}

/// An answer of `text`, which is JSON. It keeps `memory` until it is sent, and takes more if the body was shorter.
///
/// # Errors
/// Others have the memory.
pub fn held_json_body(app: &Shared, memory: Memory, text: String) -> Result<Response, ApiError> {
    let unsent = Unsent::new(app, memory, text).map_err(|_| no_memory())?;
    Ok(json(Body::new(unsent)))
}

fn json(body: Body) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::limits::Limits;
    use futures_util::FutureExt;

    fn received(app: &Shared, text: &str) -> Result<Received, ApiError> {
        let request = axum::http::Request::builder().header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(text.to_string())).unwrap();
        // Without waiting for memory, only the timer needs a runtime.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _guard = runtime.enter();
        receive(app, request).now_or_never().expect("no wait")
    }

    #[test]
    fn the_memory_of_a_body_is_held_as_long_as_its_fields() {
        let app = Shared::new(Limits { all_bodies_bytes: 1 << 20, ..Limits::default() }, None);
        let text = format!("{{\"prompt\": \"a\", \"x\": [{}0]}}", "{\"\": 0}, ".repeat(10_000));
        let (memory, mut fields) = received(&app, &text).unwrap().fields().unwrap();
        assert_eq!(app.bodies.available_permits(), 1024 - text.len().div_ceil(1024));
        assert_eq!(app.values.available_permits(), 0, "10000 objects are more than 1 MiB");
        assert_eq!(fields.text("prompt"), Ok(Some("a".to_string())));
        drop(memory);
        assert_eq!((app.bodies.available_permits(), app.values.available_permits()), (1024, 1024));
        // A body that is not JSON gives all back.
        assert!(received(&app, &text[1..]).unwrap().fields().is_err());
        assert_eq!((app.bodies.available_permits(), app.values.available_permits()), (1024, 1024));
    }

    #[test]
    fn long_text_takes_no_memory_for_values() {
        let app = Shared::new(Limits { all_bodies_bytes: 1 << 20, encoders: 4, ..Limits::default() }, None);
        let body = received(&app, &format!("{{\"prompt\": \"{}\"}}", "a, [b]: ".repeat(20_000))).unwrap();
        assert_eq!(app.values.available_permits(), 1024);
        drop(body);
        assert_eq!(app.bodies.available_permits(), 1024);
    }
}
