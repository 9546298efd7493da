//! Proves that `mpk-serve` keeps working under load and faults: cancel storms, floods, idle times, lost and stopped ranks,
//! answers that are cut off.

use mpk_tests::http::Answer;
use mpk_tests::server::{Server, example};
use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// A long answer as a stream.
fn long(tokens: u32) -> Value {
    json!({"prompt": "x", "max_tokens": tokens, "ignore_eos": true, "stream": true})
}

#[test]
fn every_stream_ends_with_an_error_when_a_rank_dies_or_stops() {
    for signal in [libc::SIGKILL, libc::SIGSTOP] {
        let slow = ["--deadline", "2", "--debug-stall", "0:4:10"];
        let server = Server::start(2, &example(), &slow);
        let mut streams: Vec<_> = (0..6).map(|_| server.post("/v1/completions", &long(400))).collect();
        streams.iter_mut().for_each(|stream| assert!(stream.event().is_some()));
        let begin = Instant::now();
        server.running.signal_process(&server.running.ranks()[1], signal);
        for stream in streams {
            let error = stream.last_event()["error"].clone();
            assert_eq!(error["code"], "engine_lost", "{error}");
        }
        assert!(begin.elapsed() < Duration::from_secs(12), "{:?}", begin.elapsed());
        let finished = server.running.wait();
        // mpirun ends with the signal's status if a rank was killed.
        assert!(matches!(finished.status, Some(4 | 137)), "{:?}: {}", finished.status, finished.stderr);
        finished.expect_nothing_left();
    }
}

#[test]
fn the_next_request_and_the_end_notice_a_rank_that_stopped_while_idle() {
    for ends in [false, true] {
        // While parked, and while there is no kernel.
        for idle_exit in ["0", "0.1"] {
            let server = Server::start(2, &example(), &["--deadline", "1", "--idle-exit", idle_exit]);
            server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2})).json();
            std::thread::sleep(Duration::from_millis(300));
            let ranks = server.running.ranks();
            server.running.signal_process(&ranks[1], libc::SIGSTOP);
            if ends {
                server.running.signal_process(&ranks[0], libc::SIGTERM);
            } else {
                let error = server.post("/v1/completions", &long(4)).last_event()["error"].clone();
                assert_eq!(error["code"], "engine_lost", "{error}");
            }
            let finished = server.running.wait();
            assert!(finished.elapsed < Duration::from_secs(25), "{:?}", finished.elapsed);
            finished.expect_nothing_left();
        }
    }
}

#[test]
fn an_idle_server_ends_within_the_deadline_when_a_rank_stops() {
    // While parked, and while there is no kernel; for rank 0, whose host is the server, and for another rank.
    for (idle_exit, stopped) in [("0", 1), ("0.1", 1), ("0", 0)] {
        let server = Server::start(2, &example(), &["--deadline", "1", "--idle-exit", idle_exit]);
        server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2})).json();
        // An idle job whose ranks are all alive continues.
        std::thread::sleep(Duration::from_millis(2500));
        assert_eq!(Answer::get(&server.address, "/health").status, 200);
        let begin = Instant::now();
        server.running.signal_process(&server.running.ranks()[stopped], libc::SIGSTOP);
        let mut told = stopped == 0;
        while !told && begin.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
            match Answer::try_get(&server.address, "/health").map(|answer| answer.status) {
                Some(200) => {}
                Some(500) => told = true,
                other => panic!("/health: {other:?} after {:?}", begin.elapsed()),
            }
        }
        assert!(told, "/health says nothing");
        let took = begin.elapsed();
        let finished = server.running.wait();
        println!(
            "idle exit {idle_exit}, rank {stopped} stopped: told after {took:?}, over after {:?}",
            begin.elapsed()
        );
        assert!(begin.elapsed() < Duration::from_secs(12), "{:?}", begin.elapsed());
        assert_eq!(finished.status, Some(4), "{}", finished.stderr);
        assert!(finished.stderr.contains("--deadline"), "{}", finished.stderr);
        finished.expect_nothing_left();
    }
}

#[test]
fn tokens_do_not_depend_on_the_prefix_cache_and_its_hits_are_reported() {
    let words = |seed: u64| {
        let word = |i: u64| ["lord ", "king ", "people ", "and ", "the "][((i * i + seed * i) % 5) as usize];
        (0..150).map(word).collect::<String>()
    };
    // The second prompt begins with the first; the third is the first again.
    let prompts = [words(1), format!("{} Then he said", words(1)), words(1), words(2)];
    for ranks in [1, 2, 4] {
        let mut tokens = Vec::new();
        for cache in [None, Some("off")] {
            let options = cache.map(|cache| ["--prefix-cache", cache]);
            let server =
                Server::start(ranks, &example(), options.as_ref().map_or(&[], |options| &options[..]));
            let ask = |prompt: &String| {
                let body =
                    json!({"prompt": prompt, "max_tokens": 12, "return_token_ids": true, "temperature": 0});
                server.post("/v1/completions", &body).json()
            };
            let answers: Vec<Value> = prompts.iter().map(ask).collect();
            let cached =
                |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            let found: Vec<u64> = answers.iter().map(cached).collect();
            if cache.is_none() {
                assert!(found[0] == 0 && found[1] > 0 && found[2] > 0 && found[3] == 0, "{found:?}");
                assert_eq!(server.metric("prefix_cache_hits"), found.iter().sum::<u64>() as f64);
                // A prompt that is shorter than a page counts too.
                let short = ask(&"x".to_string());
                let length = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
                let lengths = answers.iter().chain([&short]).map(length).sum::<u64>();
                assert_eq!(server.metric("prefix_cache_queries"), lengths as f64);
                // A stream's last event has the same number.
                let body = json!({"prompt": prompts[0], "max_tokens": 2, "stream": true,
                    "stream_options": {"include_usage": true}});
                let usage = server.post("/v1/completions", &body).last_event()["usage"].clone();
                assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], found[2]);
            } else {
                assert_eq!(found, [0; 4]);
                assert_eq!(server.metric("prefix_cache_queries"), 0.0);
            }
            tokens.push(
                answers.iter().map(|answer| answer["choices"][0]["token_ids"].clone()).collect::<Vec<_>>(),
            );
            server.end();
        }
        assert_eq!(tokens[0], tokens[1], "{ranks} ranks");
    }
}

#[test]
fn requests_of_clients_that_disconnect_are_freed() {
    let server = Server::start(2, &example(), &["--max-queued-requests", "400"]);
    let ask =
        || server.post("/v1/completions", &json!({"prompt": "In the beginning", "max_tokens": 12})).json();
    let before = ask()["choices"][0]["text"].clone();
    for round in 0..3 {
        // Some have seen tokens, some have not.
        let mut streams: Vec<_> = (0..60).map(|_| server.post("/v1/completions", &long(400))).collect();
        streams.iter_mut().take(5 * round).for_each(|stream| assert!(stream.event().is_some()));
        drop(streams);
    }
    let begin = Instant::now();
    server.until("requests or pages are left", |server| {
        server.metric("num_requests_running") == 0.0
            && server.metric("num_requests_waiting") == 0.0
            && server.metric("kv_cache_usage_perc") == 0.0
    });
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    assert_eq!(ask()["choices"][0]["text"], before);
    server.end();
}

#[test]
fn a_flood_is_refused_and_accepted_requests_are_answered() {
    let server = Server::start(2, &example(), &["--max-queued-requests", "4", "--max-batch", "4"]);
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let ask =
            || server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 60, "ignore_eos": true}));
        let threads: Vec<_> = (0..40)
            .map(|_| {
                scope.spawn(move || {
                    let answer = ask();
                    let status = answer.status;
                    if status == 200 {
                        assert_eq!(answer.json()["usage"]["completion_tokens"], 60);
                    }
                    status
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
    assert_eq!(server.metric("num_requests_running"), 0.0);
    server.end();
}

#[test]
fn an_idle_server_sleeps_and_wakes() {
    let cases = [("0", "parked", true), ("0.2", "without a kernel", true), ("0.2", "not asked yet", false)];
    for (idle_exit, what, asked) in cases {
        let server = Server::start(2, &example(), &["--idle-exit", idle_exit]);
        let ask = || {
            let begin = Instant::now();
            let mut stream = server.post("/v1/completions", &long(8));
            assert!(stream.event().is_some());
            let first = begin.elapsed();
            (stream.last_event()["choices"][0]["finish_reason"].clone(), first)
        };
        if asked {
            assert_eq!(ask().0, "length");
        }
        std::thread::sleep(Duration::from_millis(1200));
        let ranks = server.running.ranks();
        let time = || ranks.iter().map(|rank| rank.cpu_time().unwrap()).collect::<Vec<_>>();
        let before = time();
        let span = Duration::from_secs(2);
        std::thread::sleep(span);
        for (rank, (after, before)) in time().into_iter().zip(before).enumerate() {
            let share = (after - before).as_secs_f64() / span.as_secs_f64();
            println!("idle, {what}: rank {rank} takes {:.1} % of a core", 100.0 * share);
            assert!(share < 0.03, "rank {rank}, {what}: {share}");
        }
        let (reason, first) = ask();
        assert_eq!(reason, "length");
        println!("{what}: first token after {:.2} ms", first.as_secs_f64() * 1e3);
        server.end();
    }
}

#[test]
fn the_job_ends_normally_after_answers_are_cut_off() {
    let options = ["--shutdown-timeout", "0.2", "--debug-stall", "0:4:10"];
    let server = Server::start(2, &example(), &options);
    let mut streams: Vec<_> = (0..12).map(|_| server.post("/v1/completions", &long(400))).collect();
    assert!(streams[0].event().is_some());
    server.running.signal_process(&server.running.ranks()[0], libc::SIGTERM);
    for stream in streams {
        assert_eq!(stream.last_event()["error"]["code"], "shutting_down");
    }
    server.running.wait().expect(0).expect_nothing_left();
}

#[test]
fn a_request_without_options_is_sampled_as_by_mpk_run() {
    let model = ModelFile::of_fixture("tiny").set("generate.temperature", 0.9).set("generate.seed", 5);
    let job = Job::alone().arg(model.path()).args(["--backend", "cpu", "--max-new-tokens", "20"]);
    let run = job.args(["--prompt", "In the beginning"]).run_json();
    let greedy =
        Job::alone().arg(model.path()).args(["--backend", "cpu", "--max-new-tokens", "20", "--greedy"]);
    let greedy = greedy.args(["--prompt", "In the beginning"]).run_json();
    let server = Server::start(1, &model.path(), &[]);
    let ask = |more: Value| {
        let mut body = json!({"prompt": "In the beginning", "max_tokens": 20, "return_token_ids": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", &body).json()["choices"][0]["token_ids"].clone()
    };
    assert_eq!(ask(json!({})), json!(run.requests[0].tokens));
    assert_eq!(ask(json!({"temperature": 0})), json!(greedy.requests[0].tokens));
    assert_ne!(run.requests[0].tokens, greedy.requests[0].tokens);
    server.end();
}
