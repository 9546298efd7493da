//! What each fuzz target does with its bytes. The same functions replay the corpus in `launch/tests/fuzz_corpus.rs`.

use launch::engine::user_graph;
use launch::model::model_json::ModelJson;
use launch::model::model_source::ModelSource;
use launch::model::prompts::{self, Limits};
use launch::model::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};

/// Texts that every tokenizer gets.
const TEXTS: [&str; 4] = [
    "",
    "a b",
    "Hello, world! 123 \u{e9}\u{4e2d}\u{6587} \u{1f600}  \t\n x",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa! <|end|> <s> [CLS]",
];

/// The target of this name.
pub fn target(name: &str) -> Option<fn(&[u8])> {
    match name {
        "model_json" => Some(model_json),
        "task_graph_json" => Some(task_graph_json),
        "checkpoint" => Some(checkpoint),
        "tokenizer_json" => Some(tokenizer_json),
        _ => None,
    }
}

/// model.json, up to what is built from it: sizes, requests, the user's own op graph.
pub fn model_json(bytes: &[u8]) {
    let Ok(model) = ModelJson::parse(Path::new("model.json"), bytes) else { return };
    // What lies on this machine's disk is no part of the input.
    if model.checkpoint.is_some() {
        return;
    }
    match ModelSource::open(&model) {
        Ok(ModelSource::Model(source)) => {
            let Ok(sizes) = model.sizes(&source.config) else { return };
            let limits = Limits::new(&sizes, source.config.vocab_size, model.max_new_tokens());
            let _ = prompts::resolve(&prompts::of_model_json(&model), None, &limits);
        }
        Ok(ModelSource::Graph { graph, .. }) => drop(user_graph::parse(&model, &graph)),
        Err(_) => {}
    }
}

/// task_graph.json as `mpk-graph check` takes it: read, verified, described.
pub fn task_graph_json(bytes: &[u8]) {
    let Ok(graph) = taskgraph::json::from_json(bytes) else { return };
    let all = vec![vec![graph]];
    if taskgraph::verify::verify_succession(&all).is_ok() {
        let _ = taskgraph::stats::stats(&all[0]).to_string();
    }
}

/// A checkpoint's folder: config.json, a zero byte, model.safetensors.
pub fn checkpoint(bytes: &[u8]) {
    let (config, weights) = match bytes.iter().position(|&byte| byte == 0) {
        Some(end) => (&bytes[..end], &bytes[end + 1..]),
        None => (bytes, &[][..]),
    };
    let folder = Folder::new();
    folder.write("config.json", config);
    folder.write("model.safetensors", weights);
    let model = serde_json_text(&folder.0);
    let Ok(model) = ModelJson::parse(&folder.0.join("model.json"), model.as_bytes()) else { return };
    let Ok(ModelSource::Model(source)) = ModelSource::open(&model) else { return };
    let Ok(sizes) = model.sizes(&source.config) else { return };
    let _ = prompts::resolve(
        &prompts::of_model_json(&model),
        source.tokenizer.as_ref(),
        &Limits::new(&sizes, 9, 9),
    );
    // Every tensor has been found with its shape, so that it can be read.
    for (name, shape) in launch::model::families::tensors(&source.config).iter().take(20) {
        let Ok(dtype) = source.weights.dtype(name, shape) else { continue };
        let columns =
            shape.iter().skip(1).product::<usize>().max(if shape.len() == 1 { shape[0] } else { 0 });
        let mut row = vec![0; columns * dtype.size()];
        let _ = source.weights.read(name, shape, 0..1, 0..columns, dtype, &mut row);
    }
}

fn serde_json_text(folder: &Path) -> String {
    format!(
        "{{\"schema\":\"mpk-model/1\",\"checkpoint\":{:?},\"generate\":{{\"prompt_tokens\":[[1]]}}}}",
        folder.display().to_string()
    )
}

/// tokenizer.json: loaded, texts encoded, tokens decoded at once and one by one.
pub fn tokenizer_json(bytes: &[u8]) {
    let Ok(tokenizer) = Tokenizer::parse(Path::new("tokenizer.json"), bytes) else { return };
    let mut ids: Vec<u32> = (0..20).chain([1 << 20, u32::MAX]).collect();
    for text in TEXTS {
        ids.extend(tokenizer.encode(text).unwrap_or_default());
    }
    let whole = tokenizer.decode(&ids);
    let mut stream = tokenizer.stream();
    let mut pieces = String::new();
    for &id in &ids {
        match stream.push(id) {
            Ok(piece) => pieces.push_str(&piece),
            Err(_) => return,
        }
    }
    let _ = (whole, stream.finish(), pieces);
}

/// A folder of this process, removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let below = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let folder = below.join(format!("mpk-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the checkpoint");
        Folder(folder)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.join(name), bytes).expect("a file of the checkpoint");
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
