//! The shape of a user's op graph in JSON.

use crate::dtype::DType;
use crate::op_graph::{Attrs, Rows, WeightPart};
use crate::split::{Part, Split};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Data sources by tensor name.
pub type DataSources = BTreeMap<String, DataSource>;

/// An op graph of the user's own: the `"graph"` of model.json.
///
/// ```json
/// {"rows": 2,
///  "tensors": [
///    {"name": "x", "dtype": "f32", "dims": [2, 8], "kind": "input", "data": {"random": {"seed": 1}}},
///    {"name": "w", "dtype": "bf16", "dims": [16, 8], "kind": "weight", "shard": {"dim": 0, "kind": "even"}}],
///  "ops": [{"op": "linear", "inputs": ["x", "w"], "outputs": ["y"]}],
///  "outputs": ["y"]}
/// ```
/// Tensors that an operator writes need not be declared: their types follow from the operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "op graph")]
pub struct OpGraphFile {
    /// Shown in messages and timelines; `graph` by default.
    #[serde(default = "default_name")]
    pub name: String,
    /// Token rows of one iteration, all in use.
    pub rows: u32,
    /// Rows that yield a token, the last ones; all by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<u32>,
    /// Sequence slots that take part; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<u32>,
    /// Inputs, weights, constants and tensors that live across iterations.
    #[serde(default)]
    pub tensors: Vec<OpGraphTensor>,
    /// Operators, each after those that write what it reads.
    pub ops: Vec<OpGraphOp>,
    /// Tensors whose values are wanted at the end.
    #[serde(default)]
    pub outputs: Vec<String>,
}

fn default_name() -> String {
    "graph".into()
}

/// What a tensor of an op graph is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    /// Given from outside before each iteration.
    Input,
    /// Constant, possibly packed for the kernels; its values come from `data`.
    Weight,
    /// Constant, used as it is.
    Constant,
    /// Lives across iterations.
    Persistent,
    /// Written by an operator; declared only to fix its type.
    Activation,
}

/// A tensor of an op graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OpGraphTensor {
    /// Unique in the graph.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Global dimensions, at most 4.
    pub dims: Vec<u64>,
    /// What it is for.
    pub kind: TensorKind,
    /// What the first dimension counts; `tokens` for inputs and activations, `fixed` for others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<Rows>,
    /// How it is spread over the ranks; replicated by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Shard>")]
    pub shard: Option<serde_json::Value>,
    /// Where its values come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<DataSource>")]
    pub data: Option<serde_json::Value>,
    /// Of a persistent tensor: index space of the regions that tasks name, where it is not `dims`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region_dims: Option<Vec<u64>>,
    /// Of a weight: the pieces it is made of along dimension 0, each a tensor of the checkpoint; by default
    /// one, of its own name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<Vec<WeightPart>>,
}

/// How a tensor is spread over the ranks.
#[derive(JsonSchema, Serialize)]
#[serde(untagged)]
#[allow(dead_code)]
pub(super) enum Shard {
    /// Without split.
    Named(NamedShard),
    /// One dimension is dealt to the ranks by one rule.
    Split(SplitShard),
    /// One dimension is the concatenation of parts with a rule each.
    Parts(PartsShard),
}

#[derive(JsonSchema, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code)]
pub(super) enum NamedShard {
    /// Every rank holds all of it.
    Replicated,
    /// Every rank holds a summand.
    Partial,
}

#[derive(JsonSchema, Serialize)]
pub(super) struct SplitShard {
    /// The dimension.
    pub(super) dim: usize,
    #[serde(flatten)]
    pub(super) split: Split,
}

#[derive(JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartsShard {
    /// The dimension.
    pub(super) dim: usize,
    /// What it is made of, in order.
    pub(super) parts: Vec<Part>,
}

/// Where the values of a tensor come from.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum DataSource {
    /// Given here.
    Values {
        /// All elements of the global tensor, the last dimension fastest.
        values: Vec<f64>,
    },
    /// A function of seed, tensor name and global index.
    Random {
        /// The seed.
        random: RandomData,
    },
    /// A tensor of a file.
    File {
        /// A safetensors file, relative to model.json.
        file: String,
        /// Name of the tensor there.
        tensor: String,
    },
}

/// Seed of random values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RandomData {
    /// Any number.
    pub seed: u64,
}

/// An operator of an op graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OpGraphOp {
    /// Operator, e.g. `linear`.
    pub op: String,
    /// Unique in the graph; by default its first output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Tensors read, in the order that the operator's contract gives.
    pub inputs: Vec<String>,
    /// Tensors written.
    pub outputs: Vec<String>,
    /// Constants of the operator.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub attrs: Attrs,
}

/// JSON schema of an op graph.
pub fn op_graph_schema() -> schemars::Schema {
    schemars::schema_for!(OpGraphFile)
}
