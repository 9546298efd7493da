//! Routes paths to handlers, and does what all of them need.

use super::error::ApiError;
use super::state::{App, Phase};
use super::{chat, completions, pages, tokens};
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::time::Instant;

/// Open to everybody, so that monitoring needs no key.
const HEALTH: &str = "/health";
/// All paths, as the metrics name them.
const PATHS: [&str; 8] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    HEALTH,
    "/metrics",
    "/tokenize",
    "/detokenize",
    "/v1/models/{name}",
];

/// All endpoints.
pub fn router(app: App) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/models", get(pages::models))
        // Hub names contain a slash.
        .route("/v1/models/{*name}", get(pages::model))
        .route(HEALTH, get(pages::health))
        .route("/metrics", get(pages::metrics))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .fallback(|request: Request| async move { ApiError::no_path(request.uri().path()) })
        .method_not_allowed_fallback(|request: Request| async move {
            ApiError::method(request.method().as_str(), request.uri().path())
        })
        .layer(middleware::from_fn_with_state(App::clone(&app), admit))
        .with_state(app)
}

/// Checks the key, counts the answer, and delays refusals if there are many.
async fn admit(State(app): State<App>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let known = PATHS.iter().find(|known| **known == path).copied();
    let handler = known.unwrap_or(if path.starts_with("/v1/models/") { PATHS[7] } else { "other" });
    let admitted = path == HEALTH || app.key.as_ref().is_none_or(|key| key.admits(request.headers()));
    let response = match admitted {
        true => next.run(request).await,
        false => ApiError::unauthorized().into_response(),
    };
    if let Some(ready) = app.ready.get() {
        ready.metrics.answered(handler, response.status().as_u16());
    }
    if response.status().is_client_error() {
        hold_back(&app).await;
    }
    response
}

/// Waits for the pace of refusals while the server serves.
async fn hold_back(app: &App) {
    let wait = app.pace.wait(Instant::now());
    if wait.is_zero() {
        return;
    }
    let mut phase = app.phase.subscribe();
    tokio::select! {
        () = tokio::time::sleep(wait) => {}
        _ = phase.wait_for(|phase| *phase != Phase::Serving) => {}
    }
}
