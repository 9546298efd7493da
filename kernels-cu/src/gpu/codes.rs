//! Which code each task runs.

use super::GpuError;
use crate::layout::packed_layout;
use crate::registry::{GpuSite, Registration, registration};
use crate::abi;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use taskgraph::task_graph::{Operand, Place, Space, Task, TaskGraph, core_types};

/// One specialised code: a C++ type of a task type's `gpu.cuh`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Expression {
    /// Name of the task type, and of the folder whose `gpu.cuh` has the type's template.
    pub task_type: String,
    /// The type, e.g. `mpk::gpu::Linear<MPK_BF16, 4096>`.
    pub code: String,
}

impl Expression {
    /// A list as text, to send it to other ranks.
    pub fn to_text(list: &[Expression]) -> String {
        list.iter().map(|e| format!("{}\t{}\n", e.task_type, e.code)).collect()
    }

    /// A list from [`Expression::to_text`]; lines of another form are left out.
    pub fn from_text(text: &str) -> Vec<Expression> {
        let split = text.lines().filter_map(|line| line.split_once('\t'));
        split
            .map(|(task_type, code)| Expression { task_type: task_type.to_string(), code: code.to_string() })
            .collect()
    }
}

/// The sorted union of lists of codes.
pub fn merge<'a>(lists: impl IntoIterator<Item = &'a [Expression]>) -> Vec<Expression> {
    let mut union: Vec<Expression> = lists.into_iter().flatten().cloned().collect();
    union.sort();
    union.dedup();
    union
}

/// The codes of some graphs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskCodes {
    /// All codes, sorted, no two equal.
    pub expressions: Vec<Expression>,
    /// For each graph each task's `mpk_task.code`: an index in `expressions`, or `MPK_NO_CODE`.
    pub graphs: Vec<Vec<u32>>,
}

impl TaskCodes {
    /// Makes the tasks' codes count in `union`, which becomes `expressions`: a sorted list that has all of them (see
    /// [`merge`]). A code that `union` lacks becomes `MPK_NO_CODE`.
    pub fn renumber(&mut self, union: Vec<Expression>) {
        let new: Vec<u32> = self
            .expressions
            .iter()
            .map(|e| union.binary_search(e).map_or(abi::MPK_NO_CODE, |index| index as u32))
            .collect();
        for code in self.graphs.iter_mut().flatten() {
            *code = new.get(*code as usize).copied().unwrap_or(abi::MPK_NO_CODE);
        }
        self.expressions = union;
    }
}

/// Every task's code. Tasks of the same variant whose operands have the same form have the same code, so each
/// folder is asked once for them.
///
/// # Errors
/// [`GpuError::Unsupported`] for the first task that the GPU code can't run.
pub fn task_codes(graphs: &[TaskGraph]) -> Result<TaskCodes, GpuError> {
    let mut found: HashMap<Expression, u32> = HashMap::new();
    let mut codes = TaskCodes::default();
    for graph in graphs {
        codes.graphs.push(graph_codes(graph, &mut found)?);
    }
    let mut in_order: Vec<(Expression, u32)> = found.into_iter().collect();
    in_order.sort();
    let mut new = vec![0; in_order.len()];
    for (index, (expression, number)) in in_order.into_iter().enumerate() {
        new[number as usize] = index as u32;
        codes.expressions.push(expression);
    }
    for code in codes.graphs.iter_mut().flatten().filter(|code| **code != abi::MPK_NO_CODE) {
        *code = new[*code as usize];
    }
    Ok(codes)
}

/// Codes of one graph's tasks, numbered as `found` met them.
fn graph_codes(graph: &TaskGraph, found: &mut HashMap<Expression, u32>) -> Result<Vec<u32>, GpuError> {
    let types: Vec<Code> = graph.type_names.iter().map(|name| Code::of(name)).collect();
    let forms: Vec<TensorForm> = graph.tensors.iter().map(|t| TensorForm::new(t, graph)).collect();
    let mut known: HashMap<Box<[u32]>, u32, BuildHasherDefault<Words>> = HashMap::default();
    let mut codes = Vec::with_capacity(graph.tasks.len());
    let (mut key, mut last_key, mut last_code) = (Vec::new(), Vec::new(), abi::MPK_NO_CODE);
    for task in &graph.tasks {
        let code = match types.get(usize::from(task.task_type)) {
            Some(Code::Nothing) => abi::MPK_NO_CODE,
            Some(Code::Of(registration)) => {
                site_key(graph, task, &forms, &mut key);
                // Tasks of one operator lie side by side.
                if key != last_key {
                    last_code = match known.get(key.as_slice()) {
                        Some(&code) => code,
                        None => {
                            let expression = expression(graph, task, &forms, registration)?;
                            let next = found.len() as u32;
                            let code = *found.entry(expression).or_insert(next);
                            known.insert(key.as_slice().into(), code);
                            code
                        }
                    };
                    std::mem::swap(&mut key, &mut last_key);
                }
                last_code
            }
            None => return Err(unsupported(graph, task, "there is no such task type".to_string())),
        };
        codes.push(code);
    }
    Ok(codes)
}

/// What a task type's tasks run.
enum Code {
    Nothing,
    Of(Option<&'static Registration>),
}

impl Code {
    fn of(name: &str) -> Self {
        let nothing = [
            core_types::TERMINATE,
            core_types::BEGIN_TASK_GRAPH,
            core_types::EMPTY,
            core_types::NVSHMEM_SIGNAL,
        ];
        if nothing.contains(&name) { Code::Nothing } else { Code::Of(registration(name)) }
    }
}

/// Of an operand what its tensor decides.
struct TensorForm {
    dtype: u8,
    layout: u8,
    symmetric: u8,
}

impl TensorForm {
    fn new(tensor: &taskgraph::task_graph::TensorEntry, graph: &TaskGraph) -> Self {
        let strided = abi::MPK_LAYOUT_STRIDED as u8;
        TensorForm {
            dtype: tensor.dtype as u8,
            layout: if tensor.tiled { packed_layout(graph.backend) } else { strided },
            symmetric: u8::from(tensor.space == Space::Symmetric),
        }
    }

    /// The operand without its address; every peer is rank 0.
    fn operand(&self, operand: &Operand) -> abi::mpk_operand {
        abi::mpk_operand {
            addr: 0,
            dims: operand.dims,
            strides: operand.strides,
            dtype: self.dtype,
            ndim: operand.ndim,
            layout: self.layout,
            symmetric: self.symmetric,
            pe: match operand.place {
                Place::Own => -1,
                Place::All => -2,
                Place::Peer(_) => 0,
            },
        }
    }
}

/// Operands of a task, inputs first.
fn operands<'g>(graph: &'g TaskGraph, task: &Task) -> &'g [Operand] {
    let first = task.first_operand as usize;
    let count = usize::from(task.num_inputs) + usize::from(task.num_outputs);
    graph.operands.get(first..first + count).unwrap_or_default()
}

/// All that the code may depend on, as words.
fn site_key(graph: &TaskGraph, task: &Task, forms: &[TensorForm], key: &mut Vec<u32>) {
    key.clear();
    key.push(u32::from(task.variant) | u32::from(task.task_type) << 16);
    key.push(u32::from(task.num_inputs) | u32::from(task.num_outputs) << 16);
    for operand in operands(graph, task) {
        let form = &forms[operand.tensor as usize];
        let place = match operand.place {
            Place::Own => 0,
            Place::All => 1,
            Place::Peer(_) => 2,
        };
        let small = [form.dtype, form.layout | form.symmetric << 4, operand.ndim, place];
        key.push(u32::from_le_bytes(small));
        key.extend_from_slice(&operand.dims);
        key.extend_from_slice(&operand.strides);
    }
}

fn expression(
    graph: &TaskGraph,
    task: &Task,
    forms: &[TensorForm],
    registration: &Option<&'static Registration>,
) -> Result<Expression, GpuError> {
    let registration =
        registration.ok_or_else(|| unsupported(graph, task, "there is no such task type".to_string()))?;
    let gpu =
        registration.gpu.ok_or_else(|| unsupported(graph, task, "it has no GPU code".to_string()))?;
    let all: Vec<abi::mpk_operand> =
        operands(graph, task).iter().map(|o| forms[o.tensor as usize].operand(o)).collect();
    let (inputs, outputs) = all.split_at(usize::from(task.num_inputs).min(all.len()));
    let params = graph.variants.get(usize::from(task.variant)).map_or(&[][..], |v| &v.params);
    let site = GpuSite { params, inputs, outputs, capacity: graph.capacity };
    let code = gpu(&site).map_err(|reason| unsupported(graph, task, reason))?;
    Ok(Expression { task_type: registration.name.to_string(), code })
}

fn unsupported(graph: &TaskGraph, task: &Task, reason: String) -> GpuError {
    GpuError::Unsupported {
        graph: graph.name.clone(),
        op: graph.op_name(task).to_string(),
        task_type: graph.type_names.get(usize::from(task.task_type)).cloned().unwrap_or_default(),
        reason,
    }
}

/// A quick hash of short lists of words, whose values come from our own builder.
#[derive(Default)]
struct Words(u64);

impl Hasher for Words {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxhash_rust::xxh3::xxh3_64_with_seed(bytes, self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn list(codes: &[(&str, &str)]) -> Vec<Expression> {
        codes
            .iter()
            .map(|(t, c)| Expression { task_type: t.to_string(), code: c.to_string() })
            .collect()
    }

    #[test]
    fn renumbered_codes_mean_the_same() {
        let none = abi::MPK_NO_CODE;
        let own = list(&[("linear", "A<1>"), ("reduce", "R<2>")]);
        let other = list(&[("add", "S"), ("linear", "A<1>"), ("linear", "A<2>")]);
        let union = merge([&own[..], &other[..]]);
        assert_eq!(union, list(&[("add", "S"), ("linear", "A<1>"), ("linear", "A<2>"), ("reduce", "R<2>")]));
        let mut codes = TaskCodes { expressions: own, graphs: vec![vec![none, 0, 1], vec![1]] };
        codes.renumber(union.clone());
        assert_eq!(codes.graphs, [vec![none, 1, 3], vec![3]]);
        assert_eq!(Expression::from_text(&Expression::to_text(&union)), union);
    }
}
