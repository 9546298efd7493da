//! Conversion between the element types of weights.

use crate::model::hf_config::WeightDtype;

/// Converts `source`, elements of `from`, to elements of `to`; both little-endian, of the same count. Rounds to
/// nearest even.
pub(crate) fn convert(from: WeightDtype, source: &[u8], to: WeightDtype, out: &mut [u8]) {
    use half::{bf16, f16};

    use WeightDtype::{Bf16, F16, F32};

    fn each<const N: usize, const M: usize>(
        source: &[u8],
        out: &mut [u8],
        convert: impl Fn([u8; N]) -> [u8; M],
    ) {
        let (source, _) = source.as_chunks::<N>();
        let (out, _) = out.as_chunks_mut::<M>();
        for (out, source) in out.iter_mut().zip(source) {
            *out = convert(*source);
        }
    }
    match (from, to) {
        (F32, F32) | (F16, F16) | (Bf16, Bf16) => out.copy_from_slice(source),
        (F32, F16) => {
            each(source, out, |v| f16::from_f32(f32::from_le_bytes(v)).to_le_bytes());
        }
        (F32, Bf16) => {
            each(source, out, |v| bf16::from_f32(f32::from_le_bytes(v)).to_le_bytes());
        }
        (F16, F32) => each(source, out, |v| f16::from_le_bytes(v).to_f32().to_le_bytes()),
        (Bf16, F32) => each(source, out, |v| bf16::from_le_bytes(v).to_f32().to_le_bytes()),
        (F16, Bf16) => each(source, out, |v| bf16::from_f32(f16::from_le_bytes(v).to_f32()).to_le_bytes()),
        (Bf16, F16) => each(source, out, |v| f16::from_f32(bf16::from_le_bytes(v).to_f32()).to_le_bytes()),
    }
}
