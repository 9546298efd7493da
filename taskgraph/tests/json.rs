//! Files of task graphs and op graphs: a written graph reads back equal, and errors are refused with their place.

mod verify_support;

use proptest::prelude::*;
use std::process::{Command, Stdio};
use taskgraph::digest::digest;
use taskgraph::json::{
    DataSource, GraphFileError, from_json, op_graph_from_str, op_graph_from_value, op_graph_schema,
    op_graph_to_value, task_graph_schema, to_json,
};
use taskgraph::op_graph::{Role, Rows, WeightPart};
use taskgraph::target::Backend;
use taskgraph::task_graph::{EventType, LocalPart, Placement, Space, TaskGraph};
use taskgraph::{DType, Region, Sharding, Split, Trust};
use verify_support::*;

/// A graph with a non-default value in every field.
fn rich() -> TaskGraph {
    let mut graph = chain(3, 2, 2, 2, Lowering::Copy).remove(1);
    let copy = find(&graph, "l0.copy", 0) as usize;
    graph.tasks[copy].args = [1, -2, 3, i32::MIN, i32::MAX, 0, 7, 8];
    let remote = graph.events.iter().position(|e| e.remote).unwrap() as u32;
    graph.tasks[copy].carried = smallvec::smallvec![(remote, 1), (3, 2)];
    let reduce = find(&graph, "l0.reduce", 0) as usize;
    graph.tasks[reduce].dependencies.push(1);
    graph.backend = Backend::Cuda;
    graph.tensors[0].output = true;
    graph.tensors[0].rows = Rows::Samples;
    let part = |source: &str, range| LocalPart { source: source.into(), dims: vec![8, 8], range };
    graph.tensors[1].parts = vec![part("a \"quoted\" \u{e9}\n", None), part("b", Some((0, 2..6)))];
    graph.tensors[1].role = Role::Weight { parts: vec![WeightPart { source: "a".into(), dims: vec![8, 8] }] };
    graph.tensors[1].tiled = true;
    graph.tensors[2].role = Role::Persistent { region_dims: Some(vec![3, 4]) };
    graph.tensors[2].bytes = u64::MAX;
    // Tasks in another order than their operands, as with dynamic placement.
    let last = graph.tasks.len() - 1;
    graph.tasks.swap(last - 1, last);
    graph.events[4].event_type = EventType::LaunchMassiveTasks;
    (graph.events[4].first_task, graph.events[4].last_task) = (3, 5);
    graph
}

#[test]
fn a_task_graph_reads_back_equal() {
    let mut graphs = vec![rich()];
    graphs.extend(chain(3, 2, 2, 2, Lowering::Flagged));
    graphs.extend(chain(1, 1, 1, 1, Lowering::Copy));
    graphs[2].placement = Placement::Dynamic;
    for graph in &graphs {
        let text = to_json(graph);
        let back = from_json(text.as_bytes()).expect("what was written can be read");
        assert_eq!(&back, graph);
        assert_eq!(digest(&back), digest(graph));
        assert_eq!(to_json(&back), text);
    }
}

#[test]
fn the_file_has_the_fixed_fields() {
    let graph = rich();
    let value: serde_json::Value = serde_json::from_str(&to_json(&graph)).unwrap();
    assert_eq!(value["schema"], "mpk-task-graph/1");
    assert_eq!((&value["rank"], &value["world"]), (&1.into(), &3.into()));
    assert_eq!(value["placement"], "static");
    assert_eq!(value["tensors"][0]["space"], "device");
    let copy = find(&graph, "l0.copy", 0) as usize;
    let task = &value["all_tasks"][copy];
    assert_eq!(task["task_type"], "nvshmem_copy");
    let trigger = task["trigger_event"].as_u64().unwrap();
    assert_eq!((trigger >> 48, trigger >> 32 & 0xFFFF), (1, 0), "NVSHMEM tag, owner rank 0");
    assert_eq!(task["dependent_event"].as_u64().unwrap() >> 32, 1, "local tag, own rank");
    assert_eq!(task["carried_events"][0][1], 1);
    assert_eq!(task["outputs"][0]["base_ptr"], "l0.receive");
    assert_eq!(task["outputs"][0]["data_type"], "f32");
    // Slot 1 of 3, each of 2 rows of 8 floats.
    assert_eq!(task["outputs"][0]["offset"], 2 * 8 * 4);
    assert!(value["all_tasks"][1]["dependent_event"].is_null());
    assert_eq!(value["all_tasks"].as_array().unwrap().len(), graph.tasks.len());
    for task in value["all_tasks"].as_array().unwrap() {
        assert!(task.get("dependent_event").is_some() && task["trigger_event"].is_u64());
    }
    let reduce = find(&graph, "l0.reduce", 0) as usize;
    let events = value["all_tasks"][reduce]["dependent_events"].as_array().unwrap();
    assert_eq!(events.len(), 3);
    assert_eq!(events[0], value["all_tasks"][reduce]["dependent_event"]);
    let event = &value["all_events"][4];
    assert_eq!(event["event_type"], "launch_massive_tasks");
    assert_eq!((&event["first_task_id"], &event["last_task_id"]), (&3.into(), &5.into()));
}

/// The text of a correct file with one part replaced is refused.
#[track_caller]
fn refused(from: &str, to: &str, words: &[&str]) {
    let text = to_json(&rich());
    assert!(text.contains(from), "{from} is not in the file");
    let error = from_json(text.replacen(from, to, 1).as_bytes()).expect_err("accepted").to_string();
    assert!(words.iter().all(|w| error.contains(w)), "{words:?} not in: {error}");
}

#[test]
fn errors_in_a_task_graph_name_the_place() {
    refused("mpk-task-graph/1", "mpk-task-graph/2", &["schema", "mpk-task-graph/2"]);
    refused("\"rank\":1", "\"rank\":3", &["rank 3 of 3"]);
    refused("\"rank\":1", "\"rank\":-1", &["line 4"]);
    refused("\"workers\":2", "\"workers\":2,\"colour\":1", &["colour", "line"]);
    refused(
        "\"base_ptr\":\"l0.partial\"",
        "\"base_ptr\":\"nothing\"",
        &["all_tasks[2].outputs[0].base_ptr", "'nothing'"],
    );
    refused("\"data_type\":\"bf16\"", "\"data_type\":\"f16\"", &["all_tasks[2].inputs[1].data_type", "bf16"]);
    refused(
        "\"task_type\":\"linear\",\"variant_id\"",
        "\"task_type\":\"cook\",\"variant_id\"",
        &["all_tasks[2].task_type", "'cook'"],
    );
    refused(
        "\"dependent_event\":4294967297",
        "\"dependent_event\":4294999999",
        &["all_tasks[2].dependent_event", "not an event of rank 1"],
    );
    refused("\"dependent_event\":4294967297", "\"dependent_event\":1", &["not an event of rank 1"]);
    refused(",\"dependent_event\":null", "", &["dependent_event", "line"]);
    refused("\"event_type\":\"empty\"", "\"event_type\":\"full\"", &["full", "line"]);
    refused("\"first_tasks\":[1]", "\"first_tasks\":[2]", &["first_tasks"]);
    refused("\"operand_id\":", "\"operand_id\":9", &["].operand_id", "belongs to another task"]);
    refused("\"range\":[2,6]", "\"range\":null", &["tensors[1].parts[1]"]);
    refused("\"name\":\"w\"", "\"name\":\"x\"", &["tensors[1].name", "twice"]);
    assert!(matches!(from_json(&b"{"[..]), Err(GraphFileError::Json(_))));
    assert!(matches!(from_json(&b""[..]), Err(GraphFileError::Json(_))));
}

/// In addition to the view of the whole tensor, a file names the part that the task's region stands for. Another part
/// is refused.
#[test]
fn the_part_beside_a_view_is_that_of_the_region() {
    let mut graph = chain(1, 1, 1, 1, Lowering::Copy).remove(0);
    let whole = |graph: &TaskGraph, at: usize| {
        let operand = &graph.operands[at];
        let tensor = &graph.tensors[operand.tensor as usize];
        operand.region == Region::whole(&tensor.dims) && tensor.dims[0] > 1 && !tensor.tiled
    };
    let task = (2..graph.tasks.len())
        .find(|&t| graph.tasks[t].num_inputs > 0 && whole(&graph, graph.tasks[t].first_operand as usize))
        .expect("a task that reads a whole tensor");
    let operand = &mut graph.operands[graph.tasks[task].first_operand as usize];
    operand.region.hi[0] = 1;
    operand.trust = Some(Trust::RowsOfSlot { slot: 0, of: operand.dims[0], in_tiles: false });
    let good: serde_json::Value = serde_json::from_str(&to_json(&graph)).unwrap();
    let read = |value: &serde_json::Value| from_json(value.to_string().as_bytes());
    assert_eq!(read(&good).expect("as it was written"), graph);
    for (field, wrong) in [("offset", 1_000_000_000.into()), ("dims", serde_json::json!([1000, 1000]))] {
        let mut bad = good.clone();
        let input = &mut bad["all_tasks"][task]["inputs"][0];
        assert!(input["view"].is_object(), "{input}");
        input[field] = wrong;
        let error = read(&bad).expect_err("accepted").to_string();
        assert!(error.contains("view") && error.contains("region"), "{error}");
    }
}

const OP_GRAPH: &str = r#"{
  "rows": 4, "samples": 2,
  "tensors": [
    {"name": "x", "dtype": "f32", "dims": [4, 8], "kind": "input", "data": {"values": [VALUES]}},
    {"name": "w", "dtype": "bf16", "dims": [16, 8], "kind": "weight", "shard": {"dim": 0, "kind": "even", "unit": 2},
     "data": {"random": {"seed": 7}}},
    {"name": "qkv", "dtype": "bf16", "dims": [32, 8], "kind": "weight",
     "shard": {"dim": 0, "parts": [
       {"len": 16, "split": {"kind": "queries", "heads": 4, "head_dim": 4}},
       {"len": 16, "split": {"kind": "key_values", "heads": 8, "kv_heads": 4, "head_dim": 4}}]},
     "data": {"file": "a.safetensors", "tensor": "t"}},
    {"name": "p", "dtype": "f32", "dims": [4, 16], "kind": "input", "shard": "partial"},
    {"name": "kv", "dtype": "f32", "dims": [9], "kind": "persistent", "region_dims": [3, 3]},
    {"name": "table", "dtype": "f32", "dims": [5, 2], "kind": "constant"}
  ],
  "ops": [
    {"op": "linear", "inputs": ["x", "w"], "outputs": ["y"], "attrs": {"scale": 0.5}},
    {"op": "add", "name": "sum", "inputs": ["y", "p"], "outputs": ["z"]}
  ],
  "outputs": ["z"]
}"#;

fn op_graph_text() -> String {
    OP_GRAPH.replace("VALUES", &vec!["0.5"; 32].join(","))
}

#[test]
fn an_op_graph_from_json() {
    let (graph, sources) = op_graph_from_str(&op_graph_text()).unwrap();
    assert_eq!((graph.capacity.rows, graph.capacity.samples, graph.capacity.active), (4, 2, 1));
    assert_eq!(graph.tensors.len(), 8);
    assert_eq!(graph.tensors[0].rows, Rows::Tokens);
    assert_eq!(graph.tensors[1].sharding, Sharding::split(0, 16, Split::Even { unit: 2 }));
    assert_eq!(graph.tensors[1].rows, Rows::Fixed);
    assert_eq!(graph.tensors[2].sharding.local_dims(&graph.tensors[2].dims, 1, 4), [8, 8]);
    assert_eq!(graph.tensors[3].sharding, Sharding::Partial);
    assert_eq!(graph.tensors[4].role, Role::Persistent { region_dims: Some(vec![3, 3]) });
    assert_eq!((graph.ops[0].name.as_str(), graph.ops[1].name.as_str()), ("y", "sum"));
    assert_eq!(graph.ops[1].inputs, [6, 3]);
    assert_eq!(graph.ops[0].attrs["scale"], 0.5);
    assert!(graph.tensors[7].output && !graph.tensors[6].output);
    assert!(matches!(graph.tensors[7].role, Role::Activation) && graph.tensors[7].dims.is_empty());
    assert_eq!(sources["x"], DataSource::Values { values: vec![0.5; 32] });
    assert_eq!(sources["qkv"], DataSource::File { file: "a.safetensors".into(), tensor: "t".into() });
    assert!(matches!(sources["w"], DataSource::Random { random } if random.seed == 7));

    let value = op_graph_to_value(&graph, &sources).unwrap();
    assert_eq!(op_graph_from_value(&value, "graph").unwrap(), (graph, sources));
}

#[test]
fn errors_in_an_op_graph_name_the_place() {
    for (from, to, words) in [
        (r#""rows": 4"#, r#""rows": 0"#, &["graph.rows"][..]),
        (r#""rows": 4, "#, "", &["graph", "missing field `rows`"]),
        (r#""samples": 2"#, r#""samples": 5"#, &["graph.samples"]),
        (r#""samples": 2"#, r#""sample": 2"#, &["unknown field `sample`"]),
        (r#""samples": 2"#, r#""active": 0"#, &["graph.active: must be at least 1"]),
        (r#""samples": 2"#, r#""active": 1000000"#, &["graph.active: 1000000 is more than `rows` (4)"]),
        (r#""dtype": "f32""#, r#""dtype": "f33""#, &["graph.tensors[0]", "f33"]),
        (r#""dims": [16, 8]"#, r#""dims": [16, 8, 1, 1, 1]"#, &["graph.tensors[1].dims"]),
        (r#""dims": [16, 8]"#, r#""dims": [0, 8]"#, &["graph.tensors[1].dims", "0 is not between"]),
        (r#""dims": [16, 8]"#, r#""dims": [4294967295, 4294967295]"#, &["graph.tensors[1].dims", "62 bits"]),
        (r#""dims": [16, 8]"#, r#""dims": [16, -8]"#, &["graph.tensors[1]"]),
        (
            r#""dim": 0, "kind": "even""#,
            r#""dim": 7, "kind": "even""#,
            &["graph.tensors[1].shard.dim", "no dimension 7"],
        ),
        (r#""kind": "even""#, r#""kind": "odd""#, &["graph.tensors[1].shard", "odd"]),
        (r#""heads": 4, "head_dim": 4"#, r#""heads": 4, "head_dim": 5"#, &["graph.tensors[2].shard"]),
        (r#""kv_heads": 4"#, r#""kv_heads": 0"#, &["graph.tensors[2].shard"]),
        (r#""shard": "partial""#, r#""shard": "whole""#, &["graph.tensors[3].shard", "replicated"]),
        (r#""seed": 7"#, r#""sead": 7"#, &["graph.tensors[1].data.random", "sead"]),
        (r#""tensor": "t""#, r#""tenser": "t""#, &["graph.tensors[2].data"]),
        ("0.5,", "", &["graph.tensors[0].data.values", "31 values"]),
        (r#""name": "w""#, r#""name": "x""#, &["graph.tensors[1].name", "twice"]),
        (
            r#""name": "w""#,
            r#""name": "w\u001b[2J""#,
            &["graph.tensors[1].name: contains \\u{1b}, a control"],
        ),
        (r#""name": "sum""#, r#""name": "s\u0000m""#, &["graph.ops[1].name: contains \\u{0}"]),
        (r#"["x", "w"]"#, r#"["x", "\u202ew"]"#, &["graph.ops[0].inputs[1]: contains \\u{202e}"]),
        (r#"["y"]"#, r#"["y\n"]"#, &["graph.ops[0].outputs[0]: contains \\u{a}"]),
        (r#""op": "add""#, r#""op": "add\u001b""#, &["graph.ops[1].op: contains \\u{1b}"]),
        (r#""op": "add""#, r#""op": "add", "co\u001blour": 1"#, &["unknown field `co\\u{1b}lour`"]),
        (
            r#""kind": "input", "shard": "partial""#,
            r#""kind": "activation", "shard": "partial""#,
            &["graph.tensors[3].shard", "remove `shard`"],
        ),
        (r#"["x", "w"]"#, r#"["x", "v"]"#, &["graph.ops[0].inputs[1]", "'v'"]),
        (r#"["y", "p"]"#, r#"["z", "p"]"#, &["graph.ops[1].inputs[0]", "'z'"]),
        (r#""outputs": ["z"]}"#, r#""outputs": ["y"]}"#, &["graph.ops[1].outputs[0]", "another operator"]),
        (r#""outputs": ["z"]}"#, r#""outputs": ["w"]}"#, &["graph.ops[1].outputs[0]", "cannot be written"]),
        ("\"outputs\": [\"z\"]\n}", "\"outputs\": [\"q\"]\n}", &["graph.outputs[0]", "'q'"]),
        (r#""op": "add", "name""#, r#""op": "add", "colour": 1, "name""#, &["graph.ops[1]", "colour"]),
    ] {
        let text = op_graph_text();
        assert!(text.contains(from), "{from}");
        let error = op_graph_from_str(&text.replacen(from, to, 1)).expect_err(to).to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?} not in: {error}");
    }
    assert!(op_graph_from_str("[]").unwrap_err().to_string().contains("object"));
    assert!(op_graph_from_str("{\n \"rows\": }").unwrap_err().to_string().contains("line 2"));
}

/// serde_json's own values would keep the last one.
#[test]
fn a_key_that_an_object_has_twice_is_refused() {
    for (from, to, words) in [
        (r#""rows": 4"#, r#""rows": 4, "rows": 5"#, "graph: duplicate field `rows` at line 2"),
        (
            r#""dims": [16, 8]"#,
            r#""dims": [16, 8], "dims": [16, 8]"#,
            "graph.tensors[1]: duplicate field `dims`",
        ),
        (r#""seed": 7"#, r#""seed": 7, "seed": 8"#, "graph.tensors[1].data.random: duplicate field `seed`"),
        (r#""scale": 0.5"#, r#""scale": 0.5, "scale": 1"#, "graph.ops[0].attrs: duplicate field `scale`"),
    ] {
        let text = op_graph_text();
        assert!(text.contains(from), "{from}");
        let error = op_graph_from_str(&text.replacen(from, to, 1)).expect_err(to).to_string();
        assert!(error.starts_with(words), "{error}");
    }
}

/// A name of any length would fill the terminal.
#[test]
fn long_names_are_refused() {
    let named = |length: usize| {
        op_graph_from_str(&op_graph_text().replace("\"p\"", &format!("\"{}\"", "p".repeat(length))))
    };
    named(256).unwrap();
    let error = named(100_000).unwrap_err().to_string();
    assert_eq!(error, "graph.tensors[3].name: has 100000 bytes; use a name of at most 256");
}

/// The schemas in the repository match the types. `UPDATE_SCHEMAS=1 cargo test -p mpk-taskgraph --test json`
/// rewrites them.
#[test]
fn the_published_schemas_are_current() {
    for (name, schema) in
        [("task_graph.schema.json", task_graph_schema()), ("op_graph.schema.json", op_graph_schema())]
    {
        let path = format!("{}/schema/{name}", env!("CARGO_MANIFEST_DIR"));
        let wanted = serde_json::to_string_pretty(&schema).unwrap() + "\n";
        if std::env::var_os("UPDATE_SCHEMAS").is_some() {
            std::fs::write(&path, &wanted).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(found == wanted, "{name} is out of date: run this test with UPDATE_SCHEMAS=1");
    }
}

/// With Python's jsonschema, if it is installed.
#[test]
fn written_files_validate_against_the_schemas() {
    let check = r#"
import json, sys
import jsonschema
schema = json.load(open(sys.argv[1]))
validator = jsonschema.validators.validator_for(schema)
validator.check_schema(schema)
good, bad = json.load(sys.stdin)
for value in good:
    validator(schema).validate(value)
for value in bad:
    assert not validator(schema).is_valid(value), value
"#;
    let has = Command::new("python3").args(["-c", "import jsonschema"]).stderr(Stdio::null()).status();
    if !has.is_ok_and(|s| s.success()) {
        eprintln!("skipped: python3 has no jsonschema");
        return;
    }
    let value = |text: &str| -> serde_json::Value { serde_json::from_str(text).unwrap() };
    let graph = value(&to_json(&rich()));
    let mut without = graph.clone();
    without["all_tasks"][2].as_object_mut().unwrap().remove("dependent_event");
    let mut wrong_type = graph.clone();
    wrong_type["all_tasks"][2]["trigger_event"] = "1".into();
    let flagged = value(&to_json(&chain(2, 1, 1, 2, Lowering::Flagged)[0]));
    let op_graph = value(&op_graph_text());
    let (parsed, sources) = op_graph_from_str(&op_graph_text()).unwrap();
    let written = op_graph_to_value(&parsed, &sources).unwrap();
    let mut unknown = op_graph.clone();
    unknown["tensors"][0]["colour"] = 1.into();
    for (name, cases) in [
        ("task_graph.schema.json", serde_json::json!([[graph, flagged], [without, wrong_type]])),
        ("op_graph.schema.json", serde_json::json!([[op_graph, written], [unknown]])),
    ] {
        let path = format!("{}/schema/{name}", env!("CARGO_MANIFEST_DIR"));
        let mut python = Command::new("python3")
            .args(["-c", check, &path])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        serde_json::to_writer(python.stdin.take().unwrap(), &cases).unwrap();
        let output = python.wait_with_output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn round_trip(world in 1u32..5, workers in 1u32..4, tiles in 1u32..4, layers in 1u32..3, flagged: bool,
                  numbers in proptest::collection::vec(any::<u32>(), 8), name in ".*") {
        let lowering = if flagged { Lowering::Flagged } else { Lowering::Copy };
        let mut graph = chain(world, workers, tiles, layers, lowering).pop().unwrap();
        graph.name = name.clone();
        graph.ops[0] = name;
        let task = numbers[0] as usize % graph.tasks.len();
        graph.tasks[task].args[numbers[1] as usize % 8] = numbers[2] as i32;
        graph.tasks[task].op = numbers[3];
        graph.tasks[task].worker = Some(numbers[4]);
        let operand = numbers[5] as usize % graph.operands.len();
        graph.operands[operand].offset = u64::from(numbers[6]) << 20;
        graph.operands[operand].region.hi[numbers[7] as usize % 4] = numbers[6];
        let back = from_json(to_json(&graph).as_bytes()).unwrap();
        prop_assert_eq!(digest(&back), digest(&graph));
        prop_assert_eq!(back, graph);
    }

    #[test]
    fn damaged_files_are_refused_without_panic(at: usize, bytes in proptest::collection::vec(any::<u8>(), 1..6),
                                               cut: Option<usize>) {
        let mut text = to_json(&chain(2, 1, 1, 1, Lowering::Copy)[0]).into_bytes();
        let at = at % text.len();
        let end = (at + bytes.len()).min(text.len());
        text[at..end].copy_from_slice(&bytes[..end - at]);
        if let Some(cut) = cut {
            text.truncate(cut % text.len());
        }
        if let Ok(graph) = from_json(text.as_slice()) {
            // An accepted graph can be verified without panic, alone and with itself as peer.
            let _ = taskgraph::verify::verify(std::slice::from_ref(&graph));
            let _ = taskgraph::verify::verify(&[graph.clone(), graph]);
        }
    }

    /// Hostile numbers anywhere in a file: the verifier gives an answer for every input.
    #[test]
    fn hostile_numbers_do_not_panic(seed: u64, changes in 1usize..4) {
        let graphs = chain(2, 1, 1, 1, Lowering::Copy);
        let hostile = [0u64, 1, 2, 3, 7, 255, 65_535, 4_294_967_295, 4_294_967_296, u64::MAX - 1, u64::MAX, 1 << 48];
        let mut state = seed;
        let mut next = || { state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407); (state >> 33) as usize };
        let mut broken = Vec::new();
        for graph in &graphs {
            let text = to_json(graph);
            let mut pieces: Vec<String> = Vec::new();
            let mut digits = false;
            for c in text.chars() {
                if c.is_ascii_digit() != digits || pieces.is_empty() {
                    pieces.push(String::new());
                    digits = c.is_ascii_digit();
                }
                pieces.last_mut().unwrap().push(c);
            }
            let numbers: Vec<usize> = (0..pieces.len()).filter(|&i| pieces[i].starts_with(|c: char| c.is_ascii_digit())).collect();
            for _ in 0..changes {
                let at = numbers[next() % numbers.len()];
                pieces[at] = hostile[next() % hostile.len()].to_string();
            }
            match from_json(pieces.concat().as_bytes()) {
                Ok(graph) => broken.push(graph),
                Err(_) => broken.push(graph.clone()),
            }
        }
        let _ = taskgraph::verify::verify(&broken);
        let _ = taskgraph::verify::verify_succession(&[graphs, broken]);
    }

    #[test]
    fn hostile_op_graphs_do_not_panic(at: usize, bytes in proptest::collection::vec(any::<u8>(), 1..6)) {
        let mut text = op_graph_text().into_bytes();
        let at = at % text.len();
        let end = (at + bytes.len()).min(text.len());
        text[at..end].copy_from_slice(&bytes[..end - at]);
        if let Ok(text) = String::from_utf8(text) {
            let _ = op_graph_from_str(&text);
        }
    }
}

#[test]
fn digests_see_every_field() {
    let graph = rich();
    let base = digest(&graph);
    assert_eq!(base, digest(&graph.clone()));
    let changes: [fn(&mut TaskGraph); 14] = [
        |g| g.name.push('x'),
        |g| g.rank += 1,
        |g| g.capacity.active += 1,
        |g| g.ops[1].push('x'),
        |g| g.tensors[0].dtype = DType::Bf16,
        |g| g.tensors[0].space = Space::Symmetric,
        |g| g.tensors[1].parts[1].range = Some((0, 2..7)),
        |g| g.variants[3].params[0] += 1,
        |g| g.operands[4].region.lo[1] += 1,
        |g| g.tasks[4].trigger = None,
        |g| g.tasks[4].worker = None,
        |g| g.tasks[4].args[7] -= 1,
        |g| g.events[3].num_triggers += 1,
        |g| g.worker_lists[0].swap(0, 1),
    ];
    for (i, change) in changes.iter().enumerate() {
        let mut changed = graph.clone();
        change(&mut changed);
        assert_ne!(digest(&changed), base, "change {i}");
    }
}
