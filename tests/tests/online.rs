//! Proves that requests which come and go while the kernels run have the tokens of each request alone, that nothing is lost, and
//! that no page and no memory is left behind. `examples/online.rs` does it; `MPK_SOAK_REQUESTS=1000000` makes the soak long.

use mpk_tests::folders::fixtures_folder;
use mpk_tests::{Job, ModelFile};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// Requests through `examples/online`; gives what it prints.
fn online(ranks: u32, model: &Path, requests: u64) -> String {
    let job = Job::new(ranks).of("examples/online").arg(model).arg(requests.to_string());
    // A long soak takes its time; what hangs is ended by the deadlines of the job itself.
    let most = Duration::from_secs(1200 + requests / 50);
    let out = job.timeout(most).run().expect(0).expect_nothing_left().stdout;
    assert!(out.contains(&format!("online: ok, {requests} requests")), "{out}");
    out
}

/// `placement`: of all graphs, or `DECODE+PREFILL`.
fn run(ranks: u32, requests: u64, placement: &str, prefix_cache: &str) -> String {
    // Room in the KV cache for a few of the eight requests that run at once.
    let model = ModelFile::of_fixture("tiny").set("max_seq_len", 160).set("page_size", 16);
    let model = model.set("runtime.kv_pages", 10).set("runtime.prefix_cache", prefix_cache);
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
        // Of each request alone: with a prefix cache it finds pages of those before.
        let alone = |out: &str| out.split("tokens alone ").nth(1).map(|rest| rest[..16].to_string());
        assert!(alone(&with).is_some() && alone(&with) == alone(&without), "{without}\n{with}");
    }
}

/// A model so small that the time goes into requests: admissions, preemptions, cancels, ends.
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
