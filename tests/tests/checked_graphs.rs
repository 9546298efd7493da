//! Proves that `--check` and `--emit-graph` build a user graph as a run does: they fold its constants, and refuse what a run refuses,
//! with the same words.

use mpk_tests::task_graph::emit;
use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};

fn tensor(name: &str, kind: &str, dims: &[usize]) -> Value {
    json!({"name": name, "kind": kind, "dtype": "f32", "dims": dims, "data": {"random": {"seed": 1}}})
}

fn graph(tensors: &[Value], ops: Value) -> ModelFile {
    let graph = json!({"rows": 2, "tensors": tensors, "ops": ops, "outputs": ["y"]});
    ModelFile::new(json!({"schema": "mpk-model/1", "graph": graph}))
}

/// y = x + normed w, where the norm is of constants.
fn with_a_norm_of_constants(norm: &Value) -> ModelFile {
    let mut w = tensor("w", "constant", &[2, 4]);
    w["rows"] = json!("fixed");
    let mut x = tensor("x", "input", &[2, 4]);
    x["rows"] = json!("fixed");
    graph(
        &[x, w, norm.clone()],
        json!([
            {"op": "rmsnorm", "inputs": ["w", "one"], "outputs": ["normed"]},
            {"op": "add", "inputs": ["x", "normed"], "outputs": ["y"]}
        ]),
    )
}

#[test]
fn constants_are_folded() {
    let model = with_a_norm_of_constants(&tensor("one", "weight", &[4]));
    Job::alone().arg(model.path()).run().expect(0);
    let emitted = emit(&model, 1, &[]);
    let types: Vec<&str> = emitted.main()[0].all_tasks.iter().map(|task| &task.task_type[..]).collect();
    assert!(types.contains(&"add") && !types.contains(&"rmsnorm"), "{types:?}");
}

/// The last line of what went wrong, without the name of the program.
fn problem(job: &Job) -> String {
    let finished = job.run().expect(2).expect_nothing_left();
    finished.error_lines().last().unwrap_or_else(|| panic!("{}", finished.stderr)).to_string()
}

#[test]
fn what_a_run_refuses_is_refused() {
    let one = tensor("one", "weight", &[4]);
    let table = tensor("table", "weight", &[3, 4]);
    let good = || with_a_norm_of_constants(&one);
    let embedding = graph(&[table], json!([{"op": "embedding", "inputs": ["table"], "outputs": ["y"]}]));
    // This operator works on the rows of the batch, whatever its input has. The verifier does not see that.
    let mut logits = tensor("logits", "input", &[1, 6]);
    logits["rows"] = json!("fixed");
    let short = graph(&[logits], json!([{"op": "argmax_partial", "inputs": ["logits"], "outputs": ["y"]}]));
    let mut without_data = one.clone();
    without_data.as_object_mut().expect("a tensor").remove("data");
    let mut no_file = one.clone();
    no_file["data"] = json!({"file": "no_such.safetensors", "tensor": "one"});
    for (model, options, words) in [
        (embedding, &[][..], "generate.prompt_tokens"),
        (short, &[], "`logits` has dimensions [1, 6], but 2 rows are in use"),
        (with_a_norm_of_constants(&without_data), &[], "`one` has no values"),
        (with_a_norm_of_constants(&no_file), &[], "no_such.safetensors"),
        (good(), &["--max-batch", "2"], "--max-batch has no effect on a graph of your own"),
        (good(), &["--temperature", "1"], "--temperature has no effect on a graph of your own"),
        (good(), &["--tune", "no.such=1"], "no.such"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let job = || Job::alone().arg(model.path()).args(options).args(["--backend", "cpu"]);
        let refused = problem(&job());
        assert!(refused.contains(words), "{refused}");
        assert_eq!(problem(&job().arg("--check")), refused);
        assert!(problem(&job().args(["--check", "--device", "h200"])).contains(words));
        assert_eq!(problem(&job().arg("--emit-graph").arg(folder.path().join("graphs"))), refused);
        assert!(!folder.path().join("graphs").exists());
    }
}
