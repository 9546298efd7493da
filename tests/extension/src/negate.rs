//! A task type: `negate`, -x of an f32 matrix.

use kernels_cu::abi;
use kernels_cu::registry::Registration;
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, Partition, TaskSpec, TensorType};
use taskgraph::{DType, Region, Target, TaskType};

/// Registry entry.
pub static REGISTRATION: Registration = Registration {
    name: "negate",
    core_number: None,
    contract: Some(|| Arc::new(Negate)),
    run: Some(run),
    ready: None,
    gpu: None,
};

#[derive(Debug)]
struct Negate;

impl TaskType for Negate {
    fn name(&self) -> &'static str {
        "negate"
    }
    fn is_pure(&self) -> bool {
        true
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        match op.inputs.as_slice() {
            [x] if x.ty.dtype == DType::F32 && x.ty.dims.len() == 2 => Ok(vec![x.ty.clone()]),
            _ => Err(OpError("takes one f32 matrix".into())),
        }
    }
    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (rows, columns) = (op.outputs[0].dims[0] as u32, op.outputs[0].dims[1] as u32);
        let tasks = target.column_tiles(columns, 1).into_iter().map(|tile| {
            let region = Region::whole(&[rows, columns]).with(1, tile.start, tile.end);
            TaskSpec {
                reads: [Access::new(0, region)].into_iter().collect(),
                writes: [Access::new(0, region)].into_iter().collect(),
                cost: region.volume(),
                ..TaskSpec::default()
            }
        });
        Ok(Partition { params: Vec::new(), scratch_bytes: 0, tasks: tasks.collect() })
    }
}

unsafe extern "C" fn run(args: *const abi::mpk_kernel_args) -> i32 {
    // SAFETY: a worker passes arguments that live for the call, with the operands of `partition`.
    let (x, y) = unsafe { (&*(*args).inputs, &*(*args).outputs) };
    for row in 0..y.dims[0] as usize {
        for column in 0..y.dims[1] as usize {
            // SAFETY: the views lie in the tensors' memory, and no other task touches this one's output.
            unsafe {
                let from = (x.addr as *const f32).add(row * x.strides[0] as usize + column);
                *(y.addr as *mut f32).add(row * y.strides[0] as usize + column) = -*from;
            }
        }
    }
    abi::MPK_OK as i32
}
