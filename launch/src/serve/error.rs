//! Errors in the format of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::borrow::Cow;

/// An error that a client gets instead of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status of the answer.
    pub status: StatusCode,
    /// What is wrong, and what would be right.
    pub message: String,
    /// The class of the error.
    pub kind: &'static str,
    /// The field that is wrong.
    pub param: Option<String>,
    /// A code for programs.
    pub code: Option<&'static str>,
    /// Seconds after which a retry may succeed.
    pub retry_after: Option<u32>,
}

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";

/// Maximum number of characters of a message, and of the name of a field. Both may quote the request, which may be long.
const LONGEST: usize = 2000;

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, message: message.into(), kind, param: None, code: None, retry_after: None }
    }

    /// The request as a whole is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, message)
    }

    /// A field is wrong.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError { param: Some(param.into()), ..Self::invalid(message) }
    }

    /// A field asks for something that this server does not support.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError { code: Some("unsupported_parameter"), ..Self::field(param, message) }
    }

    /// The prompt, or prompt and answer together, exceed the model's limit.
    pub fn too_long(param: &str, message: impl Into<String>) -> Self {
        ApiError { code: Some("context_length_exceeded"), ..Self::field(param, message) }
    }

    /// The model does not exist.
    pub fn no_model(asked: &str, served: &str) -> Self {
        ApiError {
            param: Some("model".into()),
            code: Some("model_not_found"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                INVALID,
                format!("the model {asked:?} does not exist; this server serves {served:?}"),
            )
        }
    }

    /// The path does not exist.
    pub fn no_path(path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, INVALID, format!("unknown path {path:?}"))
    }

    /// The path does not support this method.
    pub fn method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not support {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, message)
    }

    /// The key is missing or wrong.
    pub fn unauthorized() -> Self {
        ApiError {
            code: Some("invalid_api_key"),
            ..Self::new(
                StatusCode::UNAUTHORIZED,
                INVALID,
                "wrong or missing API key; send it as \"Authorization: Bearer KEY\"",
            )
        }
    }

    /// The body is longer than allowed.
    pub fn body_too_long(limit: usize) -> Self {
        let message = format!("the request's body is longer than this server's limit of {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, message)
    }

    /// The body did not arrive in time.
    pub fn body_too_late() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, INVALID, "the request's body did not arrive in time")
    }

    /// The body is not declared as JSON.
    pub fn not_json() -> Self {
        let message = "the body must be JSON; send it with \"Content-Type: application/json\"";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, message)
    }

    /// The body uses a transfer coding that this server does not support.
    pub fn transfer_coding(coding: &str) -> Self {
        let message = format!("\"Transfer-Encoding: {coding}\" is not supported; only chunked is");
        Self::new(StatusCode::NOT_IMPLEMENTED, INVALID, message)
    }

    /// The body is compressed or otherwise encoded.
    pub fn content_coding(coding: &str) -> Self {
        let message = format!("\"Content-Encoding: {coding}\" is not supported; send the JSON as it is");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, message)
    }

    /// The queue is full.
    pub fn busy(seconds: u32) -> Self {
        ApiError {
            code: Some("rate_limit_exceeded"),
            retry_after: Some(seconds),
            ..Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                "rate_limit_error",
                "all slots are taken and the queue is full; try again later",
            )
        }
    }

    /// The server accepts no requests now.
    pub fn unavailable(message: impl Into<String>, code: &'static str) -> Self {
        ApiError {
            code: Some(code),
            retry_after: Some(1),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, message)
        }
    }

    /// The request was accepted and failed.
    pub fn failed(message: impl Into<String>, code: &'static str) -> Self {
        ApiError { code: Some(code), ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, message) }
    }

    /// The JSON object that clients get, in a body or in a stream.
    pub fn object(&self) -> Value {
        json!({"error": {
            "message": cut(&self.message),
            "type": self.kind,
            "param": self.param.as_deref().map(cut),
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.object().to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// The beginning of a long text.
fn cut(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(LONGEST) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}...", &text[..end])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_never_repeats_a_long_request() {
        let long = "é".repeat(1 << 20);
        let object = ApiError::no_model(&long, "m").object();
        let message = object["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("the model \"éé") && message.ends_with("é..."));
        assert_eq!(message.chars().count(), LONGEST + 3);
        let object = ApiError::unsupported(long, "not supported").object();
        assert_eq!(object["error"]["message"], "not supported");
        assert_eq!(object["error"]["param"].as_str().unwrap().chars().count(), LONGEST + 3);
        assert_eq!(ApiError::invalid("x").object()["error"]["param"], Value::Null);
    }
}
