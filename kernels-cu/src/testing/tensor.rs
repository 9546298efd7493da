//! Tensors of tests.

use crate::abi;
use crate::layout;
use half::{bf16, f16};
use std::fmt::Debug;
use taskgraph::op_graph::Role;
use taskgraph::task_type::{Access, TensorType};
use taskgraph::{DType, Rows};

/// Zero-filled memory, aligned to a cache line.
#[derive(Clone)]
pub struct AlignedBytes {
    lines: Vec<CacheLine>,
    len: usize,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

impl AlignedBytes {
    /// `len` bytes of 0.
    pub fn new(len: usize) -> Self {
        AlignedBytes { lines: vec![CacheLine([0; 64]); len.div_ceil(64)], len }
    }
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the lines are `len` rounded up to 64 initialised bytes.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
    /// The bytes, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

impl Debug for AlignedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

/// A tensor of a test.
#[derive(Clone, Debug)]
pub struct TestTensor {
    /// Element type.
    pub dtype: DType,
    /// Local dimensions.
    pub dims: Vec<u32>,
    /// `MPK_LAYOUT_STRIDED` or `MPK_LAYOUT_TILED`.
    pub layout: u8,
    /// What the first dimension counts.
    pub rows: Rows,
    /// Its role in a graph.
    pub role: Role,
    /// Its memory.
    pub data: AlignedBytes,
    /// Rank that owns the memory: -1 this one, -2 every one.
    pub pe: i32,
}

/// `values` as bytes of `dtype`, rounded to nearest even (integers are truncated).
pub fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * dtype.size() as usize);
    for &v in values {
        match dtype {
            DType::F32 => bytes.extend(v.to_ne_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(v).to_ne_bytes()),
            DType::Bf16 => bytes.extend(bf16::from_f32(v).to_ne_bytes()),
            DType::I32 => bytes.extend((v as i32).to_ne_bytes()),
            DType::U32 => bytes.extend((v as u32).to_ne_bytes()),
            DType::U8 => bytes.push(v as u8),
            DType::F32Flagged => bytes.extend(u64::from(v.to_bits()).to_ne_bytes()),
        }
    }
    bytes
}

/// The values in bytes of `dtype`; for flagged words the value without the flag.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let word = |c: &[u8]| u32::from_ne_bytes([c[0], c[1], c[2], c[3]]);
    bytes
        .chunks_exact(dtype.size() as usize)
        .map(|c| match dtype {
            DType::F32 | DType::F32Flagged => f32::from_bits(word(c)),
            DType::F16 => f16::from_ne_bytes([c[0], c[1]]).to_f32(),
            DType::Bf16 => bf16::from_ne_bytes([c[0], c[1]]).to_f32(),
            DType::I32 => word(c) as i32 as f32,
            DType::U32 => word(c) as f32,
            DType::U8 => f32::from(c[0]),
        })
        .collect()
}

/// `values` rounded to `dtype` and back.
pub fn rounded(dtype: DType, values: &[f32]) -> Vec<f32> {
    decode(dtype, &encode(dtype, values))
}

impl TestTensor {
    /// A strided tensor of these values, row-major.
    pub fn new(dtype: DType, dims: &[u32], values: &[f32]) -> Self {
        let mut tensor = Self::poisoned(dtype, dims);
        tensor.data.bytes_mut().copy_from_slice(&encode(dtype, values));
        tensor
    }

    /// A strided tensor in which every byte is 0xff: NaN in all float types.
    pub fn poisoned(dtype: DType, dims: &[u32]) -> Self {
        let elements: u64 = dims.iter().map(|d| u64::from(*d)).product();
        let mut data = AlignedBytes::new((elements * dtype.size()) as usize);
        data.bytes_mut().fill(0xff);
        TestTensor {
            dtype,
            dims: dims.to_vec(),
            layout: abi::MPK_LAYOUT_STRIDED as u8,
            rows: Rows::Tokens,
            role: Role::Activation,
            data,
            pe: -1,
        }
    }

    /// A weight `[rows, k]` in tiled layout, or a vector, which stays unchanged.
    pub fn weight(dtype: DType, dims: &[u32], values: &[f32]) -> Self {
        let mut tensor = Self::new(dtype, dims, values);
        if let [rows, k] = *dims {
            let source = encode(dtype, values);
            tensor.layout = abi::MPK_LAYOUT_TILED as u8;
            tensor.data = AlignedBytes::new(layout::tiled_bytes(rows as usize, k as usize, dtype));
            let (rows, k) = (rows as usize, k as usize);
            layout::pack_rows(tensor.data.bytes_mut(), dtype, k, 0, &source, dtype, k, 0..k, rows);
        }
        tensor.rows = Rows::Fixed;
        tensor.role = Role::Weight { parts: Vec::new() };
        tensor
    }

    /// The same tensor; its rows count this.
    pub fn with_rows(mut self, rows: Rows) -> Self {
        self.rows = rows;
        self
    }

    /// The same tensor with another role.
    pub fn with_role(mut self, role: Role) -> Self {
        self.role = role;
        self
    }

    /// Its values, row-major (strided tensors).
    pub fn values(&self) -> Vec<f32> {
        decode(self.dtype, self.data.bytes())
    }

    /// Its 4-byte words.
    pub fn words(&self) -> Vec<u32> {
        self.data.bytes().chunks_exact(4).map(|c| u32::from_ne_bytes([c[0], c[1], c[2], c[3]])).collect()
    }

    /// Its type, with its own dimensions.
    pub fn ty(&self) -> TensorType {
        TensorType {
            dtype: self.dtype,
            dims: self.dims.iter().map(|d| u64::from(*d)).collect(),
            rows: self.rows,
        }
    }

    /// The operand that a task gets for this access, which must start at a whole tile in a tiled tensor.
    pub fn view(&mut self, access: &Access) -> abi::mpk_operand {
        let mut operand = abi::mpk_operand {
            addr: self.data.bytes_mut().as_mut_ptr() as u64,
            dims: [1; 4],
            strides: [0; 4],
            dtype: self.dtype as u8,
            ndim: self.dims.len() as u8,
            layout: self.layout,
            symmetric: u8::from(self.pe != -1),
            pe: self.pe,
        };
        let mut stride = 1u32;
        for d in (0..self.dims.len()).rev() {
            operand.strides[d] = stride;
            stride *= self.dims[d];
        }
        let tiled = self.layout == abi::MPK_LAYOUT_TILED as u8;
        if tiled {
            operand.strides[0] = self.dims[1].next_multiple_of(abi::MPK_TILE_K);
        }
        let mut offset = 0u64;
        for d in 0..self.dims.len() {
            let (lo, hi) = if access.trust.is_some() {
                (0, self.dims[d])
            } else {
                (access.region.lo[d], access.region.hi[d])
            };
            assert!(lo <= hi && hi <= self.dims[d], "region {} outside of {:?}", access.region, self.dims);
            operand.dims[d] = hi - lo;
            offset += u64::from(lo) * u64::from(operand.strides[d]);
            assert!(!tiled || lo % 16 == 0 && (d == 0 || hi % 16 == 0 || hi == self.dims[d]));
        }
        if tiled {
            // Column c of a tile begins at its element 16 c.
            offset += u64::from(access.region.lo[1]) * 15;
        }
        if access.inner {
            assert_eq!(operand.dims[0], 1, "region {} has several indices", access.region);
            operand.dims[..self.dims.len()].rotate_left(1);
            operand.strides[..self.dims.len()].rotate_left(1);
            operand.ndim -= 1;
        }
        operand.addr += offset * self.dtype.size();
        operand
    }
}
