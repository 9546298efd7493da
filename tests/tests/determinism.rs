//! Proves that a run gives the same bits for any timing of its ranks and workers: in repeated runs, and with one rank
//! stalled on purpose before different operators.
//!
//! `MPK_REPEAT` is the number of repetitions in the first test (default 10).

use mpk_tests::fixtures::Fixture;
use mpk_tests::task_graph::{Task, emit};
use mpk_tests::{Job, ModelFile};
use serde_json::json;
use std::collections::BTreeSet;

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

/// Every second layer uses the same flagged words. Ranks that are ahead or behind never write one too early.
#[test]
fn flagged_words_that_layers_share_survive_stalls() {
    let fixture = Fixture::open("qwen3");
    let some: Vec<_> = fixture.expected.requests.iter().take(3).cloned().collect();
    let model = fixture.model_of(&some).set("generate.max_new_tokens", 4);
    let undisturbed = job(&model, 2, "static", "copy-reduce").run_json().result();
    let mut turn = 0u32;
    for placement in ["static", "dynamic"] {
        let options = ["--placement", placement, "--allreduce", "one-shot"];
        let graphs = emit(&model, 2, &options);
        let sums = sums(&graphs.main()[0].ops);
        for &operator in sums.iter().step_by(2) {
            // Sums and the operators that push, alternating; delays from far below an iteration to above it.
            turn += 1;
            let stall =
                format!("{}:{}:{}", turn % 2, operator as u32 - turn / 2 % 2, [0, 1, 7][turn as usize % 3]);
            let found = job(&model, 2, placement, "one-shot").args(["--debug-stall", &stall]).run_json();
            assert!(found.result() == undisturbed, "{placement}, stalled by {stall}: other bits");
        }
    }
}

/// The control for the test above: all flagged words in one place. The verifier refuses such graphs. If they run
/// anyway, a slow rank finds its words overwritten.
#[test]
fn flagged_words_in_one_place_are_refused_and_lost() {
    let fixture = Fixture::open("qwen3");
    let some: Vec<_> = fixture.expected.requests.iter().take(1).cloned().collect();
    let model = fixture.model_of(&some).set("generate.max_new_tokens", 2);
    let options = ["--placement", "static", "--allreduce", "one-shot"];
    let sums = sums(&emit(&model, 2, &options).main()[0].ops);
    let stall = format!("1:{}:300", sums[0]);
    let run = job(&model, 2, "static", "one-shot").args(["--debug-unprotected", "--deadline", "2"]);
    let finished = run.args(["--debug-stall", &stall]).run();
    assert_eq!(finished.status, Some(4), "{}", finished.stderr);
    assert!(finished.stderr.contains("waited for flagged words"), "{}", finished.stderr);
}

/// Indices of the allreduces among the operators.
fn sums(ops: &[String]) -> Vec<usize> {
    (0..ops.len()).filter(|&op| ops[op].contains("allreduce")).collect()
}

/// Two layers whose products may be wide on four ranks.
fn two_layers() -> serde_json::Value {
    json!({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 128, "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
        "max_position_embeddings": 2048, "torch_dtype": "bfloat16", "eos_token_id": 127})
}

/// Sums whose rows stay with their owners (prompts of many rows, two-shot): the same bits as with whole sums on every rank. The last chunk
/// has rows of only some blocks. Ranks are stalled before others need their rows.
#[test]
fn rows_that_stay_with_their_owners_have_the_same_bits() {
    let config = two_layers();
    let prompt = |length: u32, step: u32| {
        (0..length).map(|i| (i * step % 90 + 1).to_string()).collect::<Vec<_>>().join(",")
    };
    let prompts = [prompt(1410, 7), prompt(130, 5)];
    for (ranks, chunk) in [(2, 512), (4, 1024)] {
        let model = ModelFile::random(config.clone(), 5)
            .set("max_batch", 2)
            .set("max_seq_len", 1600)
            .set("generate.max_new_tokens", 3)
            .set("runtime.prefill_chunk", chunk)
            .set("runtime.workers", 5);
        let wide = |placement, lowering| {
            let prompts = prompts.iter().flat_map(|prompt| ["--prompt-tokens", prompt]);
            job(&model, ranks, placement, lowering).args(prompts).env("MPK_DEBUG_WIDE", "1")
        };
        let whole = wide("static", "copy-reduce").run_json().result();
        for (placement, stall) in
            [("static", None), ("dynamic", None), ("static", Some("1:4:30")), ("dynamic", Some("0:6:30"))]
        {
            let run =
                wide(placement, "two-shot").args(stall.iter().flat_map(|stall| ["--debug-stall", stall]));
            let found = run.run_json().result();
            assert!(found == whole, "{ranks} ranks, {placement}, stalled by {stall:?}: other bits");
        }
        let apart =
            wide("static", "two-shot").args(["--tune", "allreduce.joined_rows=0"]).run_json().result();
        assert!(apart == whole, "{ranks} ranks, sums and norms in tasks of their own: other bits");
        for (placement, stall) in [("static", None), ("dynamic", None), ("static", Some("1:4:30"))] {
            let run = wide(placement, "two-shot").args(["--tune", "allreduce.stored_tiles=0"]);
            let found = run.args(stall.iter().flat_map(|stall| ["--debug-stall", stall])).run_json().result();
            assert!(
                found == whole,
                "{ranks} ranks, {placement}, copied tiles, stalled by {stall:?}: other bits"
            );
        }
        // These graphs are cut as those that ran. In them, a rank sums only its own blocks of 256 rows.
        let graphs = emit(&model, ranks, &["--device", "h100", "--allreduce", "two-shot"]);
        let name = format!("prefill-{chunk}");
        let graph = &graphs.all().find(|ranks| ranks[0].name == name).expect("a graph of these rows")[1];
        let sums = graph.all_tasks.iter().filter(|t| t.task_type == "reduce").map(|t| &t.outputs[0]);
        let blocks: Vec<u64> = sums.map(|sum| sum.offset / (256 * 4 * sum.strides[0])).collect();
        // Only the last sum is not normed by the same task.
        let normed = graph.all_tasks.iter().filter(|t| t.task_type == "reduce" && t.outputs.len() == 2);
        let normed: BTreeSet<_> = normed.map(|task| task.op_id).collect();
        assert_eq!(normed.len(), 4);
        // The products of a layer's two sums write all tiles but the rank's own into the memory of the others.
        let stores = |t: &&Task| t.task_type == "wide_linear" && t.outputs.iter().any(|o| o.place.is_some());
        let stored = graph.all_tasks.iter().filter(stores).map(|t| &t.outputs[0]);
        let elements: u64 = stored.map(|tile| tile.dims.iter().product::<u64>()).sum();
        assert_eq!(elements, 4 * chunk * 128 * (u64::from(ranks) - 1) / u64::from(ranks));
        assert!(!blocks.is_empty() && blocks.iter().all(|block| block % u64::from(ranks) == 1), "{blocks:?}");
    }
}

/// Sums of copied or pushed summands whose tasks norm the rows, too: the same bits as with two tasks. Not all rows are in use.
#[test]
fn whole_sums_that_are_normed_by_the_same_task_have_the_same_bits() {
    let prompts: Vec<String> = (0..20).map(|i| format!("{},{},{}", i + 1, i * 3 + 1, i * 4 + 1)).collect();
    for ranks in [2, 4] {
        let model = ModelFile::random(two_layers(), 5)
            .set("max_batch", 32)
            .set("max_seq_len", 64)
            .set("generate.max_new_tokens", 4)
            .set("runtime.workers", 5);
        let wide = |placement, lowering| {
            let prompts = prompts.iter().flat_map(|prompt| ["--prompt-tokens", prompt]);
            job(&model, ranks, placement, lowering).args(prompts).env("MPK_DEBUG_WIDE", "1")
        };
        // Who asks for `copy-reduce` gets a sum for each tile that is copied.
        let apart = wide("static", "copy-reduce").run_json().result();
        for (placement, stall) in
            [("static", None), ("dynamic", None), ("static", Some("1:4:30")), ("dynamic", Some("0:6:30"))]
        {
            // Copied, and pushed by the products.
            for tuned in ["allreduce.one_shot_bytes=0", "wide.pushed_rows=32"] {
                let run = wide(placement, "auto").args(["--tune", tuned]);
                let found = run.args(stall.iter().flat_map(|stall| ["--debug-stall", stall]));
                let what = format!("{ranks} ranks, {placement}, {tuned}, stalled by {stall:?}");
                assert!(found.run_json().result() == apart, "{what}: other bits");
            }
        }
        // `auto` copies summands that are neither few enough to be pushed nor too many: of these, a rank has 16 KiB.
        let sent = 16384 * (ranks - 1);
        let normed = |limits: [u32; 2]| {
            let [pushed, copied] = [("one_shot", limits[0]), ("copied", limits[1])]
                .map(|(name, bytes)| format!("allreduce.{name}_bytes={bytes}"));
            let graphs = emit(&model, ranks, &["--device", "h100", "--tune", &pushed, "--tune", &copied]);
            let graph = &graphs.main()[1];
            let tasks = graph.all_tasks.iter().filter(|t| t.task_type == "reduce" && t.outputs.len() == 2);
            let tasks: Vec<&Task> = tasks.collect();
            // A rank waits once for its own product, and once for copies from all peers. It polls words.
            let mut copied = tasks.iter().filter(|task| task.inputs[0].dims.len() == 2);
            assert!(copied.all(|task| task.dependent_events.len() == 2), "{limits:?}");
            let rows: u64 = tasks.iter().map(|task| task.outputs[0].dims[0]).sum();
            assert_eq!(rows, 32 * tasks.iter().map(|task| task.op_id).collect::<BTreeSet<_>>().len() as u64);
            rows / 32
        };
        // The last sum is not normed by the same task: its rows are those that are sampled.
        assert_eq!(normed([0, sent]), 4);
        assert_eq!(normed([0, sent - 1]), 0, "each rank sums its own tiles");
        assert_eq!(normed([16384, sent]), 4, "the embedding pushes its rows; products of 32 rows cannot");
        assert_eq!(normed([16384, sent - 1]), 1, "only the embedding's sum is whole");
    }
}
