//! Proves that `mpk-run` computes what Hugging Face transformers computes (tests/fixtures/README.md), for every
//! family and the trained example, on 1, 2, 4 and 8 ranks, with both placements and every lowering of the allreduce:
//! tokens are equal, and the top five log-probabilities are within the stated tolerance. With a given number of
//! ranks, all placements and lowerings give the same bits. A request's tokens do not depend on the rest of the batch,
//! slots, pages, chunks, workers, or how the embedding is sharded.

use mpk_tests::fixtures::{Fixture, is_sanitized};
use mpk_tests::{Job, ModelFile, RunJson};
use serde_json::json;

const PLACEMENTS: [&str; 2] = ["static", "dynamic"];
const LOWERINGS: [&str; 3] = ["copy-reduce", "one-shot", "two-shot"];

/// A placement and a lowering.
type Choice = (&'static str, &'static str);

fn run(model: &ModelFile, ranks: u32, (placement, lowering): Choice) -> RunJson {
    Job::new(ranks)
        .arg(model.path())
        .args(["--logprobs", "5", "--placement", placement, "--allreduce", lowering])
        .run_json()
}

/// Runs all requests of a fixture with each choice: all results are correct, and have the same bits.
fn check(name: &'static str, ranks: u32, choices: &[Choice]) {
    let fixture = Fixture::open(name);
    let model = fixture.model();
    let mut first: Option<RunJson> = None;
    let covering = covering_choices(ranks);
    for &choice in if is_sanitized() { &covering } else { choices } {
        let what = format!("{name}, {ranks} ranks, {choice:?}");
        let found = run(&model, ranks, choice);
        assert_eq!(found.tp, ranks);
        let share = fixture.check(&found, &what);
        println!("{what}: {:.3} % of what log-probabilities may differ", 100.0 * share);
        match &first {
            None => first = Some(found),
            Some(first) => {
                assert!(found.result() == first.result(), "{what}: other bits than {:?}", choices[0])
            }
        }
    }
}

/// Every placement with every lowering; one rank has no allreduce.
fn all_choices(ranks: u32) -> Vec<Choice> {
    let lowerings = if ranks == 1 { &LOWERINGS[..1] } else { &LOWERINGS[..] };
    PLACEMENTS.into_iter().flat_map(|p| lowerings.iter().map(move |&l| (p, l))).collect()
}

/// Both placements and, across the numbers of ranks, all lowerings.
fn covering_choices(ranks: u32) -> Vec<Choice> {
    match ranks {
        2 => vec![("static", "one-shot"), ("dynamic", "copy-reduce")],
        4 => vec![("static", "two-shot"), ("dynamic", "one-shot")],
        8 => vec![("static", "copy-reduce"), ("dynamic", "two-shot")],
        _ => vec![("static", "copy-reduce"), ("dynamic", "copy-reduce")],
    }
}

macro_rules! golden {
    ($($test:ident: $fixture:literal, $ranks:literal, $choices:ident;)*) => {$(
        #[test]
        fn $test() {
            check($fixture, $ranks, &$choices($ranks));
        }
    )*};
}

golden! {
    // Windows: prompts are up to six windows long.
    mistral_with_a_window_on_1_rank: "mistral-window", 1, covering_choices;
    mistral_with_a_window_on_2_ranks: "mistral-window", 2, covering_choices;
    qwen2_with_windows_in_some_layers_on_1_rank: "qwen2-window", 1, covering_choices;
    qwen2_with_windows_in_some_layers_on_2_ranks: "qwen2-window", 2, covering_choices;
    // bf16, q/k norm, tied embeddings, shards with an index.
    qwen3_on_1_rank: "qwen3", 1, all_choices;
    qwen3_on_2_ranks: "qwen3", 2, all_choices;
    qwen3_on_4_ranks: "qwen3", 4, all_choices;
    qwen3_on_8_ranks: "qwen3", 8, all_choices;
    // f32, untied.
    mistral_on_1_rank: "mistral", 1, all_choices;
    mistral_on_2_ranks: "mistral", 2, all_choices;
    mistral_on_4_ranks: "mistral", 4, all_choices;
    mistral_on_8_ranks: "mistral", 8, all_choices;
    // bf16, scaled rope, tokenizer with a begin token.
    llama_on_1_rank: "llama", 1, covering_choices;
    llama_on_2_ranks: "llama", 2, covering_choices;
    llama_on_4_ranks: "llama", 4, covering_choices;
    llama_on_8_ranks: "llama", 8, covering_choices;
    // f16, attention bias.
    qwen2_on_1_rank: "qwen2", 1, covering_choices;
    qwen2_on_2_ranks: "qwen2", 2, covering_choices;
    qwen2_on_4_ranks: "qwen2", 4, covering_choices;
    qwen2_on_8_ranks: "qwen2", 8, covering_choices;
    // bf16, q/k norm, positions past the original context of yarn.
    yarn_on_1_rank: "yarn", 1, covering_choices;
    yarn_on_2_ranks: "yarn", 2, covering_choices;
    // Trained weights.
    tiny_on_1_rank: "tiny", 1, covering_choices;
    tiny_on_2_ranks: "tiny", 2, covering_choices;
    tiny_on_4_ranks: "tiny", 4, covering_choices;
    tiny_on_8_ranks: "tiny", 8, covering_choices;
}

/// Ranks may send summands in the activations' type. Then too, all placements and lowerings give the same bits, on wide products the
/// same tokens, and log-probabilities within the tolerance. Words that are pushed are f32, so copies replace one-shot.
#[test]
fn rounded_summands_give_the_same_bits_with_every_lowering() {
    for (name, ranks) in [("qwen3", 2), ("qwen2", 2), ("tiny", 2), ("llama", 4)] {
        let fixture = Fixture::open(name);
        let model = fixture.model();
        let job = |placement, lowering| {
            let job = Job::new(ranks).arg(model.path()).args(["--logprobs", "5"]);
            job.args(["--placement", placement, "--allreduce", lowering])
        };
        let rounded =
            |placement, lowering| job(placement, lowering).args(["--allreduce-dtype", "activation"]);
        let mut first: Option<RunJson> = None;
        for (placement, lowering) in [
            ("static", "copy-reduce"),
            ("dynamic", "two-shot"),
            ("static", "two-shot"),
            ("dynamic", "one-shot"),
        ] {
            let what = format!("{name}, {ranks} ranks, {placement}, {lowering}, rounded");
            let found = rounded(placement, lowering).run_json();
            fixture.check(&found, &what);
            match &first {
                None => first = Some(found),
                Some(first) => assert!(found.result() == first.result(), "{what}: other bits"),
            }
        }
        let first = first.map(|run| run.result());
        // Otherwise the option would have done nothing.
        let of_f32 = job("static", "copy-reduce").run_json();
        assert!(first != Some(of_f32.result()), "{name}: nothing was rounded");
        let wide = rounded("static", "two-shot").env("MPK_DEBUG_WIDE", "1").run_json();
        fixture.check(&wide, &format!("{name}, wide products"));
    }
}

/// A run with static and dynamic graphs gives the same bits as a run with only one kind.
#[test]
fn static_and_dynamic_graphs_of_one_run_give_the_same_bits() {
    let fixture = Fixture::open("qwen3");
    for (ranks, lowering) in [(1, "copy-reduce"), (2, "one-shot"), (4, "copy-reduce")] {
        let expected = run(&fixture.model(), ranks, ("static", lowering));
        for (decode, prefill) in [("static", "dynamic"), ("dynamic", "static")] {
            let placement = json!({"decode": decode, "prefill": prefill});
            let model = fixture.model().set("runtime.placement", placement);
            let found = Job::new(ranks)
                .arg(model.path())
                .args(["--logprobs", "5", "--allreduce", lowering])
                .run_json();
            let what = format!("{ranks} ranks, decode {decode}, prefill {prefill}");
            fixture.check(&found, &what);
            assert!(found.result() == expected.result(), "{what}: other bits");
        }
    }
}

/// A tied checkpoint may store its one matrix as the head. transformers gives the same tokens then.
#[test]
fn a_tied_checkpoint_may_store_only_the_head() {
    let fixture = Fixture::open("llama");
    let copy = ModelFile::copy_of_fixture("llama").edit_bytes("model.safetensors", |bytes| {
        let (from, mut to) = (b"\"model.embed_tokens.weight\"", b"\"lm_head.weight\"".to_vec());
        // With spaces, the header keeps its length.
        to.resize(from.len(), b' ');
        let at = bytes.windows(from.len()).position(|w| w == from).expect("the header holds it");
        bytes[at..at + to.len()].copy_from_slice(&to);
    });
    for (ranks, embedding) in [(1, "vocabulary-parallel"), (2, "vocabulary-parallel"), (2, "replicated")] {
        let model = fixture.model().set("checkpoint", json!(copy.checkpoint()));
        let model = model.set("runtime.embedding", embedding);
        let what = format!("{ranks} ranks, {embedding}");
        fixture.check(&run(&model, ranks, ("static", "copy-reduce")), &what);
    }
}

/// Without `--ignore-eos` requests stop at their end of sequence, which is the last of `tokens` and not in `text`.
#[test]
fn requests_end_where_hugging_face_ends_them() {
    for name in ["llama", "qwen2", "qwen3", "mistral"] {
        let fixture = Fixture::open(name);
        assert!(
            fixture.expected.requests.iter().any(|r| r.finish_reason == "eos"),
            "{name}: one request has to end"
        );
        let model = fixture.model().set("generate.ignore_eos", false);
        for placement in PLACEMENTS {
            let found = run(&model, 2, (placement, "one-shot"));
            for (i, (expected, found)) in fixture.expected.requests.iter().zip(&found.requests).enumerate() {
                let what = format!("{name}, {placement}, request {i}");
                assert_eq!(found.tokens, expected.tokens[..expected.finish_length], "{what}");
                assert_eq!(found.finish_reason, expected.finish_reason, "{what}");
                assert_eq!(found.text, expected.text, "{what}");
                if expected.finish_reason == "eos" {
                    assert!(
                        fixture.expected.eos_token_ids.contains(&found.tokens[expected.finish_length - 1]),
                        "{what}"
                    );
                }
            }
        }
    }
}

/// The tokenizer encodes as Hugging Face's does, special tokens included.
#[test]
fn texts_are_encoded_as_hugging_face_encodes_them() {
    for name in ["llama", "tiny"] {
        let fixture = Fixture::open(name);
        assert!(!fixture.expected.tokenizer.is_empty());
        let texts: Vec<&str> = fixture.expected.tokenizer.iter().map(|e| &e.text[..]).collect();
        let model = fixture.model();
        let mut job = Job::new(1).arg(model.path()).args(["--max-new-tokens", "1"]);
        for text in texts {
            job = job.arg("--prompt").arg(text);
        }
        let found = job.run_json();
        for (expected, found) in fixture.expected.tokenizer.iter().zip(&found.requests) {
            assert_eq!(found.prompt_tokens, expected.tokens, "{name}: {:?}", expected.text);
        }
    }
}

/// One slot, as many slots as requests, more than requests, few pages: the batch changes, the result does not.
#[test]
fn tokens_do_not_depend_on_the_rest_of_the_batch() {
    for name in ["llama", "mistral"] {
        let fixture = Fixture::open(name);
        let requests = fixture.expected.requests.len();
        assert!(requests > 4, "{name}: more requests than slots");
        for slots in [1, 3, 4, 8, 16] {
            let model = fixture.model().set("max_batch", slots);
            let found = run(&model, 2, ("static", "one-shot"));
            fixture.check(&found, &format!("{name}, {slots} slots"));
        }
        // Pages for one long request, or a few short ones, at a time.
        let model = fixture.model().set("runtime.kv_pages", 12);
        fixture.check(&run(&model, 2, ("dynamic", "copy-reduce")), &format!("{name}, 12 pages"));
    }
}

/// A request alone gives the same result as among others.
#[test]
fn a_request_alone_gives_the_same() {
    let fixture = Fixture::open("qwen3");
    for (i, request) in fixture.expected.requests.iter().enumerate() {
        let model = fixture.model_of(std::slice::from_ref(request));
        let found = run(&model, 2, ("static", "copy-reduce"));
        assert_eq!(found.requests.len(), 1);
        fixture.check_request(request, &found.requests[0], &format!("request {i} alone"));
    }
}

/// Requests in another order give the same results, in that order.
#[test]
fn requests_in_reverse_order_give_the_same() {
    let mut fixture = Fixture::open("mistral");
    fixture.expected.requests.reverse();
    fixture.check(&run(&fixture.model(), 2, ("static", "two-shot")), "reversed");
}

/// Prompts in chunks of a few rows or at once; pages of one position, or as long as the sequence.
#[test]
fn tokens_do_not_depend_on_chunks_and_pages() {
    for name in ["qwen3", "mistral", "mistral-window", "qwen2-window"] {
        let fixture = Fixture::open(name);
        for chunk in [4, 7, 32, 512] {
            let model = fixture.model().set("runtime.prefill_chunk", chunk);
            fixture.check(&run(&model, 2, ("static", "one-shot")), &format!("{name}, chunks of {chunk}"));
        }
        for page in [1, 2, 64, 256] {
            let model = fixture.model().set("page_size", page);
            fixture.check(&run(&model, 2, ("dynamic", "one-shot")), &format!("{name}, pages of {page}"));
        }
    }
}

/// Prompts of more than 64 rows, through the wide products of Hopper's graphs; the CPU target tiles and runs them too.
#[test]
fn wide_products_give_the_same_tokens() {
    for (name, ranks, choice, workers) in [
        ("llama", 1, ("static", "copy-reduce"), 7),
        ("qwen2", 1, ("dynamic", "copy-reduce"), 2),
        ("qwen3", 1, ("static", "copy-reduce"), 40),
        ("llama", 1, ("dynamic", "copy-reduce"), 3),
        ("llama", 2, ("static", "one-shot"), 7),
        ("qwen3", 2, ("dynamic", "two-shot"), 4),
        ("mistral", 4, ("static", "two-shot"), 3),
        ("mistral-window", 1, ("static", "copy-reduce"), 7),
        ("qwen2-window", 2, ("dynamic", "one-shot"), 3),
    ] {
        let fixture = Fixture::open(name);
        let model = fixture.model().set("runtime.prefill_chunk", 300).set("runtime.workers", workers);
        let (placement, lowering) = choice;
        let found = Job::new(ranks)
            .arg(model.path())
            .args(["--logprobs", "5", "--placement", placement, "--allreduce", lowering])
            .env("MPK_DEBUG_WIDE", "1")
            .run_json();
        fixture.check(&found, &format!("{name}, {ranks} ranks, {choice:?}, wide products"));
    }
}

/// Where workers outnumber a product's tiles, tasks share the k of a tile, and the readers add their sums. The bits may change, the
/// tokens do not.
#[test]
fn products_whose_tiles_are_shared_give_the_same_tokens() {
    for (name, workers) in [("qwen3", 20), ("qwen2", 8), ("mistral", 13), ("tiny", 32)] {
        let fixture = Fixture::open(name);
        let model = fixture.model().set("runtime.workers", workers);
        let run = |placement, tune| {
            let job = Job::new(1).arg(model.path()).args(["--logprobs", "5", "--placement", placement]);
            job.args(["--tune", tune]).run_json()
        };
        let shared = run("static", "linear.least_part_columns=16");
        fixture.check(&shared, &format!("{name}, shared tiles"));
        let whole = run("static", "linear.most_parted_rows=0");
        // In the two other models, the difference is rounded away.
        let differs = shared.result() != whole.result();
        assert!(differs || !["mistral", "tiny"].contains(&name), "{name}: no tile was shared");
        let dynamic = run("dynamic", "linear.least_part_columns=16");
        assert!(shared.result() == dynamic.result(), "{name}: other bits with dynamic placement");
    }
}

/// More and fewer workers than cores, the embedding on every rank.
#[test]
fn tokens_do_not_depend_on_workers_and_embedding() {
    let fixture = Fixture::open("qwen2");
    for placement in PLACEMENTS {
        for workers in [1, 2, 5] {
            let model = fixture.model().set("runtime.workers", workers);
            fixture.check(
                &run(&model, 2, (placement, "copy-reduce")),
                &format!("{placement}, {workers} workers"),
            );
        }
        let model = fixture.model().set("runtime.embedding", "replicated");
        fixture
            .check(&run(&model, 4, (placement, "one-shot")), &format!("{placement}, replicated embedding"));
    }
}
