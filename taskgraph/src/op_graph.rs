//! Operators on named tensors: one graph for all ranks, before sharding.
//!
//! Every tensor is written at most once in an iteration (single assignment); buffers are shared later, by the
//! memory plan, where the order allows it.

use crate::dtype::DType;
use crate::split::{Sharding, Split};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Attributes of an operator by name.
pub type Attrs = serde_json::Map<String, serde_json::Value>;

/// Index of a tensor in its [`OpGraph`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub u32);

/// What the first dimension of an activation counts, and so how many of its rows are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// Token rows of the iteration: the first `mpk_batch.num_rows` are in use.
    #[default]
    Tokens,
    /// Rows that yield a token: the first `mpk_batch.num_samples` are in use.
    Samples,
    /// All of them, always.
    Fixed,
}

/// One piece of a weight: a tensor of the checkpoint, or some of its rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightPart {
    /// Name in the checkpoint.
    pub source: String,
    /// Global dimensions, `[n]` or `[rows, k]`.
    pub dims: Vec<u64>,
}

/// What a tensor is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Role {
    /// Constant; the concatenation of its parts along dimension 0, in order.
    Weight {
        /// In order; with one part, the tensor itself.
        parts: Vec<WeightPart>,
    },
    /// Constant, given by the host (a rope table, say); identified by name.
    Constant,
    /// Given from outside before each iteration.
    Input,
    /// Written by an operator of this graph.
    Activation,
    /// Lives across iterations and graphs, e.g. a key-value cache or the next tokens; identified by name.
    Persistent {
        /// Index space of the regions that tasks name (dependencies and the verifier), where it is not `dims`:
        /// for a key-value cache `[active slots, kv heads, splits]`, after sharding.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        region_dims: Option<Vec<u64>>,
    },
}

/// A tensor of an op graph. Dimensions are global; `sharding` says what of it a rank holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tensor {
    /// Unique in the graph.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Global dimensions; of an activation the first is the row capacity.
    pub dims: Vec<u64>,
    /// What the first dimension counts (activations and inputs).
    #[serde(default)]
    pub rows: Rows,
    /// What it is for.
    pub role: Role,
    /// How it is spread; of activations, filled by the sharding pass.
    pub sharding: Sharding,
    /// The user wants its value at the end.
    #[serde(default)]
    pub output: bool,
}

/// An operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// Unique in the graph; shown in the timeline.
    pub name: String,
    /// Operator name, e.g. `linear`: a registered task type or a collective.
    pub op_type: String,
    /// Tensors read, in the order that the operator's contract gives.
    pub inputs: Vec<u32>,
    /// Tensors written.
    pub outputs: Vec<u32>,
    /// Constants.
    pub attrs: Attrs,
}

/// What one iteration of the graph has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// Token rows.
    pub rows: u32,
    /// Rows that yield a token.
    pub samples: u32,
    /// Slots that take part.
    pub active: u32,
}

/// A graph of operators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpGraph {
    /// Name, e.g. `decode-8`.
    pub name: String,
    /// What one iteration has room for.
    pub capacity: Capacity,
    /// All tensors.
    pub tensors: Vec<Tensor>,
    /// All operators, in an order in which every tensor is written before it is read.
    pub ops: Vec<Op>,
    /// Tensors that may take the memory of another one: (this one, the other). Passes fill it in.
    #[serde(default)]
    pub overwrites: BTreeMap<u32, u32>,
}

impl OpGraph {
    /// An empty graph.
    pub fn new(name: impl Into<String>, capacity: Capacity) -> Self {
        OpGraph {
            name: name.into(),
            capacity,
            tensors: Vec::new(),
            ops: Vec::new(),
            overwrites: BTreeMap::new(),
        }
    }

    /// Adds a tensor as it is.
    pub fn add_tensor(&mut self, tensor: Tensor) -> TensorId {
        self.tensors.push(tensor);
        TensorId(self.tensors.len() as u32 - 1)
    }

    /// Adds a replicated input `[rows, columns...]`.
    pub fn input(&mut self, name: impl Into<String>, dtype: DType, dims: &[u64]) -> TensorId {
        self.add_tensor(Tensor {
            name: name.into(),
            dtype,
            dims: dims.to_vec(),
            rows: Rows::Tokens,
            role: Role::Input,
            sharding: Sharding::Replicated,
            output: false,
        })
    }

    /// Adds a constant that the host gives, the same on every rank; identified by its name.
    pub fn constant(&mut self, name: impl Into<String>, dtype: DType, dims: &[u64]) -> TensorId {
        self.with_role(name, dtype, dims, Role::Constant)
    }

    /// Adds a tensor that lives across iterations and graphs; identified by its name. It keeps its value until an
    /// operator writes it ([`OpGraph::op_into`]).
    pub fn persistent(&mut self, name: impl Into<String>, dtype: DType, dims: &[u64]) -> TensorId {
        self.with_role(name, dtype, dims, Role::Persistent { region_dims: None })
    }

    /// Marks a tensor as wanted: its value can be read at the end of an iteration.
    pub fn output(&mut self, tensor: TensorId) {
        self.tensor_mut(tensor).output = true;
    }

    fn with_role(&mut self, name: impl Into<String>, dtype: DType, dims: &[u64], role: Role) -> TensorId {
        self.add_tensor(Tensor {
            name: name.into(),
            dtype,
            dims: dims.to_vec(),
            rows: Rows::Fixed,
            role,
            sharding: Sharding::Replicated,
            output: false,
        })
    }

    /// Adds a weight that is one tensor of the checkpoint, named `source`; `split` gives the dimension that is
    /// dealt to the ranks and how, `None` replicates it.
    pub fn weight(
        &mut self,
        source: &str,
        dtype: DType,
        dims: &[u64],
        split: Option<(usize, Split)>,
    ) -> TensorId {
        let sharding = split.map_or(Sharding::Replicated, |(dim, s)| Sharding::split(dim, dims[dim], s));
        self.add_tensor(Tensor {
            name: source.to_string(),
            dtype,
            dims: dims.to_vec(),
            rows: Rows::Fixed,
            role: Role::Weight {
                parts: vec![WeightPart { source: source.to_string(), dims: dims.to_vec() }],
            },
            sharding,
            output: false,
        })
    }

    /// Adds an operator with one output, whose type and dimensions the infer pass fills in; returns the output.
    pub fn op(&mut self, name: &str, op_type: &str, inputs: &[TensorId], attrs: Attrs) -> TensorId {
        let output = self.add_tensor(Tensor {
            name: name.to_string(),
            dtype: DType::F32,
            dims: Vec::new(),
            rows: Rows::Tokens,
            role: Role::Activation,
            sharding: Sharding::Replicated,
            output: false,
        });
        self.op_into(name, op_type, inputs, &[output], attrs);
        output
    }

    /// Adds an operator that writes tensors declared before.
    pub fn op_into(
        &mut self,
        name: &str,
        op_type: &str,
        inputs: &[TensorId],
        outputs: &[TensorId],
        attrs: Attrs,
    ) {
        self.ops.push(Op {
            name: name.to_string(),
            op_type: op_type.to_string(),
            inputs: inputs.iter().map(|t| t.0).collect(),
            outputs: outputs.iter().map(|t| t.0).collect(),
            attrs,
        });
    }

    /// The tensor with this id.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0 as usize]
    }

    /// The tensor with this id, to change.
    pub fn tensor_mut(&mut self, id: TensorId) -> &mut Tensor {
        &mut self.tensors[id.0 as usize]
    }
}
