//! Proves that requests which come and go while the kernels run get the tokens of each request alone, that nothing is lost, and
//! that no page and no memory leaks. `examples/online.rs` does it; `MPK_SOAK_REQUESTS=1000000` makes the soak long.

use mpk_tests::folders::fixtures_folder;
use mpk_tests::{Job, ModelFile};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// Runs requests through `examples/online`, and returns its output.
fn online(ranks: u32, model: &Path, requests: u64) -> String {
    let job = Job::new(ranks).of("examples/online").arg(model).arg(requests.to_string());
    // A long soak takes long; the job's own deadlines end a hang.
    let most = Duration::from_secs(1200 + requests / 50);
    let out = job.timeout(most).run().expect(0).expect_nothing_left().stdout;
    assert!(out.contains(&format!("online: ok, {requests} requests")), "{out}");
    out
}

/// The tiny model, with room in the KV cache for a few of the eight requests that run concurrently.
fn crowded() -> ModelFile {
    let model = ModelFile::of_fixture("tiny").set("max_seq_len", 160).set("page_size", 16);
    model.set("runtime.kv_pages", 10)
}

/// `placement`: of all graphs, or `DECODE+PREFILL`.
fn run(ranks: u32, requests: u64, placement: &str, prefix_cache: &str) -> String {
    let model = crowded().set("runtime.prefix_cache", prefix_cache);
    let model = match placement.split_once('+') {
        Some((decode, prefill)) => {
            model.set("runtime.placement", json!({"decode": decode, "prefill": prefill}))
        }
        None => model.set("runtime.placement", placement),
    };
    let out = online(ranks, &model.path(), requests);
    println!("{ranks} ranks, {placement}: {}", out.trim());
    out
}

/// What `out` says about the tokens of all requests when each runs alone.
fn tokens_alone(out: &str) -> String {
    let found = out.split("tokens alone ").nth(1).and_then(|rest| rest.get(..16));
    found.unwrap_or_else(|| panic!("no digest of tokens: {out}")).to_string()
}

#[test]
fn requests_under_load_have_the_tokens_of_each_one_alone() {
    let mixed = "static+dynamic";
    for (ranks, placement) in
        [(1, "static"), (1, mixed), (2, "static"), (2, "dynamic"), (2, mixed), (4, "static"), (4, mixed)]
    {
        let without = run(ranks, 120, placement, "off");
        assert!(without.contains(" 0 of 0 prompt tokens found"), "{without}");
        let with = run(ranks, 120, placement, "on");
        assert!(!with.contains(" 0 of ") && !with.contains(" 0 pages given up"), "nothing is cached: {with}");
        // When each request runs alone with a prefix cache, it finds pages of earlier ones.
        assert_eq!(tokens_alone(&with), tokens_alone(&without), "{without}\n{with}");
    }
}

/// Prompts of up to 40 tokens. The windows are shorter, so of a long cached beginning only the last pages are read.
#[test]
fn windows_do_not_disturb_the_prefix_cache() {
    for (fixture, ranks) in [("mistral-window", 1), ("qwen2-window", 2)] {
        let [without, with] = ["off", "on"].map(|cache| {
            let model = ModelFile::of_fixture(fixture)
                .set("max_batch", 8)
                .set("max_seq_len", 160)
                .set("page_size", 4)
                .set("runtime", json!({"kv_pages": 40, "prefix_cache": cache}));
            online(ranks, &model.path(), 120)
        });
        println!("{fixture}, {ranks} ranks: {}", with.trim());
        assert!(!with.contains(" 0 of ") && !with.contains(" 0 pages given up"), "nothing is cached: {with}");
        assert_eq!(tokens_alone(&with), tokens_alone(&without), "{without}\n{with}");
    }
}

#[test]
fn every_lowering_of_the_allreduce_serves_the_same_tokens() {
    for (ranks, placement, lowerings) in [
        (2, "static", ["copy-reduce", "two-shot"].as_slice()),
        (2, "dynamic", &["one-shot", "copy-reduce"]),
        (4, "static", &["two-shot", "hierarchical"]),
    ] {
        let mut tokens = Vec::new();
        for lowering in lowerings {
            let model = crowded().set("runtime.placement", placement).set("runtime.allreduce", *lowering);
            let model =
                if *lowering == "hierarchical" { model.set("runtime.nodes", [0, 0, 1, 1]) } else { model };
            let out = online(ranks, &model.path(), 200);
            println!("{ranks} ranks, {placement}, {lowering}: {}", out.trim());
            assert!(!out.contains(" 0 cancelled"), "too tame: {out}");
            tokens.push(tokens_alone(&out));
        }
        // The hierarchical lowering sums in another order, so the bits differ.
        if !lowerings.contains(&"hierarchical") {
            assert!(tokens.windows(2).all(|pair| pair[0] == pair[1]), "{lowerings:?}: {tokens:?}");
        }
    }
}

/// A model so small that requests take the time: admissions, preemptions, cancels, ends.
#[test]
fn a_soak_loses_nothing() {
    let requests =
        std::env::var("MPK_SOAK_REQUESTS").ok().and_then(|text| text.parse().ok()).unwrap_or(20_000);
    let begin = Instant::now();
    let out = online(2, &fixtures_folder().join("soak/model.json"), requests);
    println!("{:.1} s: {}", begin.elapsed().as_secs_f64(), out.trim());
    for tame in
        [" 0 times full", " 0 cancelled", " 0 dropped", " 0 preemptions", " 0 of ", " 0 pages given up"]
    {
        assert!(!out.contains(tame), "too tame: {out}");
    }
}
