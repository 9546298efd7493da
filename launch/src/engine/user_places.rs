//! Where the parts of a user graph are in model.json, for messages.

use crate::model::app_error::AppError;
use crate::model::model_json::ModelJson;
use std::collections::HashMap;
use taskgraph::{BuildError, OpGraph};

/// The places of a user graph's operators and tensors, by name.
#[derive(Clone, Debug)]
pub struct Places {
    file: String,
    /// Each with the operator's type.
    ops: HashMap<String, (String, String)>,
    tensors: HashMap<String, String>,
}

impl Places {
    /// The places in `graph`, as it was read from `model`: passes change it.
    pub fn new(model: &ModelJson, graph: &OpGraph) -> Places {
        let mut tensors = HashMap::new();
        for (i, tensor) in graph.tensors.iter().enumerate() {
            // The file declares the first ones. The others follow from the outputs of operators, and have no dimensions yet.
            if !tensor.dims.is_empty() {
                tensors.insert(tensor.name.clone(), format!("graph.tensors[{i}]"));
            }
        }
        let mut ops = HashMap::new();
        for (i, op) in graph.ops.iter().enumerate() {
            let place = format!("graph.ops[{i}]");
            for (j, &output) in op.outputs.iter().enumerate() {
                let name = graph.tensors[output as usize].name.clone();
                tensors.entry(name).or_insert_with(|| format!("{place}.outputs[{j}]"));
            }
            ops.insert(op.name.clone(), (place, op.op_type.clone()));
        }
        Places { file: model.file(), ops, tensors }
    }

    /// The error with its place in the file.
    pub fn error(&self, error: BuildError) -> AppError {
        let place = match &error {
            BuildError::Op { op, .. } => self.of_op(op).or_else(|| self.of_tensor(op)),
            // The message has the type.
            BuildError::UnknownOp { op, .. } => self.ops.get(op).map(|(place, _)| format!("`{place}`")),
            BuildError::Tensor { tensor, .. } => self.of_tensor(tensor).or_else(|| self.of_op(tensor)),
            BuildError::Graph(_) => None,
            // Not in the file.
            BuildError::Options(_) | BuildError::Pass { .. } => return error.into(),
        };
        let place = place.unwrap_or_else(|| "`graph`".into());
        AppError::input(format!("{}: {place}: {error}", self.file))
    }

    fn of_op(&self, name: &str) -> Option<String> {
        let (place, op_type) = origins(name).find_map(|name| self.ops.get(name))?;
        Some(format!("`{place}` ({op_type})"))
    }

    fn of_tensor(&self, name: &str) -> Option<String> {
        origins(name).find_map(|name| self.tensors.get(name)).map(|place| format!("`{place}`"))
    }
}

/// `name`, then what it may derive from: passes add a full stop and a suffix to the name of an operator or a tensor.
fn origins(name: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(name), |name| name.rsplit_once('.').map(|(before, _)| before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::user_graph::{Prepared, Wanted, parse};
    use serde_json::{Value, json};
    use std::path::Path;
    use taskgraph::{BuildOptions, Target};

    fn model(graph: &Value) -> ModelJson {
        let text = json!({"schema": "mpk-model/1", "graph": graph}).to_string();
        ModelJson::parse(Path::new("dir/model.json"), text.as_bytes()).unwrap()
    }

    /// A graph of two operators; the second is `last`.
    fn graph(last: &Value) -> Value {
        json!({"rows": 2, "ops": [{"op": "silu_mul", "inputs": ["x"], "outputs": ["h"]}, last], "outputs": ["y"],
               "tensors": [{"name": "x", "dtype": "f32", "dims": [2, 8], "kind": "input", "data": {"random": {"seed": 1}}},
                           {"name": "w", "dtype": "f32", "dims": [3, 5], "kind": "weight", "data": {"random": {"seed": 1}}}]})
    }

    #[test]
    fn errors_of_the_builder_name_the_file_and_the_operator() {
        for (last, words) in [
            (
                json!({"op": "conv", "inputs": ["h"], "outputs": ["y"]}),
                "dir/model.json: `graph.ops[1]`: operator `y`: unknown type `conv`; known are ",
            ),
            (
                json!({"op": "linear", "name": "product", "inputs": ["h", "w"], "outputs": ["y"]}),
                "dir/model.json: `graph.ops[1]` (linear): operator `product`: ",
            ),
        ] {
            let model = model(&graph(&last));
            let options = BuildOptions::new(1, Target::cpu(1));
            let prepared =
                Prepared::new(&model, model.graph.as_ref().unwrap(), None, 0, &options, Wanted::ToBuild);
            let error = prepared.err().unwrap();
            assert_eq!(error.status, 2);
            assert!(error.message.starts_with(words), "{}", error.message);
        }
    }

    #[test]
    fn what_passes_add_is_at_the_place_of_its_origin() {
        let last = json!({"op": "linear", "name": "a.b", "inputs": ["h", "w"], "outputs": ["y"]});
        let model = model(&graph(&last));
        let places = Places::new(&model, &parse(&model, model.graph.as_ref().unwrap()).unwrap().graph);
        let place = |error| places.error(error).message;
        for (error, begin) in [
            (BuildError::op("a.b.merge", "x"), "`graph.ops[1]` (linear): operator `a.b.merge`: x"),
            (BuildError::op("w.slice", "x"), "`graph.tensors[1]`: operator"),
            (BuildError::op("new", "x"), "`graph`: operator `new`: x"),
            (BuildError::tensor("w", "x"), "`graph.tensors[1]`: tensor `w`: x"),
            (BuildError::tensor("h.local.2", "x"), "`graph.ops[0].outputs[0]`: tensor"),
            (BuildError::Graph("x".into()), "`graph`: x"),
        ] {
            let message = place(error);
            assert!(message.starts_with(&format!("dir/model.json: {begin}")), "{message}");
        }
        assert_eq!(place(BuildError::Options("x".into())), "build options: x");
    }
}
