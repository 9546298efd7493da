//! The format of a user's op graph in JSON.

use crate::dtype::DType;
use crate::op_graph::{Attrs, Rows, WeightPart};
use crate::split::{Part, Split};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Sources of values by tensor name.
pub type DataSources = BTreeMap<String, DataSource>;

/// An op graph of your own: the `"graph"` of model.json.
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
    /// Name in messages and timelines. Default: `graph`.
    #[serde(default = "default_name")]
    pub name: String,
    /// Number of token rows of one iteration, all in use.
    pub rows: u32,
    /// Number of rows that yield a token: the last ones. Default: all rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<u32>,
    /// Number of sequence slots that take part. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<u32>,
    /// Inputs, weights, constants and persistent tensors.
    #[serde(default)]
    pub tensors: Vec<OpGraphTensor>,
    /// Operators. Each comes after the operators that write what it reads.
    pub ops: Vec<OpGraphOp>,
    /// Tensors whose final values are returned.
    #[serde(default)]
    pub outputs: Vec<String>,
}

fn default_name() -> String {
    "graph".into()
}

/// The purpose of a tensor of an op graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    /// Read by tasks and written by none. The host writes it before a launch, and all iterations of the launch read it.
    Input,
    /// Constant, possibly packed for the kernels. Its values come from `data`.
    Weight,
    /// Constant, used without packing.
    Constant,
    /// Persists across iterations.
    Persistent,
    /// Written by an operator. Declared only to fix its type.
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
    /// Its purpose.
    pub kind: TensorKind,
    /// What the first dimension counts. Default: `tokens` for inputs and activations, `fixed` for others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<Rows>,
    /// How it is split over the ranks. Default: replicated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Shard>")]
    pub shard: Option<serde_json::Value>,
    /// The source of its values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<DataSource>")]
    pub data: Option<serde_json::Value>,
    /// For a persistent tensor: the index space of the regions that tasks declare, if it is not `dims`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region_dims: Option<Vec<u64>>,
    /// For a weight: the parts that it consists of along dimension 0, each a tensor of the checkpoint. Default: one part with the
    /// tensor's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<Vec<WeightPart>>,
}

/// How a tensor is split over the ranks.
#[derive(JsonSchema, Serialize)]
#[serde(untagged)]
#[allow(dead_code)]
pub(super) enum Shard {
    /// No split.
    Named(NamedShard),
    /// One dimension is split over the ranks by one rule.
    Split(SplitShard),
    /// One dimension is the concatenation of parts, each with its own rule.
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
    /// Its parts, in order.
    pub(super) parts: Vec<Part>,
}

/// The source of a tensor's values.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum DataSource {
    /// Values in this file.
    Values {
        /// All elements of the global tensor, row-major (the last dimension varies fastest).
        values: Vec<f64>,
    },
    /// Values computed from a seed, the tensor's name and the global index.
    Random {
        /// The seed.
        random: RandomData,
    },
    /// A tensor of a file.
    File {
        /// A safetensors file, relative to model.json.
        file: String,
        /// Name of the tensor in that file.
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
    /// Unique in the graph. Default: the name of its first output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Tensors that it reads, in the order of the operator's contract.
    pub inputs: Vec<String>,
    /// Tensors that it writes.
    pub outputs: Vec<String>,
    /// Attributes of the operator.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub attrs: Attrs,
}

/// JSON schema of an op graph.
pub fn op_graph_schema() -> schemars::Schema {
    schemars::schema_for!(OpGraphFile)
}
