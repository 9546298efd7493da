//! Checks copies and sums: their operands and parameters must be what the code of these core types reads.

use super::RankCheck;
use crate::dtype::DType;
use crate::op_graph::{Role, Rows};
use crate::task_graph::sum_flags::{FLAGGED, FOLLOWED, RESIDUAL};
use crate::task_graph::{Operand, Task};

/// Values of the parameter that says which rows are in use.
const TOKENS: u32 = 0;
const SAMPLES: u32 = 1;
const ALL: u32 = 2;

fn dims(operand: &Operand) -> &[u32] {
    &operand.dims[..usize::from(operand.ndim)]
}

/// True if the elements of the last dimension are adjacent.
fn contiguous(operand: &Operand) -> bool {
    match dims(operand) {
        [] => true,
        [.., columns] => *columns < 2 || operand.strides[usize::from(operand.ndim) - 1] == 1,
    }
}

impl RankCheck<'_> {
    fn params(&self, task: &Task) -> &[u32] {
        self.graph().variants.get(usize::from(task.variant)).map_or(&[][..], |variant| &variant.params[..])
    }

    fn dtype(&self, operand: &Operand) -> DType {
        self.graph().tensors[operand.tensor as usize].dtype
    }

    /// The view, for messages.
    fn view(&self, operand: &Operand) -> String {
        let tensor = &self.graph().tensors[operand.tensor as usize];
        format!("{} {:?} of '{}'", tensor.dtype, dims(operand), tensor.name)
    }

    /// Checks that a copy has one source and one target with the same type and dimensions, and one parameter.
    pub(super) fn copy_shape(&self, task: &Task) -> Option<String> {
        let graph = self.graph();
        let ([source], [target]) = (graph.inputs(task), graph.outputs(task)) else {
            return Some("must have one input and one output".into());
        };
        if self.dtype(source) != self.dtype(target) || dims(source) != dims(target) {
            return Some(format!(
                "copies {} into {}: both must have the same type and dimensions",
                self.view(source),
                self.view(target)
            ));
        }
        if dims(source).is_empty() || !contiguous(source) || !contiguous(target) {
            return Some(format!(
                "copies {} into {}: both must have a last dimension whose elements are adjacent",
                self.view(source),
                self.view(target)
            ));
        }
        match self.params(task) {
            &[rows] => self.rows_in_use(rows, source),
            params => Some(format!(
                "has the parameters {params:?}, but a copy has exactly one: which rows are in use"
            )),
        }
    }

    /// Checks that a sum has the operands and parameters that its flags stand for.
    pub(super) fn sum_shape(&self, task: &Task) -> Option<String> {
        let graph = self.graph();
        let params = self.params(task);
        let [world, rank, rows, flags, ..] = *params else {
            return Some(format!("has the parameters {params:?}, but a sum has at least four"));
        };
        if rank >= world || flags >= 2 * FOLLOWED {
            return Some(format!(
                "has the parameters {params:?}: the second must be less than the first, and the fourth at most {}",
                2 * FOLLOWED - 1
            ));
        }
        let has = |flag: u32| flags & flag != 0;
        let (inputs, outputs) = (graph.inputs(task), graph.outputs(task));
        // The rank's own summand and those that it received, or only flagged ones.
        let summands = if has(FLAGGED) { 1 } else { 2 };
        let count = summands + usize::from(has(RESIDUAL));
        let fits = match has(FOLLOWED) {
            false => params.len() == 4 && inputs.len() == count && outputs.len() == 1,
            true => inputs.len() >= count && outputs.len() > 1,
        };
        if !fits {
            return Some(format!(
                "has {} inputs, {} outputs and the parameters {params:?}: a sum with the flags {flags} has {} {count} \
                 inputs, {} and {} 4 parameters",
                inputs.len(),
                outputs.len(),
                if has(FOLLOWED) { "at least" } else { "exactly" },
                if has(FOLLOWED) { "at least 2 outputs" } else { "one output" },
                if has(FOLLOWED) { "at least" } else { "exactly" },
            ));
        }
        let (inputs, output) = (&inputs[..count], &outputs[0]);
        let received = &inputs[summands - 1];
        let is_tile = |operand: &Operand| dims(operand) == dims(output);
        let all_received = match *dims(output) {
            [of_rows, columns] => dims(received) == [world, of_rows, columns],
            _ => false,
        };
        let own_fits = match has(FLAGGED) {
            true => self.dtype(received) == DType::F32Flagged,
            false => {
                let dtype = self.dtype(&inputs[0]);
                is_tile(&inputs[0]) && dtype.is_float() && self.dtype(received) == dtype
            }
        };
        let residual_fits =
            !has(RESIDUAL) || (is_tile(&inputs[summands]) && self.dtype(&inputs[summands]) == DType::F32);
        let sound = all_received
            && own_fits
            && residual_fits
            && self.dtype(output).is_float()
            && contiguous(output)
            && inputs.iter().all(contiguous);
        if !sound {
            let read: Vec<String> = inputs.iter().map(|operand| self.view(operand)).collect();
            return Some(format!(
                "sums {} into {}: with the parameters {params:?}, it must read {}[{world}, rows, columns]{}, and \
                 write [rows, columns] of a float type, all with adjacent columns",
                read.join(", "),
                self.view(output),
                if has(FLAGGED) { "flagged " } else { "its own [rows, columns] and, of the same type, " },
                if has(RESIDUAL) { " and f32 [rows, columns]" } else { "" },
            ));
        }
        self.rows_in_use(rows, &inputs[0])
    }

    /// The reason why the rows in use cannot be counted in this way for the rows of this operand.
    fn rows_in_use(&self, kind: u32, operand: &Operand) -> Option<String> {
        let graph = self.graph();
        let tensor = &graph.tensors[operand.tensor as usize];
        let of_tensor = match tensor.rows {
            Rows::Tokens => TOKENS,
            Rows::Samples => SAMPLES,
            Rows::Fixed => ALL,
        };
        // Rows of buffers and of temporaries stand for those of another tensor.
        let stands = kind < ALL && of_tensor == ALL && tensor.role == Role::Activation;
        let never = kind == SAMPLES && graph.capacity.samples == 0 && !dims(operand).contains(&0);
        let fits = (kind == ALL || kind == of_tensor || stands) && !never;
        (!fits).then(|| {
            format!(
                "counts rows of kind {kind} (0: tokens, 1: samples, 2: all) of '{}', whose rows are {}; the graph \
                 has room for {} samples",
                tensor.name, tensor.rows, graph.capacity.samples
            )
        })
    }
}
