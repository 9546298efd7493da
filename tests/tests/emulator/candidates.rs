//! Records of the best tokens of more samples than a task has warps. Then each warp takes one sample after the other and copies columns
//! ahead, past ends of rows.

use super::{Emulator, on_cpu, toolkit, values};
use mpk_tests::ModelFile;
use mpk_tests::run_json::Output;
use serde_json::{Value, json};
use std::path::Path;

/// More than 32 for each of a task's 8 warps.
const SAMPLES: usize = 265;
/// Number of words of a record before its pairs, and the index of the word that is the sum of exponentials.
const HEAD: usize = 4;
const SUM: usize = 3;

/// Rows of logits: random ones, and those whose maximum, sum or order is special.
fn logits(columns: usize, seed: u64) -> Vec<f32> {
    let mut all: Vec<f32> = values(SAMPLES * columns, seed).iter().map(|v| 12.0 * *v as f32).collect();
    for (sample, row) in all.chunks_mut(columns).enumerate() {
        match sample % 11 {
            0 => row.fill(f32::NEG_INFINITY),
            1 => row.fill(f32::NAN),
            2 => row.iter_mut().step_by(3).for_each(|v| *v = f32::NAN),
            3 => row.iter_mut().skip(sample % 7).step_by(2).for_each(|v| *v = f32::NEG_INFINITY),
            4 => [1, columns / 4, columns - 1].iter().for_each(|&at| row[at] = f32::INFINITY),
            5 => (row[0], row[columns / 2 + 3]) = (f32::INFINITY, f32::NAN),
            6 => row.sort_by(f32::total_cmp),
            7 => row.sort_by(|a, b| b.total_cmp(a)),
            8 => row.iter_mut().for_each(|v| *v = (*v / 4.0).round() + 0.0), // many are equal, none is -0
            _ => {}
        }
    }
    all
}

fn write_safetensors(path: &Path, tensors: &[(&str, usize, &[f32])]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, columns, values) in tensors {
        let begin = data.len();
        data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        let entry = json!({"dtype": "F32", "shape": [SAMPLES, columns], "data_offsets": [begin, data.len()]});
        header.insert((*name).to_string(), entry);
    }
    let header = Value::Object(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data[..]].concat();
    std::fs::write(path, bytes).expect("a file");
}

/// The records are those of the CPU, bit by bit, but for the sum, whose terms are added in another order.
fn compare(found: &Output, cpu: &Output, what: &str) {
    assert_eq!(found.dims, cpu.dims);
    let words = *cpu.dims.last().expect("dimensions") as usize;
    for (at, (found, cpu)) in found.values.chunks(words).zip(cpu.values.chunks(words)).enumerate() {
        let others = |record: &[f64]| [&record[..SUM], &record[HEAD..]].concat();
        assert_eq!(others(found), others(cpu), "{what}: tile {}, sample {}", at / SAMPLES, at % SAMPLES);
        let sum = |record: &[f64]| f64::from(f32::from_bits(record[SUM] as u32));
        let (found, cpu) = (sum(found), sum(cpu));
        assert!((found - cpu).abs() <= 1e-6 * cpu, "{what}: sample {}: {found} {cpu}", at % SAMPLES);
    }
}

/// Rows whose addresses are multiples of 16, and others; tiles of several blocks, of one and of none; one candidate and lists. As many
/// candidates as a warp has lanes are among about 130 pairs, for which there may be too little room.
#[test]
fn the_best_tokens_of_many_samples_are_those_of_the_cpu() {
    let Some(emulator) = Emulator::quick() else { return };
    let shapes = [("even", 1200, 1), ("odd", 1203, 2), ("small", 20, 3)];
    let tensors = shapes.map(|(name, columns, _)| {
        json!({"name": name, "kind": "input", "dtype": "f32", "dims": [SAMPLES, columns],
               "data": {"file": "logits.safetensors", "tensor": name}})
    });
    let op = |input: &str, output: &str, attrs: Value| json!({"op": "argmax_partial", "inputs": [input], "outputs": [output], "attrs": attrs});
    let ops = [
        op("even", "best", json!({"tiles": 2})),
        op("odd", "list", json!({"tiles": 2, "vocab_size": 1190, "top_k": 5, "sampled": true})),
        op("even", "long_list", json!({"tiles": 1, "top_k": 32})),
        op("small", "few_columns", json!({"tiles": 3})),
    ];
    let outputs = ["best", "list", "long_list", "few_columns"];
    let graph =
        json!({"rows": SAMPLES, "samples": SAMPLES, "tensors": tensors, "ops": ops, "outputs": outputs});
    let model = ModelFile::new(json!({"schema": "mpk-model/1", "graph": graph}));
    let rows = shapes.map(|(_, columns, seed)| logits(columns, seed));
    let given: Vec<_> =
        shapes.iter().zip(&rows).map(|((name, columns, _), rows)| (*name, *columns, &rows[..])).collect();
    write_safetensors(&model.folder().join("logits.safetensors"), &given);
    let cpu = on_cpu(&model, &[]);
    let found = emulator.run(&model, &[], &toolkit());
    for output in outputs {
        compare(&found.outputs[output], &cpu.outputs[output], output);
    }
}
