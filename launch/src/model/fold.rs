//! Constant folding for op graphs with given values: operators whose inputs are constants are computed once, by the CPU
//! kernels.

use kernels_cu::testing::{TestBatch, TestOp, TestTensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use taskgraph::op_graph::{Op, Role, Tensor};
use taskgraph::passes::{Compose, Context, Evaluate, FoldConstants, Infer, Pass};
use taskgraph::task_type::OpError;
use taskgraph::{BuildError, BuildOptions, DType, OpGraph, Registry, Rows};

/// Global values by tensor name; a weight is listed by the names of its parts.
pub type Values = HashMap<String, Vec<f32>>;

/// Replaces operators of constants by their results, and adds the results to `values`.
///
/// # Errors
/// The graph or the values of an operator are invalid.
pub fn fold(
    graph: &OpGraph,
    values: &mut Values,
    registry: &Registry,
    options: &BuildOptions,
) -> Result<OpGraph, BuildError> {
    let kernels = Arc::new(Kernels { values: Mutex::new(std::mem::take(values)) });
    let context = Context { registry, options };
    let mut folded = graph.clone();
    let run = |folded: &mut OpGraph| {
        Infer.run(folded, &context)?;
        Compose.run(folded, &context)?;
        FoldConstants(kernels.clone()).run(folded, &context)
    };
    let result = run(&mut folded);
    *values = std::mem::take(&mut *kernels.values.lock().unwrap_or_else(PoisonError::into_inner));
    result?;
    Ok(folded)
}

#[derive(Debug)]
struct Kernels {
    values: Mutex<Values>,
}

/// The complete values of a given tensor.
pub(crate) fn whole(values: &Values, tensor: &Tensor) -> Option<Vec<f32>> {
    match &tensor.role {
        Role::Weight { parts } => {
            let parts: Option<Vec<&Vec<f32>>> = parts.iter().map(|p| values.get(&p.source)).collect();
            Some(parts?.into_iter().flatten().copied().collect())
        }
        _ => values.get(&tensor.name).cloned(),
    }
}

impl Evaluate for Kernels {
    fn evaluate(&self, graph: &OpGraph, op: &Op) -> Result<bool, OpError> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let float = |tensor: &Tensor| matches!(tensor.dtype, DType::F32 | DType::F16 | DType::Bf16);
        let mut inputs = Vec::new();
        for &input in &op.inputs {
            let tensor = &graph.tensors[input as usize];
            let dims: Vec<u32> = tensor.dims.iter().map(|&d| d as u32).collect();
            match whole(&values, tensor).filter(|_| float(tensor) && tensor.rows == Rows::Fixed) {
                Some(given) => {
                    inputs.push(TestTensor::new(tensor.dtype, &dims, &given).with_rows(Rows::Fixed))
                }
                None => return Ok(false),
            }
        }
        let rows = graph.capacity.rows;
        let run = TestOp::new(&op.op_type, op.attrs.clone().into(), rows);
        let outputs = run.run(&mut inputs, &mut TestBatch::rows(rows))?;
        for (&output, result) in op.outputs.iter().zip(outputs) {
            values.insert(graph.tensors[output as usize].name.clone(), result.values());
        }
        Ok(true)
    }
}
