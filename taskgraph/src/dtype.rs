//! Element types of tensors.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Element type of a tensor. The numbers are those of `enum mpk_dtype` in the ABI header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum DType {
    /// IEEE single precision.
    F32 = 0,
    /// IEEE half precision.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
    /// 32-bit signed integer.
    I32 = 3,
    /// 32-bit unsigned integer.
    U32 = 4,
    /// Byte.
    U8 = 5,
    /// An f32 in an 8-byte word whose upper half is the epoch that wrote it. A reader waits for the epoch.
    F32Flagged = 6,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::Bf16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F32Flagged => 8,
        }
    }

    /// The name used in files: `f32`, `f16`, `bf16`, `i32`, `u32`, `u8`, `f32_flagged`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::U8 => "u8",
            DType::F32Flagged => "f32_flagged",
        }
    }

    /// True for f32, f16 and bf16, the types that a matrix product accepts.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::Bf16)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
