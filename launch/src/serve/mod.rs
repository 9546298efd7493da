//! OpenAI's HTTP API in front of an engine.
//!
//! [`backend`] is all that this module needs from an engine: requests of token ids go in, tokens with their text come out.
//! Everything else that a client sees is made here: JSON, streams, errors, limits, metrics.
//!
//! ```text
//! connections ── router ── completions, chat, tokens, pages
//!                              │ fields, generation, refused, messages, prompts: what the request asks for
//!                              ▼
//!                          answers ── backend         one task for each answer
//!                              │ format, logprobs, offsets
//!                              ▼
//!                          sse, or one object         a bounded channel between the two
//! ```

pub mod answers;
pub mod auth;
pub mod backend;
mod backlog;
mod body;
mod chat;
mod completions;
mod connections;
pub mod error;
mod fields;
mod format;
mod generation;
pub mod limits;
mod logprobs;
mod memory;
mod messages;
mod metrics;
pub mod of_engine;
mod offsets;
mod pace;
mod pages;
mod prompts;
mod refused;
mod router;
mod server;
mod sse;
pub mod state;
#[cfg(test)]
mod testing;
mod tokens;

pub use server::{Outcome, Server};
