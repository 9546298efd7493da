//! The parts of a rank that stay the same from launch to launch, and what each launch adds to them.

use super::device::Context;
use super::memory::{DeviceBuffer, PinnedBuffer, Stream};
use crate::arrays::GraphArrays;
use crate::control::{Control, Parts};
use crate::error::{Error, Result};
use crate::heap_layout::HeapLayout;
use crate::image::Image;
use crate::memory::HugeBuffer;
use crate::outputs::Outputs;
use crate::plan::{BatchPlan, RunOptions};
use crate::tensors::Slot;
use std::sync::Arc;
use taskgraph::task_graph::TaskGraph;

/// The parts that stay the same from launch to launch.
pub(super) struct Lasting {
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) schedulers: u32,
    pub(super) arrays: Vec<GraphArrays>,
    pub(super) heap: HeapLayout,
    /// Flagged words, which must be zero before a launch.
    pub(super) flagged: Vec<Slot>,
    pub(super) signals: u32,
    /// The scratch memory of each worker.
    pub(super) scratch: Vec<u64>,
    pub(super) trace: u64,
    pub(super) trace_capacity: u64,
    pub(super) options: RunOptions,
    pub(super) oversubscribed: bool,
    pub(super) host_abort: u64,
    /// The address of the proxy's description, or 0.
    pub(super) proxy: u64,
}

impl Lasting {
    /// The outputs and the control memory for `plan`, in place on the device.
    pub(super) fn launch(
        &self,
        context: &Arc<Context>,
        stream: &Stream,
        graphs: &[TaskGraph],
        slots: &[Vec<Slot>],
        plan: &BatchPlan,
        sym: &[u64],
    ) -> Result<(Outputs, Control, DeviceBuffer)> {
        let outputs = Outputs::new(plan, |bytes| {
            PinnedBuffer::new(context, "the results", bytes as usize).map(PinnedBuffer::into_image)
        })?;
        let mut control_memory = None;
        let control = Control::new(
            &Parts {
                rank: self.rank,
                world: self.world,
                schedulers: self.schedulers,
                graphs,
                arrays: &self.arrays,
                slots,
                plan,
                options: &self.options,
                outputs: &outputs,
                heap: &self.heap,
                sym,
                signals: self.signals,
                scratch: &self.scratch,
                trace: self.trace,
                trace_capacity: self.trace_capacity,
                oversubscribed: u32::from(self.oversubscribed),
                threads_per_core: 0,
                kernels: 0,
                proxy: self.proxy,
                host_abort: self.host_abort,
            },
            |bytes| {
                let buffer = DeviceBuffer::new(context, "the task graphs and queues", bytes)?;
                buffer.fill(0, stream)?;
                let base = buffer.address();
                control_memory = Some(buffer);
                Ok(Image::at(HugeBuffer::new(self.rank, "the task graphs", bytes as usize)?, base))
            },
        )?;
        let control_memory = control_memory
            .ok_or_else(|| Error::Graph { graph: String::new(), problem: "no control memory".into() })?;
        // SAFETY: the device buffer has room for the whole image; both outlive the wait.
        unsafe { stream.to_device(control_memory.address(), control.image.as_ptr(), control.written) }?;
        stream.wait()?;
        Ok((outputs, control, control_memory))
    }
}
