//! Errors of building a graph.

/// An operator's operands or attributes are inconsistent. The pass that finds it adds the operator's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OpError(pub String);

/// Why a graph cannot be built: where the error is, what is wrong, and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// In an operator's operands, attributes, sharding or tasks.
    #[error("operator `{op}`: {message}")]
    Op {
        /// Name of the operator.
        op: String,
        /// What is wrong.
        message: String,
    },
    /// An operator type that is not registered.
    #[error("operator `{op}`: unknown type `{op_type}`; known are {known}")]
    UnknownOp {
        /// Name of the operator.
        op: String,
        /// Its type.
        op_type: String,
        /// Types that are registered.
        known: String,
    },
    /// In a tensor's name, sizes or sharding.
    #[error("tensor `{tensor}`: {message}")]
    Tensor {
        /// Name of the tensor.
        tensor: String,
        /// What is wrong.
        message: String,
    },
    /// In the graph as a whole.
    #[error("{0}")]
    Graph(String),
    /// In the options.
    #[error("build options: {0}")]
    Options(String),
    /// In the list of passes.
    #[error("pass `{pass}`: {message}")]
    Pass {
        /// Name of the pass.
        pass: String,
        /// What is wrong.
        message: String,
    },
}

impl BuildError {
    /// An error of the operator named `op`.
    pub fn op(op: &str, message: impl Into<String>) -> Self {
        BuildError::Op { op: op.to_string(), message: message.into() }
    }
    /// An error of the tensor named `tensor`.
    pub fn tensor(tensor: &str, message: impl Into<String>) -> Self {
        BuildError::Tensor { tensor: tensor.to_string(), message: message.into() }
    }
    /// An error of the pass named `pass`, or of its place in the list.
    pub fn pass(pass: &str, message: impl Into<String>) -> Self {
        BuildError::Pass { pass: pass.to_string(), message: message.into() }
    }
}
