//! The engine as a library, on one rank of the CPU target: requests that come and go, ends, text, and refusals.
//!
//! Its tokens are compared with those that Hugging Face transformers computed for the same checkpoint. Several ranks, lost
//! ranks and exit statuses are tested through mpk-run (`tests/tests`), which runs on the same engine.

use launch::engine::config::{BackendChoice, Progress};
use launch::engine::{Engine, ErrorKind, Event, FinishReason, ModelSpec, Request, RunConfig, SamplingParams};
use launch::model::model_json::Overrides;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;
use taskgraph::Tuning;

fn fixture(name: &str) -> PathBuf {
    let folder = if name == "tiny" { "../examples" } else { "../tests/fixtures" };
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(folder).join(name)
}

fn config() -> RunConfig {
    RunConfig { backend: BackendChoice::Cpu, tell: |_| {}, ..RunConfig::default() }
}

fn load(name: &str, config: RunConfig) -> Engine {
    Engine::load(ModelSpec::path(fixture(name).join("model.json")), config).unwrap()
}

/// Prompts, the tokens that follow them, and whether they end with an end-of-sequence token.
fn expected(name: &str) -> Vec<(Vec<u32>, Vec<u32>, bool)> {
    let text = std::fs::read(fixture(name).join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    let ids = |v: &Value| v.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let requests = expected["requests"].as_array().unwrap().iter().map(|request| {
        let mut tokens: Vec<u32> = ids(&request["tokens"]);
        tokens.truncate(request["finish_length"].as_u64().unwrap() as usize);
        (ids(&request["prompt_tokens"]), tokens, request["finish_reason"] == "eos")
    });
    requests.collect()
}

#[test]
fn requests_have_the_tokens_of_transformers_whatever_else_runs() {
    let engine = load("qwen3", config());
    let expected = expected("qwen3");
    assert!(expected.len() > 1);
    let requests =
        || expected.iter().map(|(prompt, tokens, _)| Request::tokens(prompt.clone(), tokens.len() as u32));
    // Together, then each alone, then together again: a request does not depend on earlier ones.
    let mut answers: Vec<_> =
        engine.submit_all(requests().collect()).unwrap().into_iter().map(|h| h.wait()).collect();
    for request in requests() {
        answers.push(engine.submit(request).unwrap().wait());
    }
    answers.extend(engine.submit_all(requests().collect()).unwrap().into_iter().map(|h| h.wait()));
    for (index, answer) in answers.iter().enumerate() {
        let (_, tokens, eos) = &expected[index % expected.len()];
        assert_eq!(&answer.tokens, tokens, "answer {index}");
        assert_eq!(answer.reason == FinishReason::Eos, *eos, "answer {index}");
    }
    engine.wait_idle();
    let stats = engine.stats();
    assert_eq!((stats.waiting, stats.running, stats.finished.total()), (0, 0, answers.len() as u64));
    assert_eq!(stats.new_tokens, answers.iter().map(|a| a.tokens.len() as u64).sum::<u64>());
    assert!(stats.launches >= 1 && stats.decode_steps > 0 && stats.kv_pages_used == 0, "{stats:?}");
    engine.shutdown(Duration::from_secs(60)).unwrap();
    let error = engine.submit(Request::tokens([1], 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stopped);
}

/// Otherwise a terminal keeps the bar.
#[test]
fn the_progress_of_loading_reaches_its_total() {
    let seen = Arc::new(Mutex::new((0, 0)));
    let of_engine = seen.clone();
    let progress = Progress(Arc::new(move |bytes, total| {
        let mut seen = of_engine.lock().unwrap();
        *seen = (seen.0 + bytes, total);
    }));
    load("tiny", RunConfig { progress: Some(progress), ..config() });
    let (bytes, total) = *seen.lock().unwrap();
    assert!(bytes == total && total > 1_000_000, "{bytes} of {total}");
}

#[test]
fn a_request_does_not_depend_on_its_end() {
    let engine = load("qwen3", config());
    let (prompt, tokens, _) = expected("qwen3").into_iter().find(|(_, _, eos)| *eos).unwrap();
    let more = tokens.len() as u32 + 3;
    let ignoring = Request { ignore_eos: true, ..Request::tokens(prompt.clone(), more) };
    let handles = engine.submit_all(vec![Request::tokens(prompt.clone(), more), ignoring]).unwrap();
    let [ended, ignored] = handles.into_iter().map(|h| h.wait()).collect::<Vec<_>>().try_into().unwrap();
    assert_eq!((&ended.tokens, ended.reason), (&tokens, FinishReason::Eos));
    assert_eq!((&ignored.tokens[..tokens.len()], ignored.reason), (&tokens[..], FinishReason::Length));
    assert_eq!(ignored.tokens.len(), more as usize);
    // A stop token ends it like an end of sequence, and is the last token.
    let stop = ignored.tokens[1];
    let first = ignored.tokens.iter().position(|&token| token == stop).unwrap();
    let stopped = Request { stop_token_ids: vec![stop], ignore_eos: true, ..Request::tokens(prompt, more) };
    let stopped = engine.submit(stopped).unwrap().wait();
    assert_eq!((&stopped.tokens[..], stopped.reason), (&ignored.tokens[..=first], FinishReason::Stop));
}

#[test]
fn text_ends_before_a_stop_string() {
    let engine = load("tiny", config());
    let prompt = "In the beginning God created";
    let whole = engine.submit(Request::text(prompt, 24)).unwrap().wait();
    assert!(whole.text.len() > 12 && whole.reason == FinishReason::Length, "{whole:?}");
    // From the middle of the text, so that it spans tokens.
    let middle =
        whole.text.char_indices().map(|(i, _)| i).filter(|&i| i >= whole.text.len() / 2).collect::<Vec<_>>();
    let stop = whole.text[middle[0]..middle[5]].to_string();
    let begin = whole.text.find(&stop).unwrap();
    let request = Request { stop: vec!["never said".into(), stop.clone()], ..Request::text(prompt, 24) };
    let stopped = engine.submit(request).unwrap().wait();
    assert_eq!((stopped.text.as_str(), stopped.reason), (&whole.text[..begin], FinishReason::Stop));
    assert_eq!(stopped.tokens, whole.tokens[..stopped.tokens.len()]);
    assert!(stopped.tokens.len() < whole.tokens.len());
    // Held-back text is returned at the end if it is not a stop string.
    let end: String = whole.text.chars().skip(whole.text.chars().count() - 2).collect();
    let request = Request { stop: vec![format!("{end}\u{1}")], ..Request::text(prompt, 24) };
    assert_eq!(engine.submit(request).unwrap().wait().text, whole.text);
    engine.shutdown(Duration::from_secs(60)).unwrap();
}

#[test]
fn the_requested_number_of_log_probabilities_is_returned() {
    let engine = load("qwen3", RunConfig { logprobs: 4, ..config() });
    let (prompt, ..) = expected("qwen3").swap_remove(0);
    // Together, so that requests of one batch want different numbers.
    let counts = [0, 1, 4, 2];
    let request = |wanted| Request { logprobs: wanted, ..Request::tokens(prompt.clone(), 3) };
    let handles = engine.submit_all(counts.map(request).into()).unwrap();
    let answers: Vec<_> = handles.into_iter().map(|handle| handle.wait()).collect();
    let most = answers[2].clone();
    for (wanted, answer) in counts.into_iter().zip(answers) {
        assert_eq!(answer.tokens, most.tokens);
        let first = |tops: &Vec<(u32, f32)>| tops[..wanted as usize].to_vec();
        assert!(wanted == 0 || answer.logprobs == most.logprobs.iter().map(first).collect::<Vec<_>>());
        let own: Vec<Option<f32>> = answer.logprobs.iter().map(|tops| Some(tops[0].1)).collect();
        assert_eq!(answer.token_logprobs, own, "greedy takes the best");
        let lengths: Vec<usize> = answer.logprobs.iter().map(Vec::len).collect();
        assert_eq!(lengths, if wanted == 0 { vec![] } else { vec![wanted as usize; answer.tokens.len()] });
        for (tops, token) in answer.logprobs.iter().zip(&answer.tokens) {
            assert_eq!(tops[0].0, *token, "greedy takes the best");
            assert!(tops.is_sorted_by(|a, b| a.1 >= b.1) && tops[0].1 <= 0.0);
        }
    }
    let request = Request { logprobs: 5, ..Request::tokens(prompt, 3) };
    assert_eq!(engine.submit(request).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn times_may_be_of_any_length() {
    let long = Some(Duration::MAX);
    let engine = load("qwen3", RunConfig { deadline: Duration::MAX, idle_exit: long, ..config() });
    assert_eq!(engine.submit(Request::tokens([1], 3)).unwrap().wait().tokens.len(), 3);
    engine.shutdown(Duration::MAX).unwrap();
}

#[test]
fn requests_that_can_never_run_are_refused_with_help() {
    let engine = load("qwen3", RunConfig { max_waiting: 2, ..config() });
    let refused = |request: Request, kind, word: &str| {
        let error = engine.submit(request).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(word) && error.help().is_some(), "{error}");
    };
    refused(Request::tokens([], 1), ErrorKind::Input, "empty");
    refused(Request::tokens([u32::MAX], 1), ErrorKind::Input, "vocabulary");
    refused(Request::tokens([1], 0), ErrorKind::Input, "max_new_tokens");
    let hot = SamplingParams { temperature: -0.5, ..SamplingParams::default() };
    refused(Request { sampling: hot, ..Request::tokens([1], 1) }, ErrorKind::Input, "temperature");
    let three = (0..3).map(|_| Request::tokens([1], 1)).collect();
    let error = engine.submit_all(three).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(engine.run_graph(1).is_err());
    let missing = Engine::load(ModelSpec::path("/nonexistent/model.json"), config()).err().unwrap();
    assert_eq!((missing.kind(), missing.exit_status()), (ErrorKind::Input, 2));
}

#[test]
fn a_cancelled_request_ends_at_once_and_disturbs_no_other() {
    let engine = load("tiny", config());
    let prompt = "And it came to pass";
    let alone = engine.submit(Request::text(prompt, 40)).unwrap().wait();
    let handles = engine.submit_all(vec![Request::text("In the beginning", 40), Request::text(prompt, 40)]);
    let [first, second] = handles.unwrap().try_into().unwrap();
    assert!(matches!(first.recv(), Some(Event::Token(_))));
    first.cancel();
    let rest = first.wait();
    assert_eq!(rest.reason, FinishReason::Cancelled);
    assert_eq!(second.wait(), alone);
    drop(engine.submit(Request::text(prompt, 40)).unwrap());
    engine.wait_idle();
    assert_eq!(engine.stats().finished.cancelled, 2);
}

#[test]
fn a_reader_passes_tokens_on_and_the_kernel_announces_each() {
    let engine = load("qwen3", config());
    let (prompt, tokens, _) =
        expected("qwen3").into_iter().max_by_key(|(_, tokens, _)| tokens.len()).unwrap();
    let request = || Request::tokens(prompt.clone(), tokens.len() as u32);
    let reader = engine.reader().expect("the first reader");
    assert!(engine.reader().is_none(), "a second one");
    let handle = engine.submit(request()).unwrap();
    let (mut told, mut got, mut over) = (0, Vec::new(), false);
    while !over {
        // The engine's thread reports ends.
        let limit = rustix::event::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        let mut event = [rustix::event::PollFd::new(&reader, rustix::event::PollFlags::IN)];
        if rustix::event::poll(&mut event, Some(&limit)).unwrap() == 1 {
            let mut times = [0u8; 8];
            rustix::io::read(&reader, &mut times).unwrap();
            told += u64::from_ne_bytes(times);
            reader.take();
        }
        while let Poll::Ready(event) = handle.try_recv() {
            match event {
                Some(Event::Token(token)) => got.push(token.id),
                _ => over = true,
            }
            if over {
                break;
            }
        }
        assert!(got.len() as u64 >= told, "told of {told} tokens, and {} are here", got.len());
    }
    // The end may arrive before the kernel's notification of the last tokens.
    while told < tokens.len() as u64 {
        let limit = rustix::event::Timespec { tv_sec: 5, tv_nsec: 0 };
        let mut event = [rustix::event::PollFd::new(&reader, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut event, Some(&limit)).unwrap(), 1, "told of {told} tokens");
        let mut times = [0u8; 8];
        rustix::io::read(&reader, &mut times).unwrap();
        told += u64::from_ne_bytes(times);
    }
    assert_eq!((told, &got), (tokens.len() as u64, &tokens));
    // Without the reader, the engine's thread passes the tokens on again, and there may be another reader.
    drop(reader);
    assert_eq!(engine.submit(request()).unwrap().wait().tokens, tokens);
    assert!(engine.reader().is_some());
    // This reader is gone, too.
    assert_eq!(engine.submit(request()).unwrap().wait().tokens, tokens);
}

#[test]
fn requests_may_come_from_any_thread() {
    let engine = load("tiny", config());
    let ask = || engine.submit(Request::text("And God said", 16)).unwrap().wait();
    let first = ask();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), first));
    });
}

/// Waits, no longer than a minute, until `done`.
fn until(what: &str, done: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_request_joins_running_ones_and_ends_before_them() {
    let engine = load("tiny", config());
    let long = Request { ignore_eos: true, ..Request::text("In the beginning", 400) };
    let long = engine.submit(long).unwrap();
    assert!(matches!(long.recv(), Some(Event::Token(_))));
    let short = engine.submit(Request::text("And God said", 4)).unwrap().wait();
    assert_eq!(short.tokens.len(), 4);
    assert_eq!((engine.stats().running, engine.stats().finished.length), (1, 1), "the long one goes on");
    // A cancel frees slot and pages although nothing else happens.
    assert!(engine.stats().kv_pages_used > 0);
    long.cancel();
    until("the slot is not free", || engine.stats().running == 0 && engine.stats().kv_pages_used == 0);
    assert_eq!(engine.stats().launches, 1);
    // So does a stop string.
    let stop = engine.submit(Request::text("And God said", 12)).unwrap().wait().text;
    let request =
        Request { stop: vec![stop[2..4].into()], ignore_eos: true, ..Request::text("And God said", 400) };
    let before = engine.stats().new_tokens;
    assert_eq!(engine.submit(request).unwrap().wait().reason, FinishReason::Stop);
    engine.wait_idle();
    assert!(engine.stats().new_tokens - before < 40, "{:?}", engine.stats());
}

#[test]
fn an_end_of_sequence_counts_only_after_the_fewest_tokens() {
    let engine = load("qwen3", config());
    let (prompt, tokens, _) = expected("qwen3").into_iter().find(|(_, _, eos)| *eos).unwrap();
    let most = tokens.len() as u32 + 3;
    let ask = |min_new_tokens| {
        let request = Request { min_new_tokens, ..Request::tokens(prompt.clone(), most) };
        engine.submit(request).unwrap().wait()
    };
    // The end of sequence is the last of `tokens`, so it counts if there are enough tokens before it.
    assert_eq!(ask(tokens.len() as u32 - 1).tokens, tokens);
    let on = ask(tokens.len() as u32);
    assert!(on.tokens.len() > tokens.len() && on.tokens.starts_with(&tokens), "{on:?}");
}

#[test]
fn an_idle_kernel_ends_and_the_next_request_starts_it_again() {
    let engine = load("tiny", RunConfig { idle_exit: Some(Duration::from_millis(20)), ..config() });
    let ask = || engine.submit(Request::text("And it came to pass", 8)).unwrap().wait();
    let first = ask();
    for launches in 1..4 {
        assert_eq!(engine.stats().launches, launches);
        until("the kernel goes on", || !engine.stats().kernel_runs);
        assert_eq!(ask(), first);
    }
}

#[test]
fn requests_that_are_cut_off_are_cancelled_and_the_engine_ends_normally() {
    let engine = load("tiny", config());
    let request = || Request { ignore_eos: true, ..Request::text("In the beginning", 400) };
    // More than there are slots.
    let handles = engine.submit_all((0..12).map(|_| request()).collect()).unwrap();
    assert!(matches!(handles[0].recv(), Some(Event::Token(_))));
    let error = engine.shutdown(Duration::ZERO).unwrap_err();
    assert!(error.message().contains("were ended"), "{error}");
    for handle in handles {
        assert_eq!(handle.wait().reason, FinishReason::Cancelled);
    }
    assert_eq!(engine.serve(), Ok(()), "the engine itself has not failed");
}

#[test]
fn pages_on_demand_give_the_same_tokens() {
    let alone = load("tiny", config());
    let prompts = ["In the beginning", "And God said", "Thus saith the LORD", "And it came to pass", "Now"];
    let request = |prompt: &str| Request { ignore_eos: true, ..Request::text(prompt, 100) };
    let expected: Vec<_> = prompts.map(|p| alone.submit(request(p)).unwrap().wait().tokens).into();
    drop(alone);
    let mut spec = ModelSpec::path(fixture("tiny").join("model.json")).open().unwrap();
    // Room for fewer than three of the five.
    spec.page_size = Some(8);
    spec.runtime.kv_pages = Some(40);
    spec.runtime.kv = launch::model::model_json::Kv::OnDemand;
    spec.runtime.prefill_share = Some(0.02);
    spec.checkpoint = spec.checkpoint_folder();
    let engine =
        Engine::load(ModelSpec::json(&serde_json::to_string(&spec).unwrap()).unwrap(), config()).unwrap();
    let handles = engine.submit_all(prompts.map(request).into()).unwrap();
    let tokens: Vec<_> = handles.into_iter().map(|handle| handle.wait().tokens).collect();
    assert_eq!(tokens, expected);
    engine.wait_idle();
    let stats = engine.stats();
    assert!(stats.preemptions > 0 && stats.kv_pages_used == 0, "{stats:?}");
}

/// A user of the library has no command line: messages name fields.
#[test]
fn errors_name_fields_of_the_library() {
    let text = |overrides: Overrides, config: RunConfig| {
        let mut spec = ModelSpec::path(fixture("qwen3").join("model.json"));
        spec.overrides = overrides;
        Engine::load(spec, config).err().expect("an error").to_string()
    };
    let none = Overrides::default;
    let mut tuning = Tuning::default();
    tuning.set("no.such", 1);
    for (text, name) in [
        (text(Overrides { max_batch: Some(0), ..none() }, config()), "Overrides::max_batch"),
        (text(none(), RunConfig { tuning, ..config() }), "RunConfig::tuning"),
        (text(none(), RunConfig { trace: Some("/no/such/trace".into()), ..config() }), "RunConfig::trace"),
        (text(none(), RunConfig { stall: Some("x".into()), ..config() }), "RunConfig::stall"),
    ] {
        assert!(text.contains(name) && !text.contains("--"), "{text}");
    }
    // This checkpoint has no tokenizer.
    let refused = load("qwen3", config()).submit(Request::text("x", 1)).expect_err("an error").to_string();
    assert!(refused.contains("Request::tokens") && !refused.contains("--"), "{refused}");
}
