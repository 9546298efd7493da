//! Op graphs from and to JSON.

use super::distinct::value_from_str;
use super::error::GraphFileError;
use super::names::problem_of_name;
use super::op_graph_file::{
    DataSource, DataSources, OpGraphFile, OpGraphOp, OpGraphTensor, RandomData, TensorKind,
};
use super::parse::{parse, parse_object};
use super::shard::{shard_from_value, shard_to_value};
use crate::dtype::DType;
use crate::op_graph::{Capacity, Op, OpGraph, Role, Rows, Tensor, WeightPart};
use crate::region::MAX_DIMS;
use crate::split::Sharding;
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// Reads an op graph from text; see [`op_graph_from_value`].
///
/// # Errors
/// Invalid JSON or a key that an object has twice, with line and column; otherwise those of [`op_graph_from_value`].
pub fn op_graph_from_str(text: &str) -> Result<(OpGraph, DataSources), GraphFileError> {
    op_graph_from_value(&value_from_str(text, "graph")?, "graph")
}

/// Refuses a name that would garble messages and timelines. `place` is its path.
fn check_name(name: &str, place: &str) -> Result<(), GraphFileError> {
    problem_of_name(name).map_or(Ok(()), |problem| Err(GraphFileError::at(place, problem)))
}

/// Reads an op graph in the form of [`OpGraphFile`]. `place` is its path, for messages. Also returns the sources of the values of
/// those tensors that have one.
///
/// # Errors
/// Unknown or missing fields, wrong types, unknown or duplicate names, sizes that overflow or contradict each other, or invalid
/// shardings. Each error has the path of the value. The infer pass checks later whether the operators accept their operands.
pub fn op_graph_from_value(value: &Value, place: &str) -> Result<(OpGraph, DataSources), GraphFileError> {
    let Value::Object(fields) = value else {
        return Err(GraphFileError::at(place, "must be an object"));
    };
    // Tensors and operators are read one by one, so that errors name them.
    let mut rest = fields.clone();
    let list = |key: &str, rest: &mut Map<String, Value>| match rest.remove(key) {
        Some(Value::Array(items)) => {
            rest.insert(key.into(), Value::Array(Vec::new()));
            Ok(items)
        }
        Some(_) => Err(GraphFileError::at(format!("{place}.{key}"), "must be a list")),
        None => Ok(Vec::new()),
    };
    let tensors = list("tensors", &mut rest)?;
    let ops = list("ops", &mut rest)?;
    let file: OpGraphFile = parse(Value::Object(rest), place)?;
    check_name(&file.name, &format!("{place}.name"))?;
    if file.rows == 0 {
        return Err(GraphFileError::at(format!("{place}.rows"), "must be at least 1"));
    }
    let samples = file.samples.unwrap_or(file.rows);
    if samples > file.rows {
        return Err(GraphFileError::at(
            format!("{place}.samples"),
            format!("{samples} is more than `rows` ({})", file.rows),
        ));
    }
    let active = file.active.unwrap_or(1);
    // Each slot has a row.
    if active == 0 || active > file.rows {
        let problem = match active {
            0 => "must be at least 1".to_string(),
            _ => format!("{active} is more than `rows` ({})", file.rows),
        };
        return Err(GraphFileError::at(format!("{place}.active"), problem));
    }
    let mut graph = OpGraph::new(file.name, Capacity { rows: file.rows, samples, active });
    let mut sources = DataSources::new();
    let mut names = HashMap::new();
    for (i, value) in tensors.into_iter().enumerate() {
        let place = format!("{place}.tensors[{i}]");
        let (tensor, source) = tensor(parse_object(value, &place)?, &place)?;
        if names.insert(tensor.name.clone(), graph.tensors.len() as u32).is_some() {
            return Err(GraphFileError::at(
                format!("{place}.name"),
                format!("'{}' is declared twice", tensor.name),
            ));
        }
        if let Some(source) = source {
            sources.insert(tensor.name.clone(), source);
        }
        graph.tensors.push(tensor);
    }
    add_ops(&mut graph, &mut names, ops, place)?;
    for (i, name) in file.outputs.iter().enumerate() {
        check_name(name, &format!("{place}.outputs[{i}]"))?;
        match names.get(name) {
            Some(&t) => graph.tensors[t as usize].output = true,
            None => {
                return Err(GraphFileError::at(
                    format!("{place}.outputs[{i}]"),
                    format!("there is no tensor '{name}'"),
                ));
            }
        }
    }
    Ok((graph, sources))
}

fn add_ops(
    graph: &mut OpGraph,
    names: &mut HashMap<String, u32>,
    ops: Vec<Value>,
    place: &str,
) -> Result<(), GraphFileError> {
    let mut written: HashSet<u32> = HashSet::new();
    let mut op_names: HashSet<String> = HashSet::new();
    if ops.is_empty() {
        return Err(GraphFileError::at(format!("{place}.ops"), "has no operator"));
    }
    for (i, value) in ops.into_iter().enumerate() {
        let place = format!("{place}.ops[{i}]");
        let op: OpGraphOp = parse_object(value, &place)?;
        check_name(&op.op, &format!("{place}.op"))?;
        let mut inputs = Vec::new();
        for (j, name) in op.inputs.iter().enumerate() {
            check_name(name, &format!("{place}.inputs[{j}]"))?;
            let known = names.get(name).copied().filter(|&t| {
                written.contains(&t) || !matches!(graph.tensors[t as usize].role, Role::Activation)
            });
            inputs.push(known.ok_or_else(|| {
                GraphFileError::at(
                    format!("{place}.inputs[{j}]"),
                    format!("'{name}' is neither declared nor written by an earlier operator"),
                )
            })?);
        }
        let mut outputs = Vec::new();
        for (j, name) in op.outputs.iter().enumerate() {
            let place = format!("{place}.outputs[{j}]");
            check_name(name, &place)?;
            let tensor = *names.entry(name.clone()).or_insert_with(|| {
                graph.tensors.push(Tensor {
                    name: name.clone(),
                    dtype: DType::F32,
                    dims: Vec::new(),
                    rows: Rows::Tokens,
                    role: Role::Activation,
                    sharding: Sharding::Replicated,
                    output: false,
                });
                graph.tensors.len() as u32 - 1
            });
            if !matches!(graph.tensors[tensor as usize].role, Role::Activation | Role::Persistent { .. }) {
                return Err(GraphFileError::at(
                    place,
                    format!("'{name}' cannot be written because of its kind"),
                ));
            }
            if !written.insert(tensor) {
                return Err(GraphFileError::at(
                    place,
                    format!("'{name}' is already written by another operator"),
                ));
            }
            outputs.push(tensor);
        }
        let name = match op.name.or_else(|| op.outputs.first().cloned()) {
            Some(name) if !name.is_empty() => name,
            _ => return Err(GraphFileError::at(place, "needs a `name` or an output")),
        };
        check_name(&name, &format!("{place}.name"))?;
        if !op_names.insert(name.clone()) {
            return Err(GraphFileError::at(format!("{place}.name"), format!("'{name}' appears twice")));
        }
        graph.ops.push(Op { name, op_type: op.op, inputs, outputs, attrs: op.attrs });
    }
    Ok(())
}

/// Number of elements of a tensor with checked dimensions.
fn elements(dims: &[u64], dtype: DType, place: &str) -> Result<u64, GraphFileError> {
    if dims.is_empty() || dims.len() > MAX_DIMS {
        return Err(GraphFileError::at(
            format!("{place}.dims"),
            format!("has {} dimensions; expected 1 to {MAX_DIMS}", dims.len()),
        ));
    }
    if let Some(bad) = dims.iter().find(|&&d| d == 0 || d > u64::from(u32::MAX)) {
        return Err(GraphFileError::at(
            format!("{place}.dims"),
            format!("{bad} is not between 1 and {}", u32::MAX),
        ));
    }
    let product = dims.iter().try_fold(1u64, |p, &d| p.checked_mul(d));
    product.filter(|p| p.checked_mul(dtype.size()).is_some_and(|b| b < 1 << 62)).ok_or_else(|| {
        GraphFileError::at(
            format!("{place}.dims"),
            format!("{dims:?} is too large: its bytes do not fit in 62 bits"),
        )
    })
}

fn tensor(file: OpGraphTensor, place: &str) -> Result<(Tensor, Option<DataSource>), GraphFileError> {
    let at = |field: &str, message: String| Err(GraphFileError::at(format!("{place}.{field}"), message));
    if file.name.is_empty() {
        return at("name", "is empty".into());
    }
    check_name(&file.name, &format!("{place}.name"))?;
    let count = elements(&file.dims, file.dtype, place)?;
    let source = match &file.data {
        Some(data) => Some(data_source(data, count, &format!("{place}.data"))?),
        None => None,
    };
    if source.is_some() && file.kind == TensorKind::Activation {
        return at("data", "an activation gets its values from an operator; remove `data`".into());
    }
    if file.shard.is_some() && file.kind == TensorKind::Activation {
        return at("shard", "an activation is split as its operator splits it; remove `shard`".into());
    }
    if source.is_some() && file.kind == TensorKind::Persistent {
        return at("data", "a persistent tensor begins with zeros; remove `data`".into());
    }
    if file.region_dims.is_some() && file.kind != TensorKind::Persistent {
        return at("region_dims", "only persistent tensors can have region dimensions".into());
    }
    if let Some(dims) = &file.region_dims {
        elements(dims, DType::U8, place)?;
    }
    if file.parts.is_some() && file.kind != TensorKind::Weight {
        return at("parts", "only weights can have parts".into());
    }
    let role = match file.kind {
        TensorKind::Input => Role::Input,
        TensorKind::Constant => Role::Constant,
        TensorKind::Activation => Role::Activation,
        TensorKind::Persistent => Role::Persistent { region_dims: file.region_dims },
        TensorKind::Weight => {
            let whole = || vec![WeightPart { source: file.name.clone(), dims: file.dims.clone() }];
            let parts = file.parts.unwrap_or_else(whole);
            for (i, part) in parts.iter().enumerate() {
                check_name(&part.source, &format!("{place}.parts[{i}].source"))?;
            }
            let rows = parts.iter().try_fold(0u64, |sum, p| {
                elements(&p.dims, file.dtype, place).ok()?;
                (p.dims[1..] == file.dims[1..]).then_some(())?;
                sum.checked_add(p.dims[0])
            });
            if rows != Some(file.dims[0]) {
                return at("parts", format!("do not add up to {:?} along dimension 0", file.dims));
            }
            Role::Weight { parts }
        }
    };
    let by_kind = if matches!(role, Role::Input | Role::Activation) { Rows::Tokens } else { Rows::Fixed };
    let sharding = match &file.shard {
        Some(shard) => shard_from_value(shard, &file.dims, &format!("{place}.shard"))?,
        None => Sharding::Replicated,
    };
    let tensor = Tensor {
        name: file.name,
        dtype: file.dtype,
        dims: file.dims,
        rows: file.rows.unwrap_or(by_kind),
        role,
        sharding,
        output: false,
    };
    Ok((tensor, source))
}

fn data_source(value: &Value, count: u64, place: &str) -> Result<DataSource, GraphFileError> {
    let wrong = || {
        GraphFileError::at(
            place,
            r#"must be {"values": [..]}, {"random": {"seed": ..}} or {"file": "..", "tensor": ".."}"#,
        )
    };
    let Value::Object(fields) = value else { return Err(wrong()) };
    let keys: Vec<&str> = fields.keys().map(String::as_str).collect();
    match keys.as_slice() {
        ["values"] => {
            let values: Vec<f64> = parse(fields["values"].clone(), &format!("{place}.values"))?;
            if values.len() as u64 != count {
                return Err(GraphFileError::at(
                    format!("{place}.values"),
                    format!("{} values are given, but the tensor has {count} elements", values.len()),
                ));
            }
            Ok(DataSource::Values { values })
        }
        ["random"] => {
            let random: RandomData = parse_object(fields["random"].clone(), &format!("{place}.random"))?;
            Ok(DataSource::Random { random })
        }
        ["file", "tensor"] | ["tensor", "file"] => {
            let text = |key: &str| parse::<String>(fields[key].clone(), &format!("{place}.{key}"));
            let source = (text("file")?, text("tensor")?);
            check_name(&source.1, &format!("{place}.tensor"))?;
            Ok(DataSource::File { file: source.0, tensor: source.1 })
        }
        _ => Err(wrong()),
    }
}

/// The JSON form of an op graph with the sources of its tensors' values. [`op_graph_from_value`] reads it back without loss,
/// except for types and shardings of activations that passes have set: a declared activation must not have a sharding.
///
/// # Errors
/// An operator names a tensor that does not exist.
pub fn op_graph_to_value(graph: &OpGraph, sources: &DataSources) -> Result<Value, GraphFileError> {
    let json = |e: serde_json::Error| GraphFileError::Json(e);
    let mut tensors = Vec::new();
    for tensor in &graph.tensors {
        if matches!(tensor.role, Role::Activation) && tensor.dims.is_empty() {
            continue;
        }
        let (kind, region_dims, parts) = match &tensor.role {
            Role::Input => (TensorKind::Input, None, None),
            Role::Constant => (TensorKind::Constant, None, None),
            Role::Activation => (TensorKind::Activation, None, None),
            Role::Persistent { region_dims } => (TensorKind::Persistent, region_dims.clone(), None),
            Role::Weight { parts } => {
                let plain =
                    matches!(parts.as_slice(), [p] if p.source == tensor.name && p.dims == tensor.dims);
                (TensorKind::Weight, None, (!plain).then(|| parts.clone()))
            }
        };
        tensors.push(OpGraphTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            dims: tensor.dims.clone(),
            kind,
            rows: Some(tensor.rows),
            shard: shard_to_value(&tensor.sharding),
            data: sources.get(&tensor.name).map(serde_json::to_value).transpose().map_err(json)?,
            region_dims,
            parts,
        });
    }
    let name = |t: &u32, op: &Op| {
        let tensor = graph.tensors.get(*t as usize);
        tensor
            .map(|t| t.name.clone())
            .ok_or_else(|| GraphFileError::at(&op.name, format!("names tensor {t}, which does not exist")))
    };
    let mut ops = Vec::new();
    for op in &graph.ops {
        ops.push(OpGraphOp {
            op: op.op_type.clone(),
            name: Some(op.name.clone()),
            inputs: op.inputs.iter().map(|t| name(t, op)).collect::<Result<_, _>>()?,
            outputs: op.outputs.iter().map(|t| name(t, op)).collect::<Result<_, _>>()?,
            attrs: op.attrs.clone(),
        });
    }
    let file = OpGraphFile {
        name: graph.name.clone(),
        rows: graph.capacity.rows,
        samples: Some(graph.capacity.samples),
        active: Some(graph.capacity.active),
        tensors,
        ops,
        outputs: graph.tensors.iter().filter(|t| t.output).map(|t| t.name.clone()).collect(),
    };
    Ok(serde_json::to_value(file)?)
}
