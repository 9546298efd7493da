//! The kernel variant that each task runs.

use super::GpuError;
use crate::abi;
use crate::layout::layout_of;
use crate::registry::{GpuCode, GpuSite, registration};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use taskgraph::task_graph::{Operand, Place, Space, Task, TaskGraph, core_types};

/// One kernel variant: a C++ type from the `gpu.cuh` of a task type.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Expression {
    /// Name of the task type, and of the folder whose `gpu.cuh` has the type's template.
    pub task_type: String,
    /// The type, e.g. `mpk::gpu::Linear<MPK_BF16, 4096>`.
    pub code: String,
}

impl Expression {
    /// A list as text, for sending it to other ranks.
    pub fn to_text(list: &[Expression]) -> String {
        list.iter().map(|e| format!("{}\t{}\n", e.task_type, e.code)).collect()
    }

    /// Reads a list from [`Expression::to_text`]. Lines in another format are skipped.
    pub fn from_text(text: &str) -> Vec<Expression> {
        let split = text.lines().filter_map(|line| line.split_once('\t'));
        split
            .map(|(task_type, code)| Expression { task_type: task_type.to_string(), code: code.to_string() })
            .collect()
    }
}

/// The sorted union of lists of kernel variants.
pub fn merge<'a>(lists: impl IntoIterator<Item = &'a [Expression]>) -> Vec<Expression> {
    let mut union: Vec<Expression> = lists.into_iter().flatten().cloned().collect();
    union.sort();
    union.dedup();
    union
}

/// The kernel variants of some graphs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskCodes {
    /// All kernel variants, sorted and distinct.
    pub expressions: Vec<Expression>,
    /// For each graph, the `mpk_task.code` of each task: an index in `expressions`, or `MPK_NO_CODE`.
    pub graphs: Vec<Vec<u32>>,
}

impl TaskCodes {
    /// Renumbers the tasks' kernel variants by `union`, which becomes `expressions`: a sorted list that contains all of
    /// them (see [`merge`]). A variant that `union` lacks becomes `MPK_NO_CODE`.
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

/// The kernel variant of every task. Tasks of the same variant whose operands have the same form run the same kernel
/// variant, so their folder is asked only once.
///
/// # Errors
/// [`GpuError::Unsupported`] for the first task that the GPU code cannot run.
pub fn task_codes(graphs: &[TaskGraph]) -> Result<TaskCodes, GpuError> {
    task_codes_of(graphs, &|name| Code::of(name))
}

fn task_codes_of(graphs: &[TaskGraph], code_of: &dyn Fn(&str) -> Code) -> Result<TaskCodes, GpuError> {
    let mut found: HashMap<Expression, u32> = HashMap::new();
    let mut codes = TaskCodes::default();
    for graph in graphs {
        codes.graphs.push(graph_codes(graph, code_of, &mut found)?);
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

/// Kernel variants of one graph's tasks, numbered in the order in which `found` got them.
fn graph_codes(
    graph: &TaskGraph,
    code_of: &dyn Fn(&str) -> Code,
    found: &mut HashMap<Expression, u32>,
) -> Result<Vec<u32>, GpuError> {
    let types: Vec<Code> = graph.type_names.iter().map(|name| code_of(name)).collect();
    let forms: Vec<TensorForm> = graph.tensors.iter().map(|t| TensorForm::new(t, graph)).collect();
    let mut known: HashMap<Box<[u32]>, u32, BuildHasherDefault<Words>> = HashMap::default();
    let mut codes = Vec::with_capacity(graph.tasks.len());
    let (mut key, mut last_key, mut last_code) = (Vec::new(), Vec::new(), abi::MPK_NO_CODE);
    for task in &graph.tasks {
        let code = match types.get(usize::from(task.task_type)) {
            Some(Code::Nothing) => abi::MPK_NO_CODE,
            Some(code) => {
                site_key(graph, task, &forms, &mut key);
                // The tasks of one operator are adjacent.
                if key != last_key {
                    last_code = match known.get(key.as_slice()) {
                        Some(&code) => code,
                        None => {
                            let expression = expression(graph, task, &forms, code)?;
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

/// What the tasks of a task type run.
enum Code {
    Nothing,
    Lacking,
    Of(GpuCode),
}

impl Code {
    fn of(name: &str) -> Self {
        let nothing = [
            core_types::TERMINATE,
            core_types::BEGIN_TASK_GRAPH,
            core_types::EMPTY,
            core_types::NVSHMEM_SIGNAL,
        ];
        match registration(name).and_then(|registration| registration.gpu) {
            _ if nothing.contains(&name) => Code::Nothing,
            Some(gpu) => Code::Of(gpu),
            None => Code::Lacking,
        }
    }
}

/// The part of an operand that its tensor determines.
struct TensorForm {
    dtype: u8,
    layout: u8,
    symmetric: u8,
}

impl TensorForm {
    fn new(tensor: &taskgraph::task_graph::TensorEntry, graph: &TaskGraph) -> Self {
        TensorForm {
            dtype: tensor.dtype as u8,
            layout: layout_of(tensor, graph.backend),
            symmetric: u8::from(tensor.space == Space::Symmetric),
        }
    }

    /// The operand without its address. Every peer is rank 0.
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

/// The operands of a task, inputs first.
fn operands<'g>(graph: &'g TaskGraph, task: &Task) -> &'g [Operand] {
    let first = task.first_operand as usize;
    let count = usize::from(task.num_inputs) + usize::from(task.num_outputs);
    graph.operands.get(first..first + count).unwrap_or_default()
}

/// Everything that the code may depend on, as words.
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
    code: &Code,
) -> Result<Expression, GpuError> {
    let Code::Of(gpu) = code else {
        return Err(unsupported(graph, task, "it has no GPU code".to_string()));
    };
    let all: Vec<abi::mpk_operand> =
        operands(graph, task).iter().map(|o| forms[o.tensor as usize].operand(o)).collect();
    let (inputs, outputs) = all.split_at(usize::from(task.num_inputs).min(all.len()));
    let params = graph.variants.get(usize::from(task.variant)).map_or(&[][..], |v| &v.params);
    let site = GpuSite { params, inputs, outputs, capacity: graph.capacity };
    let code = gpu(&site).map_err(|reason| unsupported(graph, task, reason))?;
    Ok(Expression { task_type: graph.type_name(task).to_string(), code })
}

fn unsupported(graph: &TaskGraph, task: &Task, reason: String) -> GpuError {
    GpuError::Unsupported {
        graph: graph.name.clone(),
        op: graph.op_name(task).to_string(),
        task_type: graph.type_names.get(usize::from(task.task_type)).cloned().unwrap_or_default(),
        reason,
    }
}

/// A fast hash for short lists of words. The values come from our own builder.
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
    use smallvec::SmallVec;
    use std::time::{Duration, Instant};
    use taskgraph::op_graph::{Capacity, Role, Rows};
    use taskgraph::region::Region;
    use taskgraph::target::Backend;
    use taskgraph::task_graph::{TensorEntry, Variant};
    use taskgraph::{DType, Placement};

    fn list(codes: &[(&str, &str)]) -> Vec<Expression> {
        codes.iter().map(|(t, c)| Expression { task_type: t.to_string(), code: c.to_string() }).collect()
    }

    const LINEAR: u16 = 6;

    /// Like a task folder: by dtype, a parameter and the last dimension.
    fn linear(site: &GpuSite<'_>) -> Result<String, String> {
        let ([x, w], [y]) = (site.inputs, site.outputs) else { return Err("operands".to_string()) };
        if w.layout != abi::MPK_LAYOUT_FRAGMENT as u8 {
            return Err("the weight must be packed".to_string());
        }
        Ok(format!("Linear<{}, {}, {}, {}, {}>", x.dtype, w.dims[1], y.dims[1], y.pe, site.params[0]))
    }

    fn code_of(name: &str) -> Code {
        if name == "linear" { Code::Of(linear) } else { Code::of(name) }
    }

    /// `count` tasks on packed weights, with `columns` columns in turn.
    fn graph(count: u32, columns: &[u32], backend: Backend) -> TaskGraph {
        let entry = |name: &str, dtype, dims: [u32; 2], tiled| TensorEntry {
            name: name.to_string(),
            dtype,
            dims: dims.to_vec(),
            strides: vec![dims[1], 1],
            space: Space::Device,
            bytes: u64::MAX,
            role: Role::Activation,
            parts: Vec::new(),
            region_dims: dims.to_vec(),
            tiled,
            paired: false,
            output: false,
            rows: Rows::Fixed,
            overlay: None,
        };
        let operand = |tensor, dims: [u32; 2], place| Operand {
            tensor,
            offset: 0,
            dims: [dims[0], dims[1], 1, 1],
            strides: [dims[1], 1, 1, 1],
            ndim: 2,
            place,
            region: Region::whole(&dims),
            trust: None,
        };
        let mut graph = TaskGraph {
            name: "g".to_string(),
            rank: 0,
            world: 2,
            placement: Placement::Static,
            backend,
            workers: 1,
            capacity: Capacity { rows: 8, samples: 8, active: 8 },
            type_names: core_types::ALL.iter().map(|n| n.to_string()).chain(["linear".to_string()]).collect(),
            ops: vec!["layer.0".to_string()],
            tensors: vec![
                entry("x", DType::Bf16, [8, 512], false),
                entry("w", DType::Bf16, [4096, 512], true),
                entry("y", DType::F32, [8, 4096], false),
            ],
            variants: vec![Variant { task_type: LINEAR, params: vec![7], scratch_bytes: 0 }],
            operands: Vec::new(),
            tasks: Vec::new(),
            events: Vec::new(),
            worker_lists: Vec::new(),
        };
        for number in 0..count {
            let n = columns[number as usize % columns.len()];
            let first_operand = graph.operands.len() as u32;
            graph.operands.push(operand(0, [8, 512], Place::Own));
            graph.operands.push(operand(1, [n, 512], Place::Own));
            graph.operands.push(operand(2, [8, n], Place::Peer((number % 2) as u16)));
            graph.tasks.push(Task {
                task_type: if number < 2 { number as u16 } else { LINEAR },
                variant: 0,
                first_operand,
                num_inputs: 2,
                num_outputs: 1,
                trigger: None,
                dependencies: SmallVec::new(),
                carried: SmallVec::new(),
                worker: None,
                args: [number as i32; 8],
                op: 0,
            });
        }
        graph
    }

    #[test]
    fn equal_sites_share_a_code_across_graphs() {
        let graphs = [graph(7, &[32, 16], Backend::Cuda), graph(3, &[16], Backend::Cuda)];
        let codes = task_codes_of(&graphs, &code_of).unwrap();
        let none = abi::MPK_NO_CODE;
        let wanted = ["Linear<2, 512, 16, 0, 7>", "Linear<2, 512, 32, 0, 7>"];
        assert_eq!(codes.expressions, wanted.map(|c| list(&[("linear", c)]).remove(0)));
        assert_eq!(codes.graphs, [vec![none, none, 1, 0, 1, 0, 1], vec![none, none, 0]]);
    }

    #[test]
    fn tasks_that_cannot_run_are_named() {
        let refused = |graph: TaskGraph| task_codes_of(&[graph], &code_of).unwrap_err();
        let error = refused(graph(3, &[16], Backend::Cpu));
        assert_eq!(error.exit_status(), 2);
        let text = error.to_string();
        for wanted in ["graph g", "layer.0", "task type linear", "must be packed"] {
            assert!(text.contains(wanted), "{text}");
        }
        let mut unknown = graph(3, &[16], Backend::Cuda);
        unknown.type_names[usize::from(LINEAR)] = "no_such".to_string();
        assert!(refused(unknown).to_string().contains("no_such"));
    }

    #[test]
    fn hundreds_of_thousands_of_tasks_take_no_time() {
        let graphs = [graph(400_000, &[16, 32, 48], Backend::Cuda)];
        let started = Instant::now();
        let codes = task_codes_of(&graphs, &code_of).unwrap();
        let took = started.elapsed();
        println!("400,000 tasks: {took:?}");
        assert_eq!(codes.expressions.len(), 3);
        // Twenty times the duration in a release build on an idle machine.
        assert!(cfg!(debug_assertions) || took < Duration::from_secs(1), "{took:?}");
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
