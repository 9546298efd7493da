//! The GPU code of a product of few rows.

use super::Family;
use super::gated::gpu_layout;
use crate::abi::{self, mpk_linear_params};
use crate::registry::GpuSite;
use crate::tasks::operand::{gpu_float, gpu_rows_contiguous};
use crate::tasks::source::Source;

/// Code for normed rows is compiled for multiples of this number of columns, so that shapes share it.
const COLUMNS_STEP: u32 = 4096;

/// The same for rows that are several summands.
const COLUMNS_OF_PARTS_STEP: u32 = 1024;

impl Family {
    /// The GPU code of a task (`src/gpu/linear.cuh`), for [`crate::registry::Registration::gpu`].
    ///
    /// # Errors
    /// The reason why that code cannot run the task.
    pub fn gpu(self, site: &GpuSite<'_>) -> Result<String, String> {
        let words = size_of::<mpk_linear_params>() / 4;
        let bytes = bytemuck::cast_slice(site.params.get(..words).ok_or("its parameters are too few")?);
        let params: mpk_linear_params = bytemuck::pod_read_unaligned(bytes);
        let norm = usize::from(self.source == Source::RmsNorm);
        let halves = self.halves() as usize;
        let count =
            2 + norm + halves * usize::from(params.has_bias != 0) + usize::from(params.has_residual != 0);
        let ([x, ..], [out]) = (site.inputs, site.outputs) else {
            return Err("it must have inputs and one output".to_string());
        };
        if params.gated != u32::from(self.gated) {
            return Err(format!("its parameters say gated {}, but its type does not", params.gated));
        }
        if site.inputs.len() != count {
            return Err(format!("its parameters describe {count} inputs, not {}", site.inputs.len()));
        }
        let weight = &site.inputs[1 + norm];
        let (k, stride) = (weight.dims[1], weight.strides[0]);
        // A task may have a part of k.
        let cut = stride > k.next_multiple_of(abi::MPK_FRAGMENT_K);
        if u32::from(weight.layout) != gpu_layout(self.gated)
            || stride < k
            || !stride.is_multiple_of(abi::MPK_FRAGMENT_K)
            || cut && (self.source != Source::Plain || self.gated)
        {
            return Err(format!("its weight [{}, {k}] is not packed for the GPU", weight.dims[0]));
        }
        let wanted = self.x_columns(k.into());
        let x_columns = if x.ndim == 3 { x.dims[2] } else { x.dims[1] };
        if u64::from(x_columns) != wanted {
            return Err(format!("x has {x_columns} columns, but the weight needs {wanted}"));
        }
        let residual = (params.has_residual != 0).then(|| &site.inputs[count - 1]);
        // Only rows that are loaded at once need code for their number of summands.
        let parts = match x.ndim {
            3 => x.dims[0],
            _ => 1 + u32::from(cut || residual.is_some_and(|residual| residual.ndim == 3)),
        };
        let strided =
            site.inputs.iter().chain([out]).filter(|o| u32::from(o.layout) == abi::MPK_LAYOUT_STRIDED);
        gpu_rows_contiguous(strided)?;
        let eights = match out.dims[0] {
            0..=8 => 1,
            9..=16 => 2,
            _ => 4,
        };
        let source = match self.source {
            Source::Plain => "kPlain",
            Source::RmsNorm => "kRmsNorm",
            Source::SiluMul => "kSiluMul",
        };
        if out.dtype != abi::MPK_F32_FLAGGED as u8 {
            gpu_float(out)?;
        }
        // Only rows that are normed are kept in registers. Summands have few columns, since their writer has few tiles.
        let step = if parts > 1 { COLUMNS_OF_PARTS_STEP } else { COLUMNS_STEP };
        let most = if norm == 1 { k.max(1).next_multiple_of(step) } else { 0 };
        let parts = if parts > 1 { format!(", {parts}") } else { String::new() };
        Ok(format!(
            "mpk::gpu::Linear<{}, mpk::gpu::{source}, {most}, {eights}, {}, {}{parts}>",
            gpu_float(weight)?,
            gpu_float(x)?,
            if norm == 1 { gpu_float(&site.inputs[1])? } else { "MPK_F32" },
        ))
    }
}
