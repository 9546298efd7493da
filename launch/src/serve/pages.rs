//! Pages for clients to read: the model, the server's health, its metrics.

use super::body::json_body;
use super::error::ApiError;
use super::metrics::classic;
use super::state::{App, Phase, Ready};
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// `/v1/models`.
pub async fn models(State(app): State<App>) -> Result<Response, ApiError> {
    let object = json!({"object": "list", "data": [model_object(app.serving()?)]});
    Ok(json_body(object.to_string()))
}

/// `/v1/models/NAME`.
pub async fn model(
    State(app): State<App>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(name) = name.map_err(|error| ApiError::field("model", error.body_text()))?;
    let ready = app.serving()?;
    let served = &ready.loaded.model.name;
    if name == *served {
        Ok(json_body(model_object(ready).to_string()))
    } else {
        Err(ApiError::no_model(&name, served))
    }
}

fn model_object(ready: &Ready) -> Value {
    let model = &ready.loaded.model;
    json!({
        "id": model.name, "object": "model", "created": ready.created, "owned_by": "mpk",
        "root": model.name, "parent": null, "max_model_len": model.max_seq_len,
    })
}

/// `/health`: 200 with an empty body, or the reason why requests are not accepted.
pub async fn health(State(app): State<App>) -> Response {
    match app.serving() {
        Ok(_) => Response::new(Body::empty()),
        Err(error) => error.into_response(),
    }
}

/// The format of OpenMetrics.
const OPEN: &str = "application/openmetrics-text";

/// `/metrics`, in the classic format unless the client names OpenMetrics. Available as long as the server lives.
pub async fn metrics(State(app): State<App>, headers: HeaderMap) -> Result<Response, ApiError> {
    let loading = || ApiError::unavailable("the model is loading", "loading");
    let ready = app.ready.get().ok_or_else(loading)?;
    // The engine takes its own locks, so the phase is not borrowed meanwhile.
    let lost = matches!(&*app.phase.borrow(), Phase::Lost(_));
    // A lost engine cannot be asked.
    let stats = if lost { Default::default() } else { ready.loaded.backend.stats() };
    let open = ready.metrics.text(&stats);
    let (text, kind) = if names_open(&headers) {
        (open, "application/openmetrics-text; version=1.0.0; charset=utf-8")
    } else {
        (classic(&open), "text/plain; version=0.0.4; charset=utf-8")
    };
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

/// True if the client accepts the format of OpenMetrics by name.
fn names_open(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut kinds = values.flat_map(|value| value.split(','));
    kinds.any(|kind| kind.split(';').next().unwrap_or("").trim().eq_ignore_ascii_case(OPEN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_must_be_named() {
        let cases: [(&[&'static str], bool); 7] = [
            (&[], false),
            (&["*/*"], false),
            (&["text/plain;version=0.0.4"], false),
            (&["application/openmetrics-text"], true),
            (&["text/plain;q=0.5, Application/OpenMetrics-Text; version=1.0.0;q=0.9"], true),
            (&["text/html", "application/openmetrics-text;version=0.0.1"], true),
            (&["application/openmetrics-texts"], false),
        ];
        for (accept, named) in cases {
            let mut headers = HeaderMap::new();
            for &value in accept {
                headers.append(header::ACCEPT, HeaderValue::from_static(value));
            }
            assert_eq!(names_open(&headers), named, "{accept:?}");
        }
    }
}
