//! Proves that `"graph"` in model.json runs a user's own op graph: each operator alone and a chain of them, on one
//! rank and on several, gives what its definition gives in f64 (`mpk_tests::reference`).

use mpk_tests::reference::{self, Heads, values};
use mpk_tests::run_json::Output;
use mpk_tests::task_graph::emit;
use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A tensor with given values.
fn tensor(name: &str, kind: &str, dtype: &str, dims: &[usize], values: &[f64]) -> Value {
    assert_eq!(values.len(), dims.iter().product::<usize>());
    json!({"name": name, "kind": kind, "dtype": dtype, "dims": dims, "data": {"values": values}})
}

fn sharded(mut tensor: Value, shard: Value) -> Value {
    tensor["shard"] = shard;
    tensor
}

fn even(dim: usize) -> Value {
    json!({"dim": dim, "kind": "even"})
}

fn op(name: &str, inputs: &[&str], outputs: &[&str], attrs: Value) -> Value {
    json!({"op": name, "inputs": inputs, "outputs": outputs, "attrs": attrs})
}

/// A graph of `rows` rows whose wanted output is `y`.
fn graph(rows: usize, tensors: &[Value], ops: &[Value]) -> ModelFile {
    let graph = json!({"rows": rows, "tensors": tensors, "ops": ops, "outputs": ["y"]});
    ModelFile::new(json!({"schema": "mpk-model/1", "graph": graph}))
}

fn outputs(model: &ModelFile, ranks: u32, arguments: &[&str]) -> BTreeMap<String, Output> {
    let run = Job::new(ranks).arg(model.path()).args(arguments).run_json();
    assert!(run.requests.is_empty());
    assert_eq!(run.tp, ranks);
    run.outputs
}

/// Compares output `y` on each number of ranks, with both placements and each lowering.
fn check(model: &ModelFile, ranks: &[u32], dims: [usize; 2], expected: &[f64], what: &str) {
    for &ranks in ranks {
        for (placement, lowering) in
            [("static", "copy-reduce"), ("dynamic", "one-shot"), ("static", "two-shot")]
        {
            let found = outputs(model, ranks, &["--placement", placement, "--allreduce", lowering]);
            let what = format!("{what}, {ranks} ranks, {placement}, {lowering}");
            let y = found.get("y").unwrap_or_else(|| panic!("{what}: no output y in {found:?}"));
            assert_eq!(y.dims, dims.map(|d| d as u64), "{what}");
            close(y, expected, &what);
            if ranks == 1 {
                break;
            }
        }
    }
}

fn close(found: &Output, expected: &[f64], what: &str) {
    assert_eq!(found.values.len(), expected.len(), "{what}");
    // Rounding of the output, and of a few values before it.
    let unit = match &found.dtype[..] {
        "f32" => 1e-5,
        "f16" => 2e-3,
        "bf16" => 1.6e-2,
        other => panic!("{what}: output of type {other}"),
    };
    let largest = expected.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    for (i, (found, expected)) in found.values.iter().zip(expected).enumerate() {
        let allowed = unit * (expected.abs() + 0.1 * largest);
        assert!((found - expected).abs() <= allowed, "{what}: element {i} is {found}, expected {expected}");
    }
}

const ROWS: usize = 5;

#[test]
fn linear_alone() {
    // Sizes that no tile and no number of ranks divides.
    let (k, n) = (37, 45);
    let (x, w, b) = (values(1, ROWS * k), values(2, n * k), values(3, n));
    for dtype in ["f32", "bf16", "f16"] {
        let tensors =
            [tensor("x", "input", dtype, &[ROWS, k], &x), tensor("w", "weight", dtype, &[n, k], &w)];
        let model = graph(ROWS, &tensors, &[op("linear", &["x", "w"], &["y"], json!({}))]);
        check(&model, &[1, 2], [ROWS, n], &reference::linear(&x, &w, k, None), &format!("linear in {dtype}"));
    }
    let tensors = [
        tensor("x", "input", "f32", &[ROWS, k], &x),
        sharded(tensor("w", "weight", "f32", &[n, k], &w), even(0)),
        sharded(tensor("b", "weight", "f32", &[n], &b), even(0)),
    ];
    let model = graph(ROWS, &tensors, &[op("linear", &["x", "w", "b"], &["y"], json!({}))]);
    let expected = reference::linear(&x, &w, k, Some(&b));
    check(&model, &[1, 2, 4], [ROWS, n], &expected, "column-parallel linear with bias");
}

/// Each rank has a part of k, so y is the sum of the ranks' results.
#[test]
fn row_parallel_linear_is_summed() {
    let (k, n) = (42, 33);
    let (x, w) = (values(4, ROWS * k), values(5, n * k));
    let tensors = [
        sharded(tensor("x", "input", "f32", &[ROWS, k], &x), even(1)),
        sharded(tensor("w", "weight", "f32", &[n, k], &w), even(1)),
        tensor("one", "weight", "f32", &[n], &vec![1.0; n]),
    ];
    let ops = [
        op("linear", &["x", "w"], &["sum"], json!({})),
        // A use that needs the whole sum on every rank.
        op("rmsnorm", &["sum", "one"], &["y"], json!({"eps": 1e-5})),
    ];
    let expected = reference::rmsnorm(&reference::linear(&x, &w, k, None), &vec![1.0; n], 1e-5);
    check(&graph(ROWS, &tensors, &ops), &[1, 2, 4], [ROWS, n], &expected, "row-parallel linear");
}

/// Every rank has its own summand (random, by rank); the result is the sum of all.
#[test]
fn allreduce_of_a_partial_input() {
    let n = 50;
    let x = json!({"name": "x", "kind": "input", "dtype": "f32", "dims": [ROWS, n], "shard": "partial",
                   "data": {"random": {"seed": 9}}});
    let model = graph(ROWS, &[x], &[op("allreduce", &["x"], &["y"], json!({}))]);
    for ranks in [2, 4] {
        let value =
            |i: usize| (0..ranks).map(|r| reference::random_weight(9, &format!("x.{r}"), i as u64)).sum();
        let expected: Vec<f64> = (0..ROWS * n).map(value).collect();
        check(&model, &[ranks], [ROWS, n], &expected, "allreduce");
    }
}

#[test]
fn rmsnorm_alone() {
    let k = 61;
    let (x, w) = (values(6, ROWS * k), values(7, k));
    for dtype in ["f32", "bf16"] {
        let tensors = [tensor("x", "input", "f32", &[ROWS, k], &x), tensor("w", "weight", dtype, &[k], &w)];
        let model = graph(ROWS, &tensors, &[op("rmsnorm", &["x", "w"], &["y"], json!({"eps": 0.01}))]);
        check(
            &model,
            &[1, 2],
            [ROWS, k],
            &reference::rmsnorm(&x, &w, 0.01),
            &format!("rmsnorm, {dtype} weight"),
        );
    }
}

#[test]
fn silu_mul_and_add_alone() {
    let n = 29;
    let gate_up = values(8, ROWS * 2 * n);
    let tensors = [tensor("x", "input", "f32", &[ROWS, 2 * n], &gate_up)];
    let model = graph(ROWS, &tensors, &[op("silu_mul", &["x"], &["y"], json!({}))]);
    check(&model, &[1, 2], [ROWS, n], &reference::silu_mul(&gate_up, n), "silu_mul");

    let (a, b) = (values(9, ROWS * n), values(10, ROWS * n));
    let tensors = [tensor("a", "input", "f32", &[ROWS, n], &a), tensor("b", "input", "f32", &[ROWS, n], &b)];
    let model = graph(ROWS, &tensors, &[op("add", &["a", "b"], &["y"], json!({}))]);
    let expected: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    check(&model, &[1, 2], [ROWS, n], &expected, "add");
}

#[test]
fn embedding_alone() {
    let (vocabulary, n) = (23, 19);
    let table = values(11, vocabulary * n);
    let tokens = [22, 0, 7, 7, 13];
    let expected: Vec<f64> = tokens.iter().flat_map(|&t| table[t * n..(t + 1) * n].to_vec()).collect();
    for shard in [json!("replicated"), even(0)] {
        let tensors = [sharded(tensor("table", "weight", "f32", &[vocabulary, n], &table), shard.clone())];
        let model = graph(tokens.len(), &tensors, &[op("embedding", &["table"], &["y"], json!({}))])
            .set("generate.prompt_tokens", json!([tokens]));
        check(&model, &[1, 2, 4], [tokens.len(), n], &expected, &format!("embedding, {shard}"));
    }
}

/// A prefill: eleven positions over pages of four, with more query heads than key/value heads, and with one or several
/// key/value heads per rank.
#[test]
fn attention_alone() {
    for (key_value, ranks) in [(2, vec![1, 2, 4]), (4, vec![2])] {
        attention_of(Heads { query: 8, key_value, size: 6 }, &ranks);
    }
}

fn attention_of(heads: Heads, ranks: &[u32]) {
    let (rows, page, pages) = (11, 4, 3);
    let Heads { query, key_value, size } = heads;
    let width = (query + 2 * key_value) * size;
    let qkv = values(12, rows * width);
    let (q_norm, k_norm) = (values(13, size), values(14, size));
    // The operator takes the table as f32.
    let rope: Vec<f64> =
        reference::rope_table(rows, size, 100.0).iter().map(|&v| f64::from(v as f32)).collect();
    let queries = json!({"kind": "queries", "heads": query, "head_dim": size});
    let key_values =
        |size: usize| json!({"kind": "key_values", "heads": query, "kv_heads": key_value, "head_dim": size});
    let part = |len: usize, split: Value| json!({"len": len, "split": split});
    let qkv_shard = json!({"dim": 1, "parts": [
        part(query * size, queries), part(key_value * size, key_values(size)), part(key_value * size, key_values(size))]});
    let cache_shard =
        json!({"dim": 1, "parts": [part(key_value, key_values(1)), part(key_value, key_values(1))]});
    for (norm, splits, window) in
        [(false, 1, None), (true, 1, None), (false, 3, None), (true, 2, Some(6)), (false, 1, Some(1))]
    {
        let mut tensors = vec![
            sharded(tensor("qkv", "input", "f32", &[rows, width], &qkv), qkv_shard.clone()),
            json!({"name": "cache", "kind": "persistent", "dtype": "f32", "shard": cache_shard,
                   "dims": [pages, 2 * key_value, page, size], "region_dims": [1, key_value, 16]}),
            tensor("rope", "constant", "f32", &[rows, size], &rope),
        ];
        let mut inputs = vec!["qkv", "cache", "rope"];
        let mut attrs = json!({"heads": query, "kv_heads": key_value, "head_dim": size, "splits": splits});
        if norm {
            tensors.push(tensor("q_norm", "weight", "f32", &[size], &q_norm));
            tensors.push(tensor("k_norm", "weight", "f32", &[size], &k_norm));
            inputs.extend(["q_norm", "k_norm"]);
            attrs["qk_norm"] = json!(true);
            attrs["eps"] = json!(1e-3);
        }
        if let Some(window) = window {
            attrs["window"] = json!(window);
        }
        let model = graph(rows, &tensors, &[op("attention", &inputs, &["y", "cache"], attrs)]);
        let norms = norm.then_some((&q_norm[..], &k_norm[..], 1e-3));
        let expected = reference::attention(&qkv, heads, &rope, norms, window);
        let what = format!(
            "attention of {key_value} key/value heads, norm {norm}, {splits} splits, window {window:?}"
        );
        check(&model, ranks, [rows, query * size], &expected, &what);
    }
}

/// Sequences of different lengths in one iteration, a prompt of one row among them: each row sees the keys of its own sequence only. Two
/// page sizes; tasks for one share of the keys and for several, and the steps for many rows.
#[test]
fn attention_of_several_sequences() {
    let heads = Heads { query: 8, key_value: 4, size: 6 };
    let Heads { query, key_value, size } = heads;
    let lengths = [5, 1, 17, 2, 1, 9];
    let (rows, longest, width) = (lengths.iter().sum(), 17, (query + 2 * key_value) * size);
    let qkv = values(22, rows * width);
    let rope: Vec<f64> =
        reference::rope_table(longest, size, 100.0).iter().map(|&v| f64::from(v as f32)).collect();
    let expected = |window| {
        let mut first = 0;
        let of_lengths = lengths.into_iter().flat_map(|length| {
            let of_sequence = &qkv[first * width..(first + length) * width];
            first += length;
            reference::attention(of_sequence, heads, &rope, None, window)
        });
        of_lengths.collect::<Vec<f64>>()
    };
    let model = |active: usize, pages: usize, page: usize, attrs: &[(&str, Value)]| {
        let tensors = [
            tensor("qkv", "input", "f32", &[rows, width], &qkv),
            json!({"name": "cache", "kind": "persistent", "dtype": "f32",
                   "dims": [pages, 2 * key_value, page, size], "region_dims": [active, key_value, 16]}),
            tensor("rope", "constant", "f32", &[longest, size], &rope),
        ];
        let mut all = json!({"heads": query, "kv_heads": key_value, "head_dim": size});
        attrs.iter().for_each(|(name, value)| all[name] = value.clone());
        let tokens: Vec<Vec<u32>> = lengths.iter().map(|&length| vec![0; length]).collect();
        graph(rows, &tensors, &[op("attention", &["qkv", "cache", "rope"], &["y", "cache"], all)])
            .set("graph.active", json!(active))
            .set("generate.prompt_tokens", json!(tokens))
    };
    for (page, pages) in [(4, 5 * 6), (16, 2 * 6 + 1)] {
        for attrs in [
            &[("splits", json!(1))][..],
            &[("splits", json!(3))],
            &[("prefill", json!(true))],
            &[("splits", json!(2)), ("window", json!(5))],
            &[("prefill", json!(true)), ("window", json!(7))],
        ] {
            // One slot more than there are sequences in the second case.
            let active = if page == 4 { 6 } else { 7 };
            let what = format!("attention of several sequences, pages of {page}, {attrs:?}");
            let window =
                attrs.iter().find(|(name, _)| *name == "window").and_then(|(_, value)| value.as_u64());
            let expected = expected(window.map(|window| window as usize));
            check(&model(active, pages, page, attrs), &[1], [rows, query * size], &expected, &what);
        }
    }
    for (active, pages, problem) in
        [(5, 30, "6 sequences with 35 tokens"), (6, 29, "29 KV pages of 4 do not hold")]
    {
        let refused = Job::new(1).arg(model(active, pages, 4, &[]).path()).run().expect(2);
        assert!(refused.stderr.contains(problem), "{}", refused.stderr);
    }
    for (window, problem) in [
        (json!(0), "attribute `window` must be at least 1"),
        (json!(-1), "`window`"),
        (json!(1.5), "`window`"),
        (json!("4"), "`window`"),
    ] {
        let refused = Job::new(1).arg(model(6, 30, 4, &[("window", window)]).path()).run().expect(2);
        assert!(refused.stderr.contains(problem), "{}", refused.stderr);
    }
}

/// Two slots share the rows of this graph, and all rows belong to the first slot. The norm does not fuse, so its tasks read
/// what the attention of *either* slot may have written. The second slot's tasks have nothing to do, and are done long
/// before those of the first slot, whose worker is stalled. Workers that waited only for the second slot would read zeros.
#[test]
fn a_norm_waits_for_the_slots_whose_rows_it_reads() {
    let (rows, page, heads) = (8, 4, Heads { query: 2, key_value: 2, size: 6 });
    let (Heads { query, key_value, size }, pages) = (heads, 2);
    let width = (query + 2 * key_value) * size;
    let (qkv, weight) = (values(21, rows * width), values(22, query * size));
    let rope: Vec<f64> =
        reference::rope_table(rows, size, 100.0).iter().map(|&v| f64::from(v as f32)).collect();
    let tensors = [
        tensor("qkv", "input", "f32", &[rows, width], &qkv),
        json!({"name": "cache", "kind": "persistent", "dtype": "f32",
               "dims": [2 * pages, 2 * key_value, page, size], "region_dims": [2, key_value, 1]}),
        tensor("rope", "constant", "f32", &[rows, size], &rope),
        tensor("weight", "weight", "f32", &[query * size], &weight),
    ];
    let heads_of = json!({"heads": query, "kv_heads": key_value, "head_dim": size, "splits": 1});
    let ops = [
        op("attention", &["qkv", "cache", "rope"], &["attended", "cache"], heads_of),
        op("rmsnorm", &["attended", "weight"], &["y"], json!({"eps": 1e-5})),
    ];
    let graph = json!({"rows": rows, "active": 2, "tensors": tensors, "ops": ops, "outputs": ["y"]});
    let model = ModelFile::new(json!({"schema": "mpk-model/1", "graph": graph}));
    let expected = reference::rmsnorm(&reference::attention(&qkv, heads, &rope, None, None), &weight, 1e-5);
    for placement in ["static", "dynamic"] {
        let held_up = ["--placement", placement, "--workers", "4", "--debug-stall", "0:0:300"];
        close(&outputs(&model, 1, &held_up)["y"], &expected, placement);
    }
}

/// The log-probabilities of given tokens, wherever they stand: of any rank, the first and the last one, the highest and the lowest.
#[test]
fn log_probabilities_of_any_tokens() {
    let (rows, vocabulary) = (4, 75);
    let logits: Vec<f64> = values(26, rows * vocabulary).iter().map(|v| 8.0 * v).collect();
    let row = |r: usize| &logits[r * vocabulary..][..vocabulary];
    let at = |r: usize, wanted: f64| row(r).iter().position(|v| *v == wanted).expect("a token");
    let highest = row(2).iter().copied().fold(f64::MIN, f64::max);
    let lowest = row(3).iter().copied().fold(f64::MAX, f64::min);
    let tokens = [0, vocabulary - 1, at(2, highest), at(3, lowest)];
    let expected: Vec<f64> =
        (0..rows).map(|r| row(r)[tokens[r]] - row(r).iter().map(|v| v.exp()).sum::<f64>().ln()).collect();
    for ranks in [1, 2, 4] {
        for split in [true, false] {
            let x = tensor("x", "input", "f32", &[rows, vocabulary], &logits);
            let tensors = [
                if split && ranks > 1 { sharded(x, even(1)) } else { x },
                json!({"name": "token", "kind": "constant", "dtype": "i32", "dims": [rows], "data": {"values": tokens}}),
            ];
            let ops = [
                op("argmax_partial", &["x"], &["p"], json!({"top_k": 2, "slices": ranks, "tiles": 2})),
                op(
                    "argmax_reduce",
                    &["p"],
                    &["best", "top", "logprob", "sum"],
                    json!({"top_k": 2, "log_sum": true}),
                ),
                op("token_logit", &["token", "x"], &["logit"], json!({"slices": ranks})),
                op("token_logprob", &["logit", "sum"], &["y"], json!({})),
            ];
            let model = graph(rows, &tensors, &ops).set("graph.samples", json!(rows));
            for placement in ["static", "dynamic"] {
                let found = outputs(&model, ranks, &["--placement", placement]);
                close(&found["y"], &expected, &format!("{ranks} ranks, {placement}, split: {split}"));
            }
            // Slices that no rank writes would hold anything.
            let refused = Job::new(1).arg(model.path()).run();
            assert_eq!(refused.status, Some(if ranks == 1 { 0 } else { 2 }), "{}", refused.stderr);
            assert!(ranks == 1 || refused.stderr.contains("`slices` is"), "{}", refused.stderr);
        }
    }
}

/// A tensor-parallel MLP as in models: fusion must not change the result, and the residual is added once.
#[test]
fn a_chain_of_operators() {
    let (hidden, inner) = (40, 27);
    let (x, norm) = (values(15, ROWS * hidden), values(16, hidden));
    let (gate_up, down) = (values(17, 2 * inner * hidden), values(18, hidden * inner));
    let half = json!({"len": inner, "split": {"kind": "even"}});
    let tensors = [
        tensor("x", "input", "f32", &[ROWS, hidden], &x),
        tensor("norm", "weight", "f32", &[hidden], &norm),
        sharded(
            tensor("gate_up", "weight", "f32", &[2 * inner, hidden], &gate_up),
            json!({"dim": 0, "parts": [half, half]}),
        ),
        sharded(tensor("down", "weight", "f32", &[hidden, inner], &down), even(1)),
    ];
    let ops = [
        op("rmsnorm", &["x", "norm"], &["n"], json!({"eps": 1e-6})),
        op("linear", &["n", "gate_up"], &["g"], json!({})),
        op("silu_mul", &["g"], &["s"], json!({})),
        op("linear", &["s", "down"], &["d"], json!({})),
        op("add", &["d", "x"], &["y"], json!({})),
    ];
    let n = reference::rmsnorm(&x, &norm, 1e-6);
    let s = reference::silu_mul(&reference::linear(&n, &gate_up, hidden, None), inner);
    let d = reference::linear(&s, &down, inner, None);
    let expected: Vec<f64> = d.iter().zip(&x).map(|(d, x)| d + x).collect();
    check(&graph(ROWS, &tensors, &ops), &[1, 2, 4, 8], [ROWS, hidden], &expected, "MLP");
}

/// Outputs that no operator writes have the values that were given, whether an operator reads them or not: weights, which are packed in
/// memory, and constants that were computed before the kernel started.
#[test]
fn outputs_that_no_operator_writes() {
    let (w, x, c) = (values(23, 3 * 6), values(24, 6), values(25, 3 * 6));
    let tensors = [
        tensor("x", "input", "f32", &[1, 6], &x),
        sharded(tensor("w", "weight", "f32", &[3, 6], &w), even(0)),
        sharded(tensor("unread", "constant", "f32", &[3, 6], &c), even(1)),
        json!({"name": "empty", "kind": "persistent", "dtype": "f32", "dims": [2, 2]}),
        json!({"name": "ids", "kind": "constant", "dtype": "i32", "dims": [2], "data": {"values": [-3, 16_777_216]}}),
    ];
    let ops = [
        op("linear", &["x", "w"], &["y"], json!({})),
        op("add", &["unread", "unread"], &["twice"], json!({})),
    ];
    let outputs_of = ["y", "w", "unread", "empty", "ids", "twice"];
    let graph = json!({"rows": 1, "tensors": tensors, "ops": ops, "outputs": outputs_of});
    let model = ModelFile::new(json!({"schema": "mpk-model/1", "graph": graph}));
    let as_f32 = |values: &[f64]| values.iter().map(|&v| f64::from(v as f32)).collect::<Vec<f64>>();
    for ranks in [1, 2] {
        let found = outputs(&model, ranks, &[]);
        assert_eq!(found["w"].values, as_f32(&w), "{ranks} ranks");
        assert_eq!(found["unread"].values, as_f32(&c), "{ranks} ranks");
        assert_eq!(found["empty"].values, [0.0; 4], "{ranks} ranks");
        assert_eq!(found["ids"].values, [-3.0, 16_777_216.0], "{ranks} ranks");
        let twice: Vec<f64> = c.iter().map(|&v| f64::from(2.0 * v as f32)).collect();
        assert_eq!(found["twice"].values, twice, "{ranks} ranks");
        close(&found["y"], &reference::linear(&x, &w, 6, None), "y");
    }
}

/// Without `--json` an output is one line of its name, type, dimensions and values.
#[test]
fn outputs_as_text() {
    let tensors = [
        tensor("x", "input", "f32", &[1, 2], &[0.5, -1.0]),
        tensor("z", "input", "f32", &[1, 2], &[1.0, 0.25]),
    ];
    let model = graph(1, &tensors, &[op("add", &["x", "z"], &["y"], json!({}))]);
    for ranks in [1, 2] {
        let finished = Job::new(ranks).arg(model.path()).run().expect(0).expect_nothing_left();
        assert_eq!(finished.stdout, "y f32 [1, 2]: 1.5 -0.75\n");
    }
}

/// Kernels count the rows of the batch, not those of a tensor. So rows 2 and 3 of this constant would never be read, and its norm's
/// last rows would be zeros.
#[test]
fn rows_of_the_batch_are_as_many_as_the_graph_has() {
    let (rows, k) = (4, 6);
    let (x, w) = (values(31, rows * k), values(32, k));
    let ops = [op("rmsnorm", &["x", "w"], &["y"], json!({"eps": 0.01}))];
    let model = |kind: &str, counts: &str| {
        let mut given = json!({"name": "x", "kind": kind, "dtype": "f32", "dims": [rows, k], "rows": counts});
        if kind != "persistent" {
            given["data"] = json!({"values": x});
        }
        graph(2, &[given, tensor("w", "weight", "f32", &[k], &w)], &ops)
    };
    for (kind, counts) in [("constant", "tokens"), ("persistent", "samples"), ("input", "tokens")] {
        let run = Job::new(1).arg(model(kind, counts).path()).run().expect(2).expect_nothing_left();
        assert!(run.stderr.contains("`x` has 4 rows, but `graph."), "{}", run.stderr);
        assert!(run.stderr.contains("if `x` has others, set it to \"fixed\""), "{}", run.stderr);
    }
    check(&model("constant", "fixed"), &[1], [rows, k], &reference::rmsnorm(&x, &w, 0.01), "fixed rows");
}

/// A cache is known by slots, heads and splits, whose numbers only the user knows.
#[test]
fn a_cache_without_region_dims_is_refused() {
    let (rows, key_value, size) = (4, 2, 6);
    let width = 3 * key_value * size;
    let tensors = [
        tensor("qkv", "input", "f32", &[rows, width], &values(33, rows * width)),
        json!({"name": "cache", "kind": "persistent", "dtype": "f32", "dims": [1, 2 * key_value, 4, size]}),
        tensor("rope", "constant", "f32", &[rows, size], &values(34, rows * size)),
    ];
    let heads = json!({"heads": key_value, "kv_heads": key_value, "head_dim": size});
    let model = graph(rows, &tensors, &[op("attention", &["qkv", "cache", "rope"], &["y", "cache"], heads)]);
    let run = Job::new(1).arg(model.path()).run().expect(2).expect_nothing_left();
    let wanted = "`cache` needs `region_dims`, [active, key-value heads, splits], such as [1, 2, 16]";
    assert!(run.stderr.contains(wanted), "{}", run.stderr);
}

/// What the file gives must be what the graph computes with.
#[test]
fn values_and_tokens_that_do_not_fit_are_refused() {
    let refused = |model: &ModelFile, wanted: &str| {
        for how in [&["--check"][..], &["--backend", "cpu"]] {
            let run = Job::new(1).arg(model.path()).args(how).run().expect(2).expect_nothing_left();
            assert!(run.stderr.contains(wanted), "{how:?}: {}", run.stderr);
        }
    };
    for (dtype, value, wanted) in
        [("f32", 1e39, "1e39"), ("f16", 65520.0, "6.552e4"), ("bf16", -3.4e38, "-3.4e38")]
    {
        let mut tensors = [tensor("x", "input", dtype, &[1, 2], &[0.0, value])];
        tensors[0]["rows"] = json!("fixed");
        let model = graph(1, &tensors, &[op("slice", &["x"], &["y"], json!({"shard": even(1)}))]);
        refused(&model, &format!("`x`: {wanted} is too large for {dtype}"));
    }
    let table = tensor("table", "weight", "f32", &[3, 2], &values(35, 6));
    for (tokens, wanted) in [
        (json!([0, 1, 2]), "give the tokens of the graph's 2 rows in generate.prompt_tokens[0], which has 3"),
        (json!([0, 4_000_000_000_u32]), "token 4000000000 is outside the table, which has 3 rows"),
    ] {
        let ops = [op("embedding", &["table"], &["y"], json!({}))];
        refused(
            &graph(2, std::slice::from_ref(&table), &ops).set("generate.prompt_tokens", json!([tokens])),
            wanted,
        );
    }
}

/// On GPUs, the task that sums copied summands norms the rows, too, if the sum is f32. A sum of another type, or a copy within a rank, is
/// never joined with a norm.
#[test]
fn only_sums_in_f32_are_normed_by_the_task_that_sums() {
    let (rows, k) = (32, 128);
    let weight = |name: &str, dim| json!({"name": name, "kind": "weight", "dtype": "bf16", "dims": [k, k], "data": {"random": {"seed": 1}}, "shard": even(dim)});
    let norm = json!({"name": "norm", "kind": "weight", "dtype": "bf16", "dims": [k], "data": {"random": {"seed": 2}}});
    let normed_by_a_sum = |model: &ModelFile, ranks: u32| {
        let graphs = emit(model, ranks, &["--device", "h100"]);
        let tasks = &graphs.main()[0].all_tasks;
        assert!(tasks.iter().any(|task| task.task_type == "wide_linear"), "a product of many rows");
        assert!(tasks.iter().all(|task| task.task_type != "nvshmem_copy" || task.outputs.len() == 1));
        tasks.iter().any(|task| task.task_type == "reduce" && task.outputs.len() == 2)
    };
    for (dtype, joined) in [("f32", true), ("bf16", false)] {
        let tensors = [
            json!({"name": "x", "kind": "input", "dtype": "bf16", "dims": [rows, k], "data": {"random": {"seed": 3}}}),
            weight("first", 1),
            norm.clone(),
            weight("second", 0),
        ];
        let ops = [
            op("linear", &["x", "first"], &["a"], json!({"output_dtype": dtype})),
            op("rmsnorm_linear", &["a", "norm", "second"], &["y"], json!({"eps": 1e-5})),
        ];
        for ranks in [2, 3] {
            assert_eq!(
                normed_by_a_sum(&graph(rows, &tensors, &ops), ranks),
                joined,
                "{dtype}, {ranks} ranks"
            );
        }
    }
    let tensors = [
        json!({"name": "state", "kind": "persistent", "dtype": "f32", "dims": [rows, k], "shard": even(1)}),
        norm,
        weight("second", 0),
    ];
    let ops = [
        op("allgather", &["state"], &["all"], json!({})),
        op("rmsnorm_linear", &["all", "norm", "second"], &["y"], json!({"eps": 1e-5})),
    ];
    for ranks in [1, 2] {
        assert!(!normed_by_a_sum(&graph(rows, &tensors, &ops), ranks), "{ranks} ranks");
    }
}
