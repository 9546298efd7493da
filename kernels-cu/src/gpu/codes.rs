//! Which code each task runs.

use super::GpuError;
use taskgraph::task_graph::TaskGraph;

/// One specialised code: a C++ type of a task type's `gpu.cuh`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Expression {
    /// Name of the task type, and of the folder whose `gpu.cuh` has the type's template.
    pub task_type: String,
    /// The type, e.g. `mpk::gpu::Linear<MPK_BF16, 4096>`.
    pub code: String,
}

/// The codes of some graphs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskCodes {
    /// All codes, sorted, no two equal.
    pub expressions: Vec<Expression>,
    /// For each graph each task's `mpk_task.code`: an index in `expressions`, or `MPK_NO_CODE`.
    pub graphs: Vec<Vec<u32>>,
}

/// Every task's code.
///
/// # Errors
/// [`GpuError::Unsupported`] for the first task that the GPU code can't run.
pub fn task_codes(graphs: &[TaskGraph]) -> Result<TaskCodes, GpuError> {
    let _ = graphs;
    Ok(TaskCodes::default())
}

/// The sorted union of lists of codes.
pub fn merge<'a>(lists: impl IntoIterator<Item = &'a [Expression]>) -> Vec<Expression> {
    let mut union: Vec<Expression> = lists.into_iter().flatten().cloned().collect();
    union.sort();
    union.dedup();
    union
}

impl TaskCodes {
    /// Makes the tasks' codes count in `union`, a list that holds all of `expressions` (see [`merge`]).
    pub fn renumber(&mut self, union: Vec<Expression>) {
        let _ = union;
    }
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
