//! Operators on named tensors: one graph for all ranks, before sharding.
//!
//! Every tensor is written at most once per iteration (single assignment). The memory plan later lets tensors share
//! buffers where the order allows it.

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

/// What the first dimension of an activation counts. It determines how many of its rows are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// Token rows of the iteration: the first `mpk_batch.num_rows` are in use.
    #[default]
    Tokens,
    /// Rows that yield a token: the first `mpk_batch.num_samples` are in use.
    Samples,
    /// A fixed number of rows, all always in use.
    Fixed,
}

impl std::fmt::Display for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Rows::Tokens => "tokens",
            Rows::Samples => "samples",
            Rows::Fixed => "fixed",
        })
    }
}

/// One part of a weight: a tensor of the checkpoint, or some of its rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightPart {
    /// Name in the checkpoint.
    pub source: String,
    /// Global dimensions, `[n]` or `[rows, k]`.
    pub dims: Vec<u64>,
}

/// The purpose of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Role {
    /// Constant; the concatenation of its parts along dimension 0, in order.
    Weight {
        /// In order. A single part is the tensor itself.
        parts: Vec<WeightPart>,
    },
    /// Constant that the host provides, such as a rope table. Identified by its name.
    Constant,
    /// Read by tasks and written by none. The host writes it before a launch, and all iterations of the launch read it.
    Input,
    /// Written by an operator of this graph.
    Activation,
    /// Persists across iterations and graphs, such as a key-value cache or the next tokens. Identified by its name.
    Persistent {
        /// Index space of the regions that tasks declare (for dependencies and the verifier), if it is not `dims`. For
        /// a key-value cache it is `[active slots, kv heads, splits]`, after sharding.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        region_dims: Option<Vec<u64>>,
    },
}

/// A tensor of an op graph. Dimensions are global; `sharding` says which part of it a rank holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tensor {
    /// Unique in the graph.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Global dimensions. The first dimension of an activation is the row capacity.
    pub dims: Vec<u64>,
    /// What the first dimension counts (activations and inputs).
    #[serde(default)]
    pub rows: Rows,
    /// The purpose of the tensor.
    pub role: Role,
    /// How it is split over the ranks. The sharding pass sets it for activations.
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
    /// Tensors that it reads, in the order of the operator's contract.
    pub inputs: Vec<u32>,
    /// Tensors that it writes.
    pub outputs: Vec<u32>,
    /// Constants.
    pub attrs: Attrs,
}

/// The capacity of one iteration of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// Token rows.
    pub rows: u32,
    /// Rows that yield a token.
    pub samples: u32,
    /// Slots that can take part.
    pub active: u32,
}

/// A graph of operators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpGraph {
    /// Name, e.g. `decode-8`.
    pub name: String,
    /// The capacity of one iteration.
    pub capacity: Capacity,
    /// All tensors.
    pub tensors: Vec<Tensor>,
    /// All operators, in an order in which every tensor is written before it is read.
    pub ops: Vec<Op>,
    /// Tensors that may reuse the memory of another one: (this one, the other). Set by passes.
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

    /// Adds a constant that the host provides, the same on every rank. Identified by its name.
    pub fn constant(&mut self, name: impl Into<String>, dtype: DType, dims: &[u64]) -> TensorId {
        self.with_role(name, dtype, dims, Role::Constant)
    }

    /// Adds a tensor that persists across iterations and graphs. Identified by its name. It keeps its value until an
    /// operator writes it ([`OpGraph::op_into`]).
    pub fn persistent(&mut self, name: impl Into<String>, dtype: DType, dims: &[u64]) -> TensorId {
        self.with_role(name, dtype, dims, Role::Persistent { region_dims: None })
    }

    /// Marks a tensor as an output: its value can be read at the end of an iteration.
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

    /// Adds a weight that is one tensor of the checkpoint, named `source`. `split` says which dimension is split over
    /// the ranks, and how; `None` replicates the weight.
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

    /// Adds an operator with one output and returns the output. The infer pass sets its type and dimensions.
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

    /// Adds an operator that writes existing tensors.
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

    /// Mutable access to the tensor with this id.
    pub fn tensor_mut(&mut self, id: TensorId) -> &mut Tensor {
        &mut self.tensors[id.0 as usize]
    }
}
