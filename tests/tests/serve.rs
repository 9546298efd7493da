//! Proves that `mpk-serve` gives the tokens of `mpk-run`, and ends as it should: drained after a signal, or with an
//! error in every stream if a rank is lost.

use mpk_tests::http::Answer;
use mpk_tests::server::{Server, example};
use mpk_tests::{Job, ModelFile, Running};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

#[test]
fn its_tokens_are_those_of_mpk_run() {
    let prompts = ["In the beginning", "Thus saith the Lord GOD;", "And it came to pass", "x"];
    for ranks in [1, 2] {
        let mut run = Job::new(ranks).arg(example()).args(["--max-new-tokens", "24", "--backend", "cpu"]);
        for prompt in prompts {
            run = run.args(["--prompt", prompt]);
        }
        let expected = run.run_json();
        // With and without the sampling operators.
        let options: &[&str] = if ranks == 1 { &[] } else { &["--greedy"] };
        let Server { running, address } = Server::start(ranks, &example(), options);
        let body = json!({"prompt": prompts, "max_tokens": 24, "return_token_ids": true, "temperature": 0});
        let answer = Answer::post(&address, "/v1/completions", &body).json();
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), prompts.len());
        for (choice, request) in choices.iter().zip(&expected.requests) {
            assert_eq!(choice["token_ids"], json!(request.tokens));
            assert_eq!(choice["prompt_token_ids"], json!(request.prompt_tokens));
            assert_eq!(choice["text"].as_str(), request.text.as_deref());
        }
        // First one after another as streams, then several concurrently.
        let streams: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let body = json!({"prompt": prompt, "max_tokens": 24, "stream": true});
                Answer::post(&address, "/v1/completions", &body)
            })
            .collect();
        for (mut stream, request) in streams.into_iter().zip(&expected.requests) {
            let mut text = String::new();
            while let Some(event) = stream.event() {
                text.push_str(event["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{event}")));
            }
            assert_eq!(Some(text.as_str()), request.text.as_deref());
        }
        let metrics = Answer::get(&address, "/metrics").text();
        assert!(
            metrics.contains("mpk:time_to_first_token_seconds_count{model_name=\"tiny-qwen3\"} 8"),
            "{metrics}"
        );
        Server { running, address }.end();
    }
}

#[test]
fn a_greedy_server_refuses_requests_that_sample() {
    let Server { running, address } = Server::start(1, &example(), &["--greedy"]);
    let ask = |name: &str, value: Value| {
        let mut body = json!({"prompt": "In the beginning", "max_tokens": 2});
        body[name] = value;
        Answer::post(&address, "/v1/completions", &body)
    };
    for (name, value) in [("temperature", json!(0.5)), ("presence_penalty", json!(1))] {
        let answer = ask(name, value);
        assert_eq!(answer.status, 400, "{name}");
        let error = answer.text();
        assert!(error.contains(&format!(r#""param":"{name}""#)), "{error}");
    }
    assert_eq!(ask("temperature", json!(0)).status, 200);
    Server { running, address }.end();
}

#[test]
fn a_stop_string_ends_an_answer_and_a_closed_connection_a_request() {
    let Server { running, address } = Server::start(2, &example(), &[]);
    let ask = |fields: Value| {
        let mut body = json!({"prompt": "In the beginning", "max_tokens": 40});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        Answer::post(&address, "/v1/completions", &body).json()["choices"][0].clone()
    };
    let whole = ask(json!({}))["text"].as_str().unwrap().to_string();
    let stop: String = whole.chars().skip(20).take(6).collect();
    let stopped = ask(json!({"stop": stop}));
    assert_eq!(stopped["finish_reason"], "stop");
    assert_eq!(stopped["text"].as_str().unwrap(), &whole[..whole.find(&stop).unwrap()]);
    let logprobs = ask(json!({"logprobs": 2}))["logprobs"].clone();
    assert!(logprobs["token_logprobs"][0].as_f64().unwrap() <= 0.0, "{logprobs}");
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    // The chosen token's log-probability is known, however few are asked for, and although most are not among the best 3.
    let sampled = |count: u32| {
        ask(json!({"logprobs": count, "temperature": 4, "seed": 7, "ignore_eos": true}))["logprobs"].clone()
    };
    let numbers =
        |value: &Value| value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect::<Vec<f64>>();
    let (few, more) = (sampled(0), sampled(3));
    assert_eq!(few["token_logprobs"], more["token_logprobs"]);
    let own = numbers(&more["token_logprobs"]);
    let lowest =
        |top: &Value| top.as_object().unwrap().values().map(|v| v.as_f64().unwrap()).fold(0.0, f64::min);
    let tops = more["top_logprobs"].as_array().unwrap();
    // OpenAI adds the chosen token to the best ones if it is not among them.
    let outside =
        own.iter().zip(tops).filter(|(own, top)| top.as_object().unwrap().len() == 4 && **own == lowest(top));
    assert!(outside.count() > 20 && own.iter().all(|own| (-50.0..=0.0).contains(own)), "{more}");
    // A client that goes away, streaming or not.
    for stream in [true, false] {
        let body = json!({"prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": stream});
        if stream {
            let mut answer = Answer::post(&address, "/v1/completions", &body);
            answer.event().expect("an event");
        } else {
            let mut connection = std::net::TcpStream::connect(&address).unwrap();
            let text = body.to_string();
            let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n";
            let request = format!("{head}Content-Length: {}\r\n\r\n{text}", text.len());
            std::io::Write::write_all(&mut connection, request.as_bytes()).unwrap();
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    assert_eq!(ask(json!({}))["text"], whole);
    let metrics = Answer::get(&address, "/metrics").text();
    assert!(metrics.contains("finished_reason=\"abort\""), "{metrics}");
    Server { running, address }.end();
}

/// A job slow enough for a signal to arrive in the middle of an answer, and a stream of that answer.
fn streaming(ranks: u32, options: &[&str]) -> (Running, Answer) {
    let slow = ["--debug-stall", "0:4:10"];
    let Server { running, address } = Server::start(ranks, &example(), &[&slow, options].concat());
    let body = json!({"prompt": "x", "max_tokens": 24, "ignore_eos": true, "stream": true});
    let mut answer = Answer::post(&address, "/v1/completions", &body);
    assert!(answer.event().is_some());
    (running, answer)
}

#[test]
fn a_signal_lets_running_requests_finish() {
    for (ranks, signal) in [(1, libc::SIGINT), (2, libc::SIGTERM)] {
        let (running, answer) = streaming(ranks, &[]);
        let first = running.ranks()[0].clone();
        // Rank 0 decides. Signals to others neither end these nor make the next one the second.
        for _ in 0..2 {
            for other in &running.ranks()[1..] {
                running.signal_process(other, signal);
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        // As from `timeout`, which signals the process and its group. The system merges signals of one kind only.
        for signal in [signal, libc::SIGINT, libc::SIGTERM] {
            running.signal_process(&first, signal);
        }
        assert_eq!(answer.last_event()["choices"][0]["finish_reason"], "length");
        running.wait().expect(0).expect_nothing_left();
    }
}

/// Until the model is loaded, there is nothing to drain.
#[test]
fn a_signal_while_the_model_loads_ends_the_server_at_once() {
    let server =
        |ranks| Job::new(ranks).of("mpk-serve").arg(example()).args(["--port", "0", "--backend", "cpu"]);
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut running = server(1).start();
        running.wait_for_log("graphs built");
        // While it is stopped, it cannot get ready.
        running.signal(libc::SIGSTOP);
        running.signal(signal);
        let begin = Instant::now();
        running.signal(libc::SIGCONT);
        let finished = running.wait();
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
        // A fast machine may be ready by then.
        let drains = finished.stderr.contains("draining");
        let expected = if drains { (Some(0), None) } else { (None, Some(signal)) };
        assert_eq!((finished.status, finished.signal), expected, "{}", finished.stderr);
        assert!(drains || finished.stderr.contains("the model is still loading"), "{}", finished.stderr);
        assert!(finished.orphans.is_empty(), "{:?}", finished.orphans);
    }
    // Rank 0 waits for a rank that is not ready yet.
    let job = server(2).args(["--debug-fault", "1:3:pause=60000"]).env("MPK_LOG", "debug");
    let mut running = job.start();
    running.wait_for_log("step 3:");
    let begin = Instant::now();
    running.signal_process(&running.ranks()[0], libc::SIGTERM);
    let finished = running.wait();
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    assert_ne!(finished.status, Some(0), "{}", finished.stderr);
    assert!(!finished.stderr.contains("listening on"), "{}", finished.stderr);
    assert!(finished.orphans.is_empty(), "{:?}", finished.orphans);
}

#[test]
fn a_lost_rank_ends_every_stream_with_an_error() {
    let (running, answer) = streaming(2, &["--deadline", "2"]);
    running.signal_process(&running.ranks()[1], libc::SIGKILL);
    let error = answer.last_event()["error"].clone();
    assert_eq!(error["code"], "engine_lost", "{error}");
    let finished = running.wait();
    assert_ne!(finished.status, Some(0), "{}", finished.stderr);
    finished.expect_nothing_left();
}

/// The timeline is written when the server ends. If that fails, the server ends as mpk-run does.
#[test]
fn a_timeline_that_cannot_be_written_is_reported_once() {
    for ranks in [1, 2] {
        let Server { running, .. } = Server::start(ranks, &example(), &["--trace", "/dev/full"]);
        running.signal_process(&running.ranks()[0].clone(), libc::SIGTERM);
        let finished = running.wait().expect(3).expect_nothing_left();
        let lines: Vec<&str> = finished.stderr.lines().filter(|line| line.contains("/dev/full")).collect();
        assert_eq!(lines.len(), 1, "{}", finished.stderr);
        assert!(lines[0].starts_with("mpk-serve: error: cannot write to /dev/full"), "{}", lines[0]);
    }
}

#[test]
fn errors_are_reported_before_anything_is_loaded() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let job = || Job::alone().of("mpk-serve").args(["--backend", "cpu"]);
    let finished = job().arg(example()).args(["--port", &port]).run().expect(3);
    assert!(finished.stderr.contains("is already in use"), "{}", finished.stderr);
    for host in ["nosuch.invalid", "[::1]", ""] {
        let finished = job().arg(example()).args(["--port", "0", "--host", host]).run().expect(2);
        assert!(finished.stderr.contains("an address of this machine"), "{host}: {}", finished.stderr);
    }
    let finished = job().arg("no-such-file.json").args(["--port", "0"]).run().expect(2);
    assert!(finished.stderr.contains("mpk-serve: error:"), "{}", finished.stderr);
    for options in
        [&["--port", "0", "--api-key", "a b"][..], &["--shutdown-timeout", "-1"], &["--port", "70000"]]
    {
        job().arg(example()).args(options).run().expect(2);
    }
    let graph = ModelFile::of_fixture("tiny").set("max_seq_len", 0);
    job().arg(graph.path()).args(["--port", "0"]).run().expect(2).expect_nothing_left();
}
