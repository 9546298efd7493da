//! Answers as server-sent events: `data: {...}`, and `data: [DONE]` at the end.

use super::answers::{Answers, Ending, Piece, Usage};
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::stream;

/// How an endpoint formats its events. Each event is one JSON text.
pub trait Events: Send + 'static {
    /// The first events, before any token.
    fn begin(&mut self) -> Vec<String>;
    /// The events for a piece of an answer.
    fn piece(&mut self, piece: &Piece) -> Vec<String>;
    /// The event with the numbers of tokens and no choices.
    fn usage(&mut self, usage: Usage) -> String;
}

struct State<E> {
    answers: Answers,
    events: E,
    include_usage: bool,
    begun: bool,
    done: bool,
}

/// The stream of `answers`. It reads them no faster than the client does.
pub fn response<E: Events>(answers: Answers, events: E, include_usage: bool) -> Response {
    let state = State { answers, events, include_usage, begun: false, done: false };
    let body = stream::unfold(state, |mut state| async move {
        let bytes = next(&mut state).await?;
        Some((Ok::<Bytes, std::convert::Infallible>(bytes), state))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Tells proxies not to buffer the stream.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

async fn next<E: Events>(state: &mut State<E>) -> Option<Bytes> {
    if state.done {
        return None;
    }
    if !state.begun {
        state.begun = true;
        let first = state.events.begin();
        if !first.is_empty() {
            return Some(data(first));
        }
    }
    let Some(piece) = state.answers.next().await else {
        state.done = true;
        let mut last = Vec::new();
        if state.include_usage {
            last.push(state.events.usage(state.answers.usage));
        }
        last.push("[DONE]".into());
        return Some(data(last));
    };
    if let Some(Ending::Failed(error)) = &piece.ending {
        state.done = true;
        return Some(data(vec![error.object().to_string(), "[DONE]".into()]));
    }
    Some(data(state.events.piece(&piece)))
}

fn data(events: Vec<String>) -> Bytes {
    let mut out = String::with_capacity(events.iter().map(|event| event.len() + 8).sum());
    for event in events {
        out.push_str("data: ");
        out.push_str(&event);
        out.push_str("\n\n");
    }
    Bytes::from(out)
}
