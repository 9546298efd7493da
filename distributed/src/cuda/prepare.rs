//! The memory of one launch: outputs, and the control memory in place on the device.

use super::device::Context;
use super::memory::{DeviceBuffer, PinnedBuffer, Stream};
use crate::control::{Control, Parts};
use crate::error::{Error, Result};
use crate::image::Image;
use crate::lasting::Lasting;
use crate::memory::HugeBuffer;
use crate::outputs::Outputs;
use crate::plan::BatchPlan;
use crate::tensors::Slot;
use std::sync::Arc;
use taskgraph::task_graph::TaskGraph;

/// The outputs and the control memory for `plan`, in place on the device.
pub(super) fn prepare(
    context: &Arc<Context>,
    stream: &Stream,
    lasting: &Lasting,
    graphs: &[TaskGraph],
    slots: &[Vec<Slot>],
    plan: &BatchPlan,
    sym: &[u64],
) -> Result<(Outputs, Control, DeviceBuffer)> {
    let outputs = Outputs::new(plan, |bytes| {
        PinnedBuffer::new(context, "the results", bytes as usize).map(PinnedBuffer::into_image)
    })?;
    let mut control_memory = None;
    let control = Control::new(&Parts { lasting, graphs, slots, plan, outputs: &outputs, sym }, |bytes| {
        let buffer = DeviceBuffer::new(context, "the task graphs and queues", bytes)?;
        buffer.fill(0, stream)?;
        let base = buffer.address();
        control_memory = Some(buffer);
        Ok(Image::at(HugeBuffer::new(lasting.rank, "the task graphs", bytes as usize)?, base))
    })?;
    let control_memory = control_memory
        .ok_or_else(|| Error::Graph { graph: String::new(), problem: "no control memory".into() })?;
    // SAFETY: the device buffer has room for the whole image; both outlive the wait.
    unsafe { stream.to_device(control_memory.address(), control.image.as_ptr(), control.written) }?;
    stream.wait()?;
    Ok((outputs, control, control_memory))
}
