//! Answers as one object.

use super::fake::{Behaviour, EOS, NAME, tokenizer, usual};
use super::http::{get, post};
use serde_json::{Value, json};

const TEXT: &str = "In the beginning God created the heaven and the earth.";

#[test]
fn a_completion_of_text() {
    let server = usual(Behaviour::default());
    let answer = post(
        server.address,
        "/v1/completions",
        &json!({"model": NAME, "prompt": "Once", "max_tokens": 100, "unknown_field": {"x": 1}, "user": "me"}),
    );
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    let object = answer.json();
    assert_eq!((object["object"].as_str(), object["model"].as_str()), (Some("text_completion"), Some(NAME)));
    assert!(
        object["id"].as_str().unwrap().starts_with("cmpl-") && object["created"].as_u64().unwrap() > 1 << 30
    );
    assert_eq!(
        object["choices"],
        json!([{"index": 0, "text": TEXT, "logprobs": null, "finish_reason": "stop"}])
    );
    let (prompt, new) = (tokenizer().encode("Once").unwrap(), tokenizer().encode(TEXT).unwrap().len() + 1);
    let usage = json!({"prompt_tokens": prompt.len(), "completion_tokens": new, "total_tokens": prompt.len() + new,
        "prompt_tokens_details": {"cached_tokens": 2}});
    assert_eq!(object["usage"], usage);
    let submission = server.submission();
    assert_eq!((submission.prompt, submission.max_new_tokens, submission.logprobs), (prompt, 100, None));
}

#[test]
fn the_four_kinds_of_prompt_and_n() {
    let server = usual(Behaviour::default());
    let ask = |prompt: Value| {
        let answer = post(
            server.address,
            "/v1/completions",
            &json!({"prompt": prompt, "n": 2, "max_tokens": 3, "seed": 7}),
        );
        assert_eq!(answer.status, 200, "{}", answer.text());
        let submissions = std::mem::take(&mut *server.seen.submissions.lock().unwrap());
        let prompts: Vec<_> = submissions.iter().map(|s| s.prompt.clone()).collect();
        let seeds: Vec<_> = submissions.iter().map(|s| s.sampling.seed).collect();
        (answer.json(), prompts, seeds)
    };
    let (a, b) = (tokenizer().encode("alpha").unwrap(), tokenizer().encode("beta").unwrap());
    let (one, prompts, seeds) = ask(json!("alpha"));
    assert_eq!((prompts, seeds), (vec![a.clone(), a.clone()], vec![Some(7), Some(8)]));
    assert_eq!(one["choices"].as_array().unwrap().len(), 2);
    assert_eq!(one["choices"][1]["finish_reason"], "length");
    let (two, prompts, _) = ask(json!(["alpha", "beta"]));
    assert_eq!(prompts, [a.clone(), a.clone(), b.clone(), b.clone()]);
    let indices: Vec<_> = two["choices"].as_array().unwrap().iter().map(|c| c["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(two["usage"]["prompt_tokens"], a.len() + b.len());
    assert_eq!(two["usage"]["completion_tokens"], 12);
    assert_eq!(ask(json!([5, 6, 7])).1, [[5, 6, 7], [5, 6, 7]]);
    assert_eq!(ask(json!([[5], [6, 7]])).1, [vec![5], vec![5], vec![6, 7], vec![6, 7]]);
}

#[test]
fn a_chat() {
    let server = usual(Behaviour::default());
    let messages = json!([{"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]}]);
    let body = json!({"model": NAME, "messages": messages, "max_completion_tokens": 50, "tool_choice": "auto",
        "tools": [{"type": "function", "function": {"name": "weather"}}], "chat_template_kwargs": {"mood": "calm"}});
    let object = post(server.address, "/v1/chat/completions", &body).json();
    assert_eq!(object["object"], "chat.completion");
    assert!(object["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(
        object["choices"],
        json!([{"index": 0, "message": {"role": "assistant", "content": TEXT, "refusal": null},
            "logprobs": null, "finish_reason": "stop"}])
    );
    let rendered = tokenizer().decode(&server.submission().prompt).unwrap();
    assert_eq!(
        rendered,
        "<system>Be brief.\n<user>Hello\nthere\n[{\"type\": \"function\", \"function\": {\"name\": \"weather\"}}][calm]<assistant>"
    );
    assert_eq!(server.submission().max_new_tokens, 50);
    // A chat answer may be as long as fits.
    post(server.address, "/v1/chat/completions", &json!({"messages": [{"role": "user", "content": "x"}]}));
    let submission = server.submission();
    assert_eq!(submission.max_new_tokens as usize, 2000 - submission.prompt.len());
    // A completion is short unless the request sets a length.
    post(server.address, "/v1/completions", &json!({"prompt": "x"}));
    assert_eq!(server.submission().max_new_tokens, 16);
}

#[test]
fn stop_strings_and_stop_tokens_end_an_answer() {
    let server = usual(Behaviour { endless: true, ..Behaviour::default() });
    let ask = |fields: Value| {
        let mut body = json!({"prompt": "x", "max_tokens": 500});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let choice = post(server.address, "/v1/completions", &body).json()["choices"][0].clone();
        (choice["text"].as_str().unwrap().to_string(), choice["finish_reason"].as_str().unwrap().to_string())
    };
    let stop = |text: &str| (text.to_string(), "stop".to_string());
    assert_eq!(ask(json!({"stop": " created"})), stop("In the beginning God"));
    assert_eq!(
        ask(json!({"stop": ["heaven", "en and", "earth"]})),
        stop("In the beginning God created the ")
    );
    let ids = tokenizer().encode(TEXT).unwrap();
    let expected = tokenizer().decode(&ids[..3]).unwrap();
    let stop_id = ids[3];
    assert!(!ids[..3].contains(&stop_id));
    assert_eq!(ask(json!({"stop_token_ids": [stop_id]})), stop(&expected));
    // The engine was told to stop as soon as the server knew.
    server.expect_idle();
}

#[test]
fn echo_ids_and_logprobs() {
    let server = usual(Behaviour::default());
    let body = json!({"prompt": "Once upon", "max_tokens": 4, "echo": true, "return_token_ids": true});
    let choice = post(server.address, "/v1/completions", &body).json()["choices"][0].clone();
    let ids = tokenizer().encode(TEXT).unwrap();
    let four = tokenizer().decode(&ids[..4]).unwrap();
    assert_eq!(choice["text"], format!("Once upon{four}"));
    assert_eq!(choice["token_ids"], json!(ids[..4]));
    assert_eq!(choice["prompt_token_ids"], json!(tokenizer().encode("Once upon").unwrap()));
    let body = json!({"prompt": "x", "max_tokens": 4, "logprobs": 2});
    let logprobs = post(server.address, "/v1/completions", &body).json()["choices"][0]["logprobs"].clone();
    let tokens: String = logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens.trim_start(), four);
    assert_eq!(logprobs["token_logprobs"], json!([-0.5, -0.5, -0.5, -0.5]));
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    assert_eq!(logprobs["text_offset"][0], 0);
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "logprobs": true, "top_logprobs": 3});
    let object = post(server.address, "/v1/chat/completions", &body).json();
    let content = object["choices"][0]["logprobs"]["content"].clone();
    assert_eq!(content.as_array().unwrap().len(), 4);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 3);
    let bytes: Vec<u8> = content
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|token| token["bytes"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u8))
        .collect();
    assert_eq!(String::from_utf8(bytes).unwrap().trim_start(), four);
    assert_eq!(server.submission().logprobs, Some(3));
}

#[test]
fn parameters_reach_the_engine() {
    let server = usual(Behaviour::default());
    let body = json!({"prompt": "x", "max_tokens": 20, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "seed": 11, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "min_tokens": 3,
        "ignore_eos": true, "stop_token_ids": [9]});
    let answer = post(server.address, "/v1/completions", &body);
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length");
    let submission = server.submission();
    let s = submission.sampling;
    assert_eq!((s.temperature, s.top_p, s.top_k, s.min_p, s.seed), (0.7, 0.9, 40, 0.05, Some(11)));
    assert_eq!((s.presence_penalty, s.frequency_penalty, s.repetition_penalty), (0.5, -0.5, 1.5));
    assert_eq!((submission.min_new_tokens, submission.ignore_eos), (3, true));
    assert_eq!(submission.stop_token_ids, [9]);
    assert!(submission.whole, "nobody waits for its tokens one by one");
    post(server.address, "/v1/completions", &json!({"prompt": "x", "max_tokens": 2, "stream": true}))
        .events();
    assert!(!server.submission().whole);
}

#[test]
fn tokens_to_text_and_back() {
    let server = usual(Behaviour::default());
    let ids = tokenizer().encode("In the beginning").unwrap();
    let body = json!({"prompt": "In the beginning", "return_token_strs": true});
    let object = post(server.address, "/tokenize", &body).json();
    assert_eq!((&object["tokens"], &object["count"]), (&json!(ids), &json!(ids.len())));
    assert_eq!(object["max_model_len"], 2000);
    assert_eq!(object["token_strs"].as_array().unwrap().len(), ids.len());
    let object = post(server.address, "/detokenize", &json!({"tokens": ids})).json();
    assert_eq!(object, json!({"prompt": "In the beginning"}));
    let mut with_end = ids.clone();
    with_end.push(EOS);
    let object = post(server.address, "/detokenize", &json!({"tokens": with_end})).json();
    assert_eq!(object["prompt"], "In the beginning<|endoftext|>");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": false});
    let object = post(server.address, "/tokenize", &chat).json();
    assert_eq!(object["tokens"], json!(tokenizer().encode("<user>hi\n").unwrap()));
    assert_eq!(object["token_strs"], Value::Null);
}

#[test]
fn models_health_and_metrics() {
    let server = usual(Behaviour::default());
    let models = get(server.address, "/v1/models").json();
    assert_eq!(models["data"][0]["id"], NAME);
    assert_eq!(models["data"][0]["max_model_len"], 2000);
    assert_eq!(get(server.address, &format!("/v1/models/{NAME}")).json()["object"], "model");
    get(server.address, "/v1/models/other").expect_error(404, Some("model"));
    assert_eq!(get(server.address, "/health").status, 200);
    post(server.address, "/v1/completions", &json!({"prompt": "x", "max_tokens": 5, "n": 2}));
    server.expect_idle();
    let text = || get(server.address, "/metrics").text().to_string();
    super::fake::eventually("both answers are counted", || {
        text().contains("mpk:e2e_request_latency_seconds_count{model_name=\"org/fake-model\"} 2")
    });
    let text = text();
    for line in [
        "mpk:time_to_first_token_seconds_bucket{le=\"0.001\",model_name=\"org/fake-model\"}",
        "mpk:time_to_first_token_seconds_count{model_name=\"org/fake-model\"} 2",
        "mpk:inter_token_latency_seconds_count{model_name=\"org/fake-model\"} 8",
        "mpk:generation_tokens_total{model_name=\"org/fake-model\"} 10",
        "mpk:prompt_tokens_total{model_name=\"org/fake-model\"} ",
        "mpk:request_success_total{finished_reason=\"length\",model_name=\"org/fake-model\"} 2",
        "mpk:num_requests_running{model_name=\"org/fake-model\"} 0",
        "mpk:num_requests_waiting{",
        "mpk:kv_cache_usage_perc{model_name=\"org/fake-model\"} 0.25",
        "mpk:prefix_cache_hits_total{model_name=\"org/fake-model\"} 4",
        "mpk:request_params_n_sum{model_name=\"org/fake-model\"} 2",
        "mpk:http_requests_total{handler=\"/v1/completions\",status=\"200\",model_name=\"org/fake-model\"} 1",
    ] {
        let sorted = |line: &str| {
            let (name, rest) = line.split_once('{').unwrap();
            let labels = rest.split_once('}').map_or(rest, |(labels, _)| labels);
            let mut labels: Vec<String> =
                labels.split(',').filter(|l| !l.is_empty()).map(str::to_string).collect();
            labels.sort();
            (name.to_string(), labels)
        };
        let (name, labels) = sorted(line);
        let value = line.split_once("} ").map_or("", |(_, value)| value);
        let found = text.lines().filter(|l| l.contains('{')).any(|l| {
            let (n, have) = sorted(l);
            n == name
                && labels.iter().all(|label| have.contains(label))
                && l.split_once("} ").is_some_and(|(_, v)| v.starts_with(value))
        });
        assert!(found, "{line}\n{text}");
    }
    assert!(text.contains("# TYPE mpk:prompt_tokens_total counter\n") && !text.contains("# EOF"), "{text}");
    assert_eq!(
        get(server.address, "/metrics").header("content-type"),
        Some("text/plain; version=0.0.4; charset=utf-8")
    );
}
