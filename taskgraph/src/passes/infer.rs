//! Validation and inference of types.

use super::pass::{Context, Pass, Property};
use super::roles::check_roles;
use super::view::op_view;
use crate::attribute::check_attributes;
use crate::error::BuildError;
use crate::op_graph::{Op, OpGraph, Role, Tensor};
use crate::region::MAX_DIMS;
use crate::registry::Registry;
use crate::split::{Sharding, Split};
use crate::task_type::{OpError, OpView, TensorType};
use std::collections::HashSet;

/// Checks the graph (names, order, single assignment, attributes, sizes) and sets the types of activations.
///
/// The declared dimensions of an activation must agree with those that its operator infers.
#[derive(Clone, Copy, Debug)]
pub struct Infer;

impl Pass for Infer {
    fn name(&self) -> &'static str {
        "infer"
    }

    fn gives(&self) -> &'static [Property] {
        &[Property::Typed]
    }

    fn keeps(&self) -> &'static [Property] {
        &[Property::Composed, Property::Sharded, Property::Live, Property::Fused]
    }

    fn run(&self, graph: &mut OpGraph, context: &Context<'_>) -> Result<(), BuildError> {
        infer(graph, context.registry)
    }
}

/// Types of the outputs of an operator; `None` if its type is not registered.
pub(super) fn infer_op(
    registry: &Registry,
    op_type: &str,
    view: &OpView<'_>,
) -> Option<Result<Vec<TensorType>, OpError>> {
    match registry.collective(op_type) {
        Some(collective) => Some(collective.infer(view).map(|ty| vec![ty])),
        None => registry.get(op_type).map(|t| t.infer(view)),
    }
}

/// [`Infer`], for passes that add operators.
pub(super) fn infer(graph: &mut OpGraph, registry: &Registry) -> Result<(), BuildError> {
    check_names(graph)?;
    check_order(graph)?;
    for tensor in graph.tensors.iter().filter(|t| t.role != Role::Activation) {
        check_tensor(tensor)?;
    }
    for index in 0..graph.ops.len() {
        let op = &graph.ops[index];
        let view = op_view(graph, op);
        let collective = registry.collective(&op.op_type).map(|c| c.attributes());
        if let Some(declared) = collective.or_else(|| registry.get(&op.op_type).map(|t| t.attributes())) {
            check_attributes(&op.op_type, declared, &op.attrs).map_err(|e| BuildError::op(&op.name, e.0))?;
        }
        let inferred = infer_op(registry, &op.op_type, &view)
            .ok_or_else(|| BuildError::UnknownOp {
                op: op.name.clone(),
                op_type: op.op_type.clone(),
                known: known_ops(registry),
            })?
            .map_err(|e| BuildError::op(&op.name, e.0))?;
        if inferred.len() != op.outputs.len() {
            return Err(BuildError::op(
                &op.name,
                format!(
                    "`{}` has {} outputs, but {} are given",
                    op.op_type,
                    inferred.len(),
                    op.outputs.len()
                ),
            ));
        }
        check_in_place(graph, op, registry)?;
        check_roles(graph, op, registry)?;
        let (name, outputs) = (op.name.clone(), op.outputs.clone());
        for (&output, ty) in outputs.iter().zip(inferred) {
            let tensor = &mut graph.tensors[output as usize];
            if tensor.dims.is_empty() {
                (tensor.dtype, tensor.dims, tensor.rows) = (ty.dtype, ty.dims, ty.rows);
            } else if tensor.dims != ty.dims || tensor.dtype != ty.dtype {
                return Err(BuildError::op(
                    &name,
                    format!(
                        "output `{}` is declared as {} {:?}, but the operator writes {} {:?}",
                        tensor.name, tensor.dtype, tensor.dims, ty.dtype, ty.dims
                    ),
                ));
            }
            check_tensor(tensor)?;
        }
    }
    Ok(())
}

/// An output that the type writes in place must be the tensor that it reads. No other tensor may be both input and output.
fn check_in_place(graph: &OpGraph, op: &Op, registry: &Registry) -> Result<(), BuildError> {
    let pairs = registry.get(&op.op_type).map_or(&[][..], |t| t.in_place());
    let name = |t: u32| graph.tensors[t as usize].name.as_str();
    for &(input, output) in pairs {
        if let (Some(&read), Some(&written)) = (op.inputs.get(input), op.outputs.get(output))
            && read != written
        {
            return Err(BuildError::op(
                &op.name,
                format!(
                    "`{}` writes input {input}, `{}`, in place; output {output} must be the same tensor, not `{}`",
                    op.op_type,
                    name(read),
                    name(written)
                ),
            ));
        }
    }
    for (input, read) in op.inputs.iter().enumerate() {
        if let Some(output) = op.outputs.iter().position(|written| written == read)
            && !pairs.contains(&(input, output))
        {
            return Err(BuildError::op(
                &op.name,
                format!(
                    "reads and writes `{}`, but `{}` does not work in place; write to another tensor",
                    name(*read),
                    op.op_type
                ),
            ));
        }
    }
    Ok(())
}

fn known_ops(registry: &Registry) -> String {
    let mut names: Vec<&str> = registry.iter().map(|t| t.name()).collect();
    names.extend(registry.collectives().map(|c| c.name()));
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}

fn check_names(graph: &OpGraph) -> Result<(), BuildError> {
    let mut seen = HashSet::new();
    for tensor in &graph.tensors {
        if tensor.name.is_empty() {
            return Err(BuildError::Graph(
                "a tensor has an empty name; give each tensor a unique name".into(),
            ));
        }
        if !seen.insert(tensor.name.as_str()) {
            return Err(BuildError::tensor(&tensor.name, "two tensors have this name; rename one"));
        }
    }
    let mut seen = HashSet::new();
    for op in &graph.ops {
        if op.name.is_empty() {
            return Err(BuildError::Graph(format!(
                "an operator of type `{}` has an empty name; give each operator a unique name",
                op.op_type
            )));
        }
        if !seen.insert(op.name.as_str()) {
            return Err(BuildError::op(&op.name, "two operators have this name; rename one"));
        }
    }
    Ok(())
}

fn check_order(graph: &OpGraph) -> Result<(), BuildError> {
    let mut writer: Vec<Option<usize>> = vec![None; graph.tensors.len()];
    for (index, op) in graph.ops.iter().enumerate() {
        for &tensor in op.inputs.iter().chain(&op.outputs) {
            if tensor as usize >= graph.tensors.len() {
                return Err(BuildError::op(
                    &op.name,
                    format!(
                        "refers to tensor number {tensor}, but the graph has {} tensors",
                        graph.tensors.len()
                    ),
                ));
            }
        }
        for &input in &op.inputs {
            let tensor = &graph.tensors[input as usize];
            if tensor.role == Role::Activation && writer[input as usize].is_none() {
                return Err(BuildError::op(
                    &op.name,
                    format!(
                        "reads `{}`, which no operator before it writes; put its producer first, or make it an input",
                        tensor.name
                    ),
                ));
            }
        }
        if op.outputs.is_empty() {
            return Err(BuildError::op(&op.name, "has no output; an operator must write a tensor"));
        }
        for &output in &op.outputs {
            let tensor = &graph.tensors[output as usize];
            if !matches!(tensor.role, Role::Activation | Role::Persistent { .. }) {
                return Err(BuildError::op(
                    &op.name,
                    format!(
                        "writes `{}`, which is constant or an input; write to another tensor",
                        tensor.name
                    ),
                ));
            }
            if let Some(first) = writer[output as usize].replace(index) {
                return Err(BuildError::op(
                    &op.name,
                    format!(
                        "writes `{}`, which `{}` already writes; each tensor must have one writer",
                        tensor.name, graph.ops[first].name
                    ),
                ));
            }
        }
    }
    for (index, tensor) in graph.tensors.iter().enumerate() {
        if tensor.role == Role::Activation && tensor.output && writer[index].is_none() {
            return Err(BuildError::tensor(
                &tensor.name,
                "is listed as an output, but no operator writes it",
            ));
        }
    }
    Ok(())
}

fn check_tensor(tensor: &Tensor) -> Result<(), BuildError> {
    let error = |message: String| Err(BuildError::tensor(&tensor.name, message));
    if tensor.dims.is_empty() || tensor.dims.len() > MAX_DIMS {
        return error(format!("has {} dimensions; expected 1 to {MAX_DIMS}", tensor.dims.len()));
    }
    if let Some(&dim) = tensor.dims.iter().find(|&&d| d == 0 || d > u64::from(u32::MAX >> 1)) {
        return error(format!("has a dimension of {dim}; expected 1 to {}", u32::MAX >> 1));
    }
    let mut bytes = tensor.dtype.size();
    for &dim in &tensor.dims {
        // Leaves room for padding to tiles of 16 rows and an even depth.
        match bytes.checked_mul(dim.next_multiple_of(16)) {
            Some(product) if product <= 1 << 48 => bytes = product,
            _ => return error(format!("{:?} takes more than 2^48 bytes; make it smaller", tensor.dims)),
        }
    }
    let inner: u64 = tensor.dims[1..].iter().product();
    if inner > u64::from(u32::MAX) - 1 {
        return error(format!("{:?} has a stride above 2^32; make it smaller", tensor.dims));
    }
    if let Sharding::Split { dim, parts } = &tensor.sharding {
        if *dim >= tensor.dims.len() {
            return error(format!("is split in dimension {dim}, but has {}", tensor.dims.len()));
        }
        let total = parts.iter().try_fold(0u64, |sum, p| sum.checked_add(p.len));
        if total != Some(tensor.dims[*dim]) {
            let total = total.map_or_else(|| "more than 64 bits".into(), |total| total.to_string());
            return error(format!(
                "the parts of its split add up to {total}, but dimension {dim} is {}",
                tensor.dims[*dim]
            ));
        }
        for part in parts {
            let expected = match part.split {
                Split::Even { .. } => continue,
                Split::Queries { heads, head_dim } => heads.checked_mul(head_dim).filter(|_| heads > 0),
                Split::KeyValues { heads, kv_heads, head_dim } => (kv_heads > 0 && heads % kv_heads == 0)
                    .then(|| kv_heads.checked_mul(head_dim))
                    .flatten()
                    .filter(|_| heads > 0),
            };
            if expected != Some(part.len) {
                let split = serde_json::to_string(&part.split).unwrap_or_default();
                return error(format!("a part of {} indices does not fit its split {split}", part.len));
            }
        }
    }
    if let (Role::Weight { .. }, Sharding::Split { dim: 1.., parts }) = (&tensor.role, &tensor.sharding)
        && parts.len() > 1
    {
        // A rank loads one range of columns.
        return error(format!(
            "is a weight whose columns are split in {} parts; split them in one part, or split its rows",
            parts.len()
        ));
    }
    if let Role::Weight { parts } = &tensor.role {
        let tail = &tensor.dims[1..];
        let rows = parts.iter().try_fold(0u64, |sum, p| sum.checked_add(*p.dims.first()?));
        if parts.is_empty() || rows != Some(tensor.dims[0]) || parts.iter().any(|p| &p.dims[1..] != tail) {
            return error(format!("its parts do not add up to {:?} along dimension 0", tensor.dims));
        }
    }
    if let Role::Persistent { region_dims: Some(dims) } = &tensor.role
        && (dims.is_empty()
            || dims.len() > MAX_DIMS
            || dims.iter().any(|&d| d == 0 || d > u64::from(u32::MAX >> 1)))
    {
        return error(format!(
            "has region dimensions {dims:?}; expected 1 to {MAX_DIMS} dimensions, none of them 0"
        ));
    }
    Ok(())
}
