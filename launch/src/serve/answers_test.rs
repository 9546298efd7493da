//! Tests of [`super`].

use super::super::backend::{Backend, Capabilities, ModelInfo, Stats};
use super::super::limits::Limits;
use super::super::state::{Loaded, Shared};
use super::*;
use crate::model::tokenizer::Tokenizer;
use futures_util::stream;
use serde_json::Value;
use std::path::Path;

/// An engine that accepts all requests or none. All of them have these events.
struct Fixed {
    accepts: bool,
    events: Vec<Event>,
    eos: Vec<u32>,
}

impl Backend for Fixed {
    fn submit(&self, requests: Vec<Submission>) -> Result<Vec<Events>, Refusal> {
        if !self.accepts {
            return Err(Refusal::Full);
        }
        let events = |_| Box::pin(stream::iter(self.events.clone()).chain(stream::pending())) as Events;
        Ok(requests.iter().map(events).collect())
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }

    fn eos(&self) -> &[u32] {
        &self.eos
    }
}

fn app(accepts: bool, events: Vec<Event>, limits: Limits) -> App {
    app_of(Fixed { accepts, events, eos: Vec::new() }, None, limits)
}

fn app_of(backend: Fixed, tokenizer: Option<Tokenizer>, limits: Limits) -> App {
    let model = ModelInfo {
        name: "m".into(),
        max_seq_len: 100,
        vocab_size: 50,
        max_batch: 4,
        defaults: Sampling::default(),
    };
    let app = Shared::new(limits, None);
    app.set_ready(Loaded {
        backend: Box::new(backend),
        model,
        capabilities: Capabilities::default(),
        tokenizer,
        template: None,
    });
    app
}

/// As many prompts as `lengths`, with `n` answers each.
fn plan(lengths: &[usize], n: usize) -> Plan {
    let generation = Generation {
        stream: true,
        include_usage: false,
        n,
        max_tokens: Some(7),
        max_tokens_name: "max_tokens",
        min_tokens: 0,
        ignore_eos: false,
        stop_token_ids: Vec::new(),
        stop: Vec::new(),
        sampling: Sampling::default(),
        logprobs: None,
        return_token_ids: false,
    };
    Plan {
        prompts: lengths.iter().map(|&length| vec![1; length]).collect(),
        max_tokens: vec![7; lengths.len()],
        generation,
        arrival: Instant::now(),
    }
}

#[test]
fn only_accepted_requests_are_counted() {
    // The tasks of the answers need a runtime, but they need not run.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let _entered = runtime.enter();
    for (accepts, requests, tokens) in [(true, 2, 5), (false, 0, 0)] {
        let app = app(accepts, Vec::new(), Limits::default());
        let ready = app.ready.get().unwrap();
        let answers = start(&app, ready, plan(&[2, 3], 2));
        assert_eq!(answers.is_ok(), accepts);
        let text = ready.metrics.text(&Stats::default());
        for (name, count) in [
            ("request_params_n_count", requests),
            ("request_params_max_tokens_count", requests),
            ("request_prompt_tokens_count", requests),
            ("prompt_tokens_total", tokens),
        ] {
            let line = format!("mpk:{name}{{model_name=\"m\"}} {count}");
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}

#[test]
fn too_many_answers_name_the_field_that_asks_for_them() {
    let app = app(true, Vec::new(), Limits { choices: 3, ..Limits::default() });
    for (prompts, n, field) in [(4, 1, "prompt"), (1, 4, "n"), (2, 2, "n")] {
        let error = start(&app, app.ready.get().unwrap(), plan(&vec![1; prompts], n)).err().unwrap();
        assert_eq!(error.param.as_deref(), Some(field), "{}", error.message);
        assert!(error.message.contains("is more than 3, the maximum"), "{}", error.message);
    }
}

/// A server that drains has looked at the places before, and would not wait for such a request.
#[test]
fn a_request_that_is_ready_after_the_server_began_to_drain_is_refused() {
    let app = app(true, Vec::new(), Limits::default());
    let ready = app.ready.get().unwrap();
    app.go_on(Phase::Draining);
    for taken in [0, ready.all_places] {
        let _taken = app.places(ready, taken).unwrap();
        let error = start(&app, ready, plan(&[2], 1)).err().unwrap();
        assert_eq!((error.status.as_u16(), error.code), (503, Some("shutting_down")));
    }
    assert_eq!(ready.places.available_permits(), ready.all_places);
}

#[test]
fn a_stream_without_a_tokenizer_has_its_tokens_as_they_come() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let token = |id| Event::Token(Token { id, ..Token::default() });
    let events = vec![token(5), token(6), Event::End(String::new(), Finish::Length, 0)];
    let app = app(true, events, Limits::default());
    let mut plan = plan(&[2], 1);
    plan.generation.return_token_ids = true;
    let ids: Vec<Vec<u32>> = runtime.block_on(async {
        let mut answers = start(&app, app.ready.get().unwrap(), plan).unwrap();
        let mut ids = Vec::new();
        while let Some(piece) = answers.next().await {
            ids.push(piece.tokens.iter().map(|shown| shown.token.id).collect());
        }
        ids
    });
    assert_eq!(ids, [vec![5], vec![6], vec![]]);
}

/// The tokenizer's vocabulary has `The` as 272, `u` as 264, and the byte b as 3 + b.
#[test]
fn offsets_count_the_text_that_the_engine_adds() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let data: Value = serde_json::from_str(include_str!("../../testdata/byte_fallback.json")).unwrap();
    let tokenizer =
        Tokenizer::parse(Path::new("tokenizer.json"), data["tokenizer"].to_string().as_bytes()).unwrap();
    let byte = |byte: u32| 3 + byte;
    for (what, ignore_eos, ids, expected) in [
        ("an end of sequence before `min_tokens`", false, vec![272, 264, 272], vec![0usize, 3, 3]),
        ("`ignore_eos`", true, vec![272, 264, 272], vec![0, 3, 4]),
        ("a run", false, vec![272, byte(0xC3), byte(0xA9), 272], vec![0, 3, 3, 4]),
        ("a run that is not UTF-8", false, vec![byte(0xC5), byte(0x0E), byte(0xF2), 272], vec![0, 1, 2, 3]),
        ("such a run at the end", false, vec![272, byte(0xFF), byte(0xC3)], vec![0, 3, 4]),
        (
            "a run before a stop token",
            false,
            vec![272, 272, 272, byte(0xC3), byte(0xA9), byte(0xFF)],
            vec![0, 3, 6, 9, 9, 10],
        ),
    ] {
        let token = |&id: &u32| Event::Token(Token { id, logprob: Some(-0.5), ..Token::default() });
        let end = Event::End(String::new(), Finish::Stop, 0);
        let events = ids.iter().map(token).chain([end]).collect();
        let backend = Fixed { accepts: true, events, eos: vec![264] };
        let app = app_of(backend, Some(tokenizer.clone()), Limits::default());
        let mut plan = plan(&[2], 1);
        plan.generation.logprobs = Some(0);
        plan.generation.ignore_eos = ignore_eos;
        plan.generation.min_tokens = 5;
        plan.generation.stop_token_ids = vec![byte(0xFF)];
        let (all, _) = runtime.block_on(async {
            let answers = start(&app, app.ready.get().unwrap(), plan).unwrap();
            answers.whole().await.unwrap()
        });
        let found: Vec<usize> = all[0].tokens.iter().map(|shown| shown.offset).collect();
        assert_eq!(found, expected, "{what}");
    }
}
