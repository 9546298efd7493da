//! Facts about operands that the GPU code of several tasks needs.

use crate::abi;

/// The C++ name of an operand's float type.
///
/// # Errors
/// It is not a float type.
pub fn gpu_float(operand: &abi::mpk_operand) -> Result<&'static str, String> {
    match u32::from(operand.dtype) {
        abi::MPK_F32 => Ok("MPK_F32"),
        abi::MPK_F16 => Ok("MPK_F16"),
        abi::MPK_BF16 => Ok("MPK_BF16"),
        other => Err(format!("an operand of type {other} must be f32, f16 or bf16")),
    }
}

/// Checks that the last dimension of these operands is contiguous.
///
/// # Errors
/// One of them is not contiguous.
pub fn gpu_rows_contiguous<'a>(
    operands: impl IntoIterator<Item = &'a abi::mpk_operand>,
) -> Result<(), String> {
    for operand in operands {
        let last = usize::from(operand.ndim.clamp(1, abi::MPK_MAX_DIMS as u8)) - 1;
        if operand.strides[last] != 1 && operand.dims[last] > 1 {
            return Err(format!("an operand {:?} has gaps in its rows", operand.dims));
        }
    }
    Ok(())
}
