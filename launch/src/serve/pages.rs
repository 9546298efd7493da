//! Pages for clients to read: the model, the server's health, its metrics.

use super::body::json_body;
use super::error::ApiError;
use super::state::{App, Phase, Ready};
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, header};
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

/// `/metrics`. Available as long as the server lives.
pub async fn metrics(State(app): State<App>) -> Result<Response, ApiError> {
    let loading = || ApiError::unavailable("the model is loading", "loading");
    let ready = app.ready.get().ok_or_else(loading)?;
    let stats = match &*app.phase.borrow() {
        // A lost engine cannot be asked.
        Phase::Lost(_) => Default::default(),
        _ => ready.loaded.backend.stats(),
    };
    let mut response = Response::new(Body::from(ready.metrics.text(&stats)));
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}
