//! Checks that are shared by the contracts of the task types. Their messages name the operand.

use crate::abi;
use taskgraph::op_graph::Attrs;
use taskgraph::split::Part;
use taskgraph::task_type::{Need, OpError, OpView, OperandView, ShardRule, TensorType};
use taskgraph::words::counted;
use taskgraph::{Attribute, AttributeKind, DType, Rows, Sharding};

/// Exactly `N` inputs.
pub fn inputs<'a, 'b, const N: usize>(op: &'b OpView<'a>) -> Result<[&'b OperandView<'a>; N], OpError> {
    if op.inputs.len() != N {
        return Err(OpError(format!("takes {}, not {}", counted(N, "input"), op.inputs.len())));
    }
    Ok(std::array::from_fn(|i| &op.inputs[i]))
}

/// The error for two operands of the same dimensions whose rows are counted differently.
pub fn other_rows(a: &OperandView<'_>, b: &OperandView<'_>) -> OpError {
    let counts = |rows: Rows| match rows {
        Rows::Tokens => "counts token rows",
        Rows::Samples => "counts sampled rows",
        Rows::Fixed => "has fixed rows",
    };
    let field = |rows: Rows| match rows {
        Rows::Tokens => "tokens",
        Rows::Samples => "samples",
        Rows::Fixed => "fixed",
    };
    let (fixed, other) = if a.ty.rows == Rows::Fixed { (a, b) } else { (b, a) };
    let (first, second) = (counts(a.ty.rows), counts(b.ty.rows));
    let fix = match fixed.ty.rows {
        Rows::Fixed => format!("; declare `{}` with \"rows\": \"{}\"", fixed.name, field(other.ty.rows)),
        _ => String::new(),
    };
    OpError(format!("`{}` {first}, `{}` {second}{fix}", a.name, b.name))
}

/// Between `least` and `most` inputs.
pub fn num_inputs(op: &OpView<'_>, least: usize, most: usize) -> Result<(), OpError> {
    let n = op.inputs.len();
    if n < least || n > most {
        let wanted =
            if least == most { counted(least, "input") } else { format!("{least} to {most} inputs") };
        return Err(OpError(format!("takes {wanted}, not {n}")));
    }
    Ok(())
}

/// Two dimensions, each from 1 to 2^31.
pub fn matrix(operand: &OperandView<'_>) -> Result<(u64, u64), OpError> {
    match operand.ty.dims[..] {
        [rows, columns] if rows > 0 && columns > 0 && rows < 1 << 31 && columns < 1 << 31 => {
            Ok((rows, columns))
        }
        _ => Err(OpError(format!("`{}` must be [rows, columns], not {:?}", operand.name, operand.ty.dims))),
    }
}

/// One dimension of `length`.
pub fn vector(operand: &OperandView<'_>, length: u64) -> Result<(), OpError> {
    if operand.ty.dims != [length] {
        return Err(OpError(format!("`{}` must be [{length}], not {:?}", operand.name, operand.ty.dims)));
    }
    Ok(())
}

/// f32, f16 or bf16.
pub fn float(operand: &OperandView<'_>) -> Result<(), OpError> {
    if !operand.ty.dtype.is_float() {
        return Err(OpError(format!(
            "`{}` must be f32, f16 or bf16, not {}",
            operand.name, operand.ty.dtype
        )));
    }
    Ok(())
}

/// This element type.
pub fn dtype(operand: &OperandView<'_>, wanted: DType) -> Result<(), OpError> {
    if operand.ty.dtype != wanted {
        return Err(OpError(format!("`{}` must be {wanted}, not {}", operand.name, operand.ty.dtype)));
    }
    Ok(())
}

/// All operands replicated.
pub fn replicated(inputs: usize, outputs: usize) -> ShardRule {
    ShardRule { inputs: vec![Need::Replicated; inputs], outputs: vec![Sharding::Replicated; outputs] }
}

/// The parts of a tensor that is split on dimension `dim`.
pub fn split_parts(sharding: &Sharding, dim: usize) -> Option<&[Part]> {
    match sharding {
        Sharding::Split { dim: d, parts } if *d == dim => Some(parts),
        _ => None,
    }
}

/// The parts of a tensor that is split on its columns (dimension 1).
pub fn split_columns(sharding: &Sharding) -> Option<&[Part]> {
    split_parts(sharding, 1)
}

/// Refuses an operand of which several ranks hold the same index, where results of the ranks are added up or compared.
///
/// # Errors
/// Ranks share key-value heads.
pub fn held_once(operand: &OperandView<'_>, world: u32) -> Result<(), OpError> {
    if !operand.sharding.shares_indices(world) {
        return Ok(());
    }
    Err(OpError(format!(
        "`{}` is split by `key_values` with fewer key-value heads than ranks, so several of the {world} ranks hold the same indices, \
         which would be counted several times; split it by `even` or `queries`, or use fewer ranks",
        operand.name
    )))
}

/// Dimensions of a local matrix.
pub fn local_matrix(ty: &TensorType) -> Result<(u32, u32), OpError> {
    match ty.dims[..] {
        [rows, columns] => match (u32::try_from(rows), u32::try_from(columns)) {
            (Ok(rows), Ok(columns)) => Ok((rows, columns)),
            _ => Err(OpError(format!("dimensions {rows} x {columns} do not fit in 32 bits"))),
        },
        _ => Err(OpError(format!("expected a matrix, found dimensions {:?}", ty.dims))),
    }
}

/// The `rows_kind` word of params structs.
pub fn rows_kind(rows: Rows) -> u32 {
    match rows {
        Rows::Tokens => 0,
        Rows::Samples => 1,
        Rows::Fixed => 2,
    }
}

/// Attribute `name` as a number.
pub fn attr_f64(attrs: &Attrs, name: &str) -> Result<Option<f64>, OpError> {
    attrs
        .get(name)
        .map(|v| v.as_f64().ok_or_else(|| OpError(format!("attribute `{name}` must be a number, not {v}"))))
        .transpose()
}

/// Attribute `name` as a whole number that fits 32 bits.
pub fn attr_u32(attrs: &Attrs, name: &str) -> Result<Option<u32>, OpError> {
    attrs
        .get(name)
        .map(|v| {
            v.as_u64()
                .and_then(|v| u32::try_from(v).ok())
                .ok_or_else(|| OpError(format!("attribute `{name}` must be a whole number, not {v}")))
        })
        .transpose()
}

/// Attribute `name` as a boolean; false if absent.
pub fn attr_bool(attrs: &Attrs, name: &str) -> Result<bool, OpError> {
    attrs.get(name).map_or(Ok(false), |v| {
        v.as_bool().ok_or_else(|| OpError(format!("attribute `{name}` must be true or false, not {v}")))
    })
}

/// Attribute `name` as an element type.
pub fn attr_dtype(attrs: &Attrs, name: &str) -> Result<Option<DType>, OpError> {
    attrs
        .get(name)
        .map(|v| {
            serde_json::from_value(v.clone()).map_err(|_| {
                OpError(format!("attribute `{name}` must name a dtype such as \"bf16\", not {v}"))
            })
        })
        .transpose()
}

/// The function that is applied to a gate before it is multiplied: `silu`, the default, or a GELU.
pub const ACTIVATION: Attribute =
    Attribute::new("activation", AttributeKind::Name(&["silu", "gelu-tanh", "gelu"]));

/// Attribute `activation` as `enum mpk_activation`.
pub fn activation(attrs: &Attrs) -> Result<u32, OpError> {
    let Some(value) = attrs.get(ACTIVATION.name) else { return Ok(abi::MPK_ACTIVATION_SILU) };
    match value.as_str() {
        Some("silu") => Ok(abi::MPK_ACTIVATION_SILU),
        Some("gelu-tanh") => Ok(abi::MPK_ACTIVATION_GELU_TANH),
        Some("gelu") => Ok(abi::MPK_ACTIVATION_GELU),
        _ => Err(OpError(format!("attribute {ACTIVATION} cannot be {value}"))),
    }
}

/// Attribute `eps`; 1e-6 if absent.
pub fn eps(op: &OpView<'_>) -> Result<f32, OpError> {
    let eps = attr_f64(op.attrs, "eps")?.unwrap_or(1e-6);
    if !(0.0..1.0).contains(&eps) {
        return Err(OpError(format!("`eps` must be at least 0 and below 1, not {eps}")));
    }
    Ok(eps as f32)
}
