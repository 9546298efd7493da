//! Proves that requests which come and go while the kernels run have the tokens of each request alone, that nothing is lost, and
//! that no page and no memory is left behind. `examples/online.rs` does it; `MPK_SOAK_REQUESTS=20000` makes the soak long.

use mpk_tests::{Job, ModelFile};
use serde_json::json;
use std::time::Duration;

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
    let job = Job::new(ranks).of("examples/online").arg(model.path()).arg(requests.to_string());
    let finished = job.timeout(Duration::from_secs(1200)).run().expect(0).expect_nothing_left();
    let out = finished.stdout;
    assert!(out.contains(&format!("online: ok, {requests} requests")), "{out}");
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

#[test]
fn a_soak_loses_nothing() {
    let requests = std::env::var("MPK_SOAK_REQUESTS").ok().and_then(|text| text.parse().ok());
    let out = run(2, requests.unwrap_or(3000), "static", "on");
    assert!(!out.contains(" 0 times full") && !out.contains(" 0 preemptions"), "too tame: {out}");
}
