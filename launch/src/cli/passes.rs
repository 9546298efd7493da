//! `mpk-graph passes`: the op graph after each pass, as JSON and as a drawing.

use crate::cli::devices;
use crate::engine::graphs::{ModelGraphs, target_of};
use crate::engine::user_places::Places;
use crate::engine::{ModelSpec, user_graph};
use crate::model::app_error::AppError;
use crate::model::files;
use crate::model::model_json::ModelJson;
use crate::model::model_source::ModelSource;
use std::fmt::Write as _;
use std::path::PathBuf;
use taskgraph::json::{DataSources, op_graph_to_value};
use taskgraph::op_graph::Role;
use taskgraph::words::counted;
use taskgraph::{BuildOptions, OpGraph, Passes, Sharding, Target};

/// What to show.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// A model.json, a Hugging Face folder, or a hub name.
    pub model: PathBuf,
    /// Folder for the files, if they are wanted.
    pub dump: Option<PathBuf>,
    /// Number of ranks.
    pub ranks: u32,
    /// A device of the hardware table. Without one, the CPU target.
    pub device: Option<String>,
    /// Number of workers of the CPU target. Default: `runtime.workers` of model.json, otherwise 1.
    pub workers: Option<u32>,
    /// The graph class. Default: the decode graph of max_batch, or the user graph.
    pub graph: Option<String>,
}

/// Runs the passes on the model's op graph and returns one line per pass. With `dump`, `NN-PASS.json` and `NN-PASS.dot`
/// are written after each pass; `00` is the graph before the first one.
///
/// # Errors
/// The model, the graph or the folder is invalid.
pub fn passes(wanted: &Wanted) -> Result<Vec<String>, AppError> {
    let row = wanted.device.as_deref().map(|name| devices::named("--device", name)).transpose()?;
    let mut model = ModelSpec::path(&wanted.model).open()?;
    if let (None, Some(workers)) = (row, wanted.workers) {
        model.runtime.workers = Some(workers);
    }
    let target = target_of(&model, row, 1)?;
    let (mut graph, places) = op_graph(wanted, &model, &target)?;
    let options = BuildOptions::new(wanted.ranks, target);
    let registry = kernels_cu::registry::registry();
    let passes = Passes::default();
    let mut lines = Vec::new();
    let mut dumped = Ok(Vec::new());
    let mut show = |name: &str, graph: &OpGraph| {
        let number = lines.len();
        let tensors = graph.ops.iter().flat_map(|op| op.inputs.iter().chain(&op.outputs));
        let tensors: std::collections::BTreeSet<&u32> = tensors.collect();
        lines.push(format!(
            "{number:02} {name:<10} {}, {}",
            counted(graph.ops.len(), "operator"),
            counted(tensors.len(), "tensor")
        ));
        if let (Some(_), Ok(files)) = (&wanted.dump, &mut dumped)
            && let Err(error) = dump(files, &format!("{number:02}-{name}"), graph)
        {
            dumped = Err(error);
        }
    };
    show("made", &graph);
    // The files show how far the passes came, also if one of them fails.
    let ran = passes.run_observed(&mut graph, &registry, &options, &mut show);
    if let Some(folder) = &wanted.dump {
        files::write_folder(
            folder,
            &dumped?,
            |(name, _)| name.clone(),
            |(_, text), out| out.write_all(text.as_bytes()),
        )?;
    }
    ran.map_err(|error| match &places {
        Some(places) => places.error(error),
        None => error.into(),
    })?;
    Ok(lines)
}

/// The graph. If it is the user's, also where its parts are in model.json.
fn op_graph(
    wanted: &Wanted,
    model: &ModelJson,
    target: &Target,
) -> Result<(OpGraph, Option<Places>), AppError> {
    let graph = match ModelSource::open(model)? {
        ModelSource::Model(source) => {
            let made = ModelGraphs::new(model, &source, wanted.ranks, target)?;
            let graph = pick(made.graphs, wanted.graph.as_ref().unwrap_or(&made.main))?;
            return Ok((graph, None));
        }
        ModelSource::Graph { graph, .. } => user_graph::parse(model, &graph)?.graph,
    };
    let places = Places::new(model, &graph);
    let name = wanted.graph.clone().unwrap_or_else(|| graph.name.clone());
    Ok((pick(vec![graph], &name)?, Some(places)))
}

/// The graph with this name.
pub(crate) fn pick(graphs: Vec<OpGraph>, name: &str) -> Result<OpGraph, AppError> {
    let names: Vec<String> = graphs.iter().map(|g| g.name.clone()).collect();
    graphs.into_iter().find(|g| g.name == name).ok_or_else(|| {
        AppError::input(format!("--graph {name}: the model has no such graph; it has {}", names.join(", ")))
    })
}

/// Adds the files of one graph, each with its name.
fn dump(files: &mut Vec<(String, String)>, name: &str, graph: &OpGraph) -> Result<(), AppError> {
    let value = op_graph_to_value(graph, &DataSources::new()).map_err(|e| AppError::input(e.to_string()))?;
    let text = serde_json::to_string_pretty(&value).map_err(|e| AppError::input(e.to_string()))?;
    files.push((format!("{name}.json"), text));
    files.push((format!("{name}.dot"), drawing(graph)));
    Ok(())
}

/// The graph in Graphviz's language: `dot -Tsvg FILE.dot` draws it.
pub fn drawing(graph: &OpGraph) -> String {
    let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
    let mut dot = format!("digraph \"{}\" {{\n  node [fontname=\"sans-serif\"];\n", quoted(&graph.name));
    let mut producer = vec![None; graph.tensors.len()];
    for (number, op) in graph.ops.iter().enumerate() {
        op.outputs.iter().for_each(|&t| producer[t as usize] = Some(number));
        let label = format!("{}\\n{}", quoted(&op.name), quoted(&op.op_type));
        let _ = writeln!(
            dot,
            "  op{number} [shape=box, style=filled, fillcolor=\"#dce9f7\", label=\"{label}\"];"
        );
    }
    let describe = |t: u32| {
        let tensor = &graph.tensors[t as usize];
        let dims: Vec<String> = tensor.dims.iter().map(u64::to_string).collect();
        let sharding = match &tensor.sharding {
            Sharding::Replicated => String::new(),
            Sharding::Partial => " partial".to_string(),
            Sharding::Split { dim, .. } => format!(" split {dim}"),
        };
        format!("{} {}{sharding}", tensor.dtype, dims.join("x"))
    };
    for (t, tensor) in graph.tensors.iter().enumerate() {
        let used = graph.ops.iter().any(|op| op.inputs.contains(&(t as u32)));
        if producer[t].is_none() && used || tensor.output {
            let shape = match tensor.role {
                Role::Weight { .. } | Role::Constant => "ellipse",
                _ => "cds",
            };
            let label = format!("{}\\n{}", quoted(&tensor.name), describe(t as u32));
            let _ = writeln!(dot, "  t{t} [shape={shape}, label=\"{label}\"];");
        }
        if let (Some(from), true) = (producer[t], tensor.output) {
            let _ = writeln!(dot, "  op{from} -> t{t};");
        }
    }
    for (number, op) in graph.ops.iter().enumerate() {
        for &t in &op.inputs {
            let _ = match producer[t as usize].filter(|&from| from < number) {
                Some(from) => writeln!(dot, "  op{from} -> op{number} [label=\"{}\"];", describe(t)),
                None => writeln!(dot, "  t{t} -> op{number};"),
            };
        }
    }
    dot.push_str("}\n");
    dot
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_model_is_a_folder_or_a_model_json() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/qwen3");
        let lines = |model: &Path| {
            let graph = Some("decode-1".to_string());
            let wanted =
                Wanted { model: model.into(), dump: None, ranks: 2, device: None, workers: None, graph };
            passes(&wanted).unwrap()
        };
        let found = lines(&folder);
        assert!(found.len() > 3 && found[0].starts_with("00 made"), "{found:?}");
        assert_eq!(found, lines(&folder.join("model.json")));
    }

    #[test]
    fn ranks_that_do_not_divide_the_model_are_refused() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/qwen3");
        let wanted = Wanted { model, dump: None, ranks: 3, device: None, workers: None, graph: None };
        let error = passes(&wanted).unwrap_err();
        assert!(error.message.starts_with("3 ranks do not divide"), "{error}");
        let device = Some("abacus".to_string());
        let error = passes(&Wanted { device, ..wanted }).unwrap_err();
        assert!(error.message.contains("`abacus`") && error.message.contains("h200"), "{error}");
    }
}
