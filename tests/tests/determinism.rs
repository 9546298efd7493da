//! Proves that a run gives the same bits however its ranks and workers are timed: again and again, and with one rank
//! stalled on purpose before one operator or another.
//!
//! `MPK_REPEAT` sets how often the first test repeats its job (10 by default).

use mpk_tests::fixtures::Fixture;
use mpk_tests::task_graph::emit;
use mpk_tests::{Job, ModelFile};

fn job(model: &ModelFile, ranks: u32, placement: &str, lowering: &str) -> Job {
    Job::new(ranks).arg(model.path()).args([
        "--logprobs",
        "5",
        "--placement",
        placement,
        "--allreduce",
        lowering,
    ])
}

/// Two ranks, prompts of all lengths, fewer slots than requests.
#[test]
fn repeated_runs_give_the_same_bits() {
    let repeat: usize =
        std::env::var("MPK_REPEAT").map_or(10, |v| v.parse().expect("MPK_REPEAT is a number"));
    let fixture = Fixture::open("qwen3");
    let model = fixture.model();
    let choices = [
        ("static", "one-shot"),
        ("dynamic", "copy-reduce"),
        ("static", "copy-reduce"),
        ("dynamic", "one-shot"),
    ];
    let mut first = None;
    for round in 0..repeat {
        let (placement, lowering) = choices[round % choices.len()];
        let found = job(&model, 2, placement, lowering).run_json();
        let result = found.result();
        let first = first.get_or_insert_with(|| {
            fixture.check(&found, "first run");
            result.clone()
        });
        assert!(result == *first, "run {round} ({placement}, {lowering}) gave other bits than the first");
    }
}

/// A slow rank changes nothing: not before a copy, not before a reduce, not in the attention.
#[test]
fn a_stalled_rank_changes_no_bit() {
    let fixture = Fixture::open("qwen3");
    let some: Vec<_> = fixture.expected.requests.iter().take(5).cloned().collect();
    let model = fixture.model_of(&some).set("generate.max_new_tokens", 5);
    let undisturbed = job(&model, 2, "static", "copy-reduce").run_json().result();
    let graphs = emit(&model, 2, &["--placement", "static", "--allreduce", "copy-reduce"]);
    let operators = graphs.main()[0].ops.len();
    for (placement, lowering) in [("static", "one-shot"), ("dynamic", "copy-reduce"), ("static", "two-shot")]
    {
        for (rank, operator) in [(0, operators / 4), (1, operators / 2), (1, operators * 3 / 4)] {
            let stall = format!("{rank}:{operator}:3");
            let found = job(&model, 2, placement, lowering).args(["--debug-stall", &stall]).run_json();
            assert!(found.result() == undisturbed, "{placement}, {lowering}, stalled by {stall}: other bits");
        }
    }
}

/// The same on four ranks, where three wait for one.
#[test]
fn a_stalled_rank_of_four_changes_no_bit() {
    let fixture = Fixture::open("mistral");
    let some: Vec<_> = fixture.expected.requests.iter().take(3).cloned().collect();
    let model = fixture.model_of(&some).set("generate.max_new_tokens", 4);
    let undisturbed = job(&model, 4, "static", "copy-reduce").run_json().result();
    for (placement, lowering, operator) in [
        ("static", "one-shot", 3),
        ("dynamic", "one-shot", 3),
        ("static", "copy-reduce", 5),
        ("dynamic", "two-shot", 5),
    ] {
        let stall = format!("2:{operator}:3");
        let found = job(&model, 4, placement, lowering).args(["--debug-stall", &stall]).run_json();
        assert!(found.result() == undisturbed, "{placement}, {lowering}, stalled by {stall}: other bits");
    }
}
