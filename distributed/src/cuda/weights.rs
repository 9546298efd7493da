//! How weights reach the GPU: reader threads fill pinned buffers, copies move them to the device, and a kernel
//! (kernels-cu/src/gpu/weights.cuh) packs them into their places.

use super::device::Context;
use super::library::{Kernel, Library, Shape};
use super::memory::{DeviceBuffer, PinnedBuffer, Stream};
use crate::error::{Error, Result};
use crate::fill::{Piece, TensorSource, Values};
use crate::tensors::Slot;
use kernels_cu::abi;
use kernels_cu::layout::layout_of;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use taskgraph::target::Backend;
use taskgraph::task_graph::TensorEntry;

/// Bytes that are read, copied and packed at a time, unless a single row is longer.
const CHUNK: u64 = 8 << 20;
/// Number of buffers per reader: while one is copied and packed, the next is filled.
const BUFFERS: usize = 3;
const THREADS: u32 = 256;

/// `mpk_weights_target`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Target {
    addr: u64,
    stride: u64,
    first_row: u64,
    first_column: u64,
    rows: u64,
    columns: u64,
    dtype: u32,
    layout: u32,
    half_rows: u64,
}
const _: () = assert!(size_of::<Target>() == 64);

/// The kernels that write weights.
#[derive(Clone, Copy)]
pub(crate) struct WeightKernels {
    pack: Kernel,
    random: Kernel,
}

impl WeightKernels {
    pub fn of(library: &Library) -> Result<WeightKernels> {
        Ok(WeightKernels {
            pack: library.kernel(c"mpk_pack_weights")?,
            random: library.kernel(c"mpk_fill_random")?,
        })
    }
}

/// A tensor with its pieces.
struct Work<'a> {
    tensor: &'a TensorEntry,
    slot: Slot,
    pieces: Vec<Piece>,
}

/// Some rows of a piece.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Chunk {
    work: usize,
    piece: usize,
    rows: Range<u64>,
}

/// Ranges of a piece's rows that are handled together. If the tensor is packed, they are whole tiles, so that each tile is
/// written once.
fn chunk_rows(first_row: u64, rows: u64, row_bytes: u64, chunk: u64) -> Vec<Range<u64>> {
    let most = (chunk / row_bytes.max(1)).max(1);
    let tile = u64::from(abi::MPK_TILE_ROWS);
    let mut list = Vec::new();
    let mut row = 0;
    while row < rows {
        let mut end = row + most;
        // Back to the last tile boundary, if there is one in the range.
        let aligned = (first_row + end) / tile * tile;
        if aligned > first_row + row {
            end = aligned - first_row;
        }
        let end = end.min(rows);
        list.push(row..end);
        row = end;
    }
    list
}

/// The destination of rows of a piece.
fn target(tensor: &TensorEntry, slot: Slot, piece: &Piece, rows: &Range<u64>) -> Target {
    let stride = match tensor.strides[..] {
        [] | [_] => piece.first_column + piece.columns,
        [stride, ..] => u64::from(stride),
    };
    Target {
        addr: slot.address,
        stride,
        first_row: piece.first_row + rows.start,
        first_column: piece.first_column,
        rows: rows.end - rows.start,
        columns: piece.columns,
        dtype: tensor.dtype as u32,
        layout: u32::from(layout_of(tensor, Backend::Cuda)),
        half_rows: tensor.dims.first().map_or(0, |&rows| u64::from(rows / 2)),
    }
}

/// Bytes per row of a piece, as it is read.
fn row_bytes(piece: &Piece) -> u64 {
    match &piece.values {
        Values::Rows { dtype, .. } => piece.columns * dtype.size(),
        _ => 0,
    }
}

/// Checks that the piece is inside its tensor, so that the kernels do not write outside.
fn check_inside(tensor: &TensorEntry, piece: &Piece) -> Result<()> {
    let dims: Vec<u64> = tensor.dims.iter().map(|&d| u64::from(d)).collect();
    let (rows, columns) = match dims[..] {
        [] => (1, 1),
        [columns] => (1, columns),
        [rows, columns] => (rows, columns),
        _ => (dims[0], dims[1..].iter().product()),
    };
    let fits = match &piece.values {
        Values::Bytes(bytes) => bytes.len() as u64 <= tensor.bytes,
        _ => {
            piece.first_row + piece.rows <= rows
                && piece.first_column + piece.columns <= columns
                && (!tensor.tiled || piece.first_column == 0)
                && tensor.dtype.is_float()
        }
    };
    if fits {
        return Ok(());
    }
    Err(Error::Graph {
        graph: tensor.name.clone(),
        problem: format!("a piece of {} x {} values does not fit in {dims:?}", piece.rows, piece.columns),
    })
}

/// Fills `tensors`, whose memory is zero, with the values of `source`. `done` gets the number of bytes of finished tensors.
pub(crate) fn fill<S: TensorSource>(
    context: &Arc<Context>,
    kernels: WeightKernels,
    tensors: Vec<(&TensorEntry, Slot)>,
    threads: usize,
    source: &S,
    done: impl Fn(u64) + Sync,
) -> std::result::Result<(), S::Error> {
    let mut works = Vec::new();
    for (tensor, slot) in tensors {
        let pieces = source.pieces(tensor)?;
        for piece in &pieces {
            check_inside(tensor, piece)?;
        }
        works.push(Work { tensor, slot, pieces });
    }
    let mut chunks = Vec::new();
    let mut largest = 0;
    let stream = Stream::new(context)?;
    for (index, work) in works.iter().enumerate() {
        for (number, piece) in work.pieces.iter().enumerate() {
            match &piece.values {
                Values::Rows { .. } if piece.rows * piece.columns > 0 => {
                    let bytes = row_bytes(piece);
                    for rows in chunk_rows(piece.first_row, piece.rows, bytes, CHUNK) {
                        largest = largest.max((rows.end - rows.start) * bytes);
                        chunks.push(Chunk { work: index, piece: number, rows });
                    }
                }
                Values::Rows { .. } => {}
                Values::Random { .. } => fill_random(kernels, &stream, work, piece)?,
                // SAFETY: the bytes fit (checked above) and live until the call returns, which reads them first.
                Values::Bytes(bytes) => unsafe {
                    stream.to_device(work.slot.address, bytes.as_ptr(), bytes.len() as u64)?;
                },
            }
        }
    }
    if chunks.is_empty() {
        stream.wait()?;
        works.iter().for_each(|work| done(work.slot.bytes));
        return Ok(());
    }
    let next = AtomicUsize::new(0);
    let reader = || -> std::result::Result<(), S::Error> {
        let read = read_chunks(context, kernels, &works, &chunks, largest, &next, source, &done);
        if read.is_err() {
            next.store(usize::MAX / 2, Ordering::Relaxed);
        }
        read
    };
    let threads = threads.clamp(1, chunks.len());
    std::thread::scope(|scope| {
        crate::fill::threads(scope, threads, |_| reader())?
            .into_iter()
            .try_for_each(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    stream.wait()?;
    Ok(())
}

/// A reader's buffer: data are read into the host's part, copied to the device's part, and packed from there.
struct Stage {
    // Declared before the memory that its work uses: it is dropped first, and waits.
    stream: Stream,
    host: PinnedBuffer,
    device: DeviceBuffer,
}

impl Drop for Stage {
    fn drop(&mut self) {
        // After an error, some work that uses the buffers may remain.
        if !super::device::is_stuck() {
            let _ = self.stream.wait();
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn read_chunks<S: TensorSource>(
    context: &Arc<Context>,
    kernels: WeightKernels,
    works: &[Work<'_>],
    chunks: &[Chunk],
    largest: u64,
    next: &AtomicUsize,
    source: &S,
    done: &impl Fn(u64),
) -> std::result::Result<(), S::Error> {
    context.make_current()?;
    let mut stages: Vec<Stage> = Vec::new();
    let mut turn = 0;
    while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
        if stages.len() < BUFFERS {
            stages.push(Stage {
                stream: Stream::new(context)?,
                host: PinnedBuffer::new(context, "weights on their way", largest as usize)?,
                device: DeviceBuffer::new(context, "weights on their way", largest)?,
            });
            turn = stages.len() - 1;
        } else {
            turn = (turn + 1) % BUFFERS;
        }
        let stage = &mut stages[turn];
        stage.stream.wait()?;
        let work = &works[chunk.work];
        let piece = &work.pieces[chunk.piece];
        let count = chunk.rows.end - chunk.rows.start;
        let bytes = (count * row_bytes(piece)) as usize;
        source.read(piece, chunk.rows.clone(), &mut stage.host.as_mut_slice()[..bytes])?;
        let Values::Rows { dtype, .. } = &piece.values else { continue };
        // SAFETY: both buffers hold at least `largest` bytes; the stage's stream is waited for before they are used again or
        // freed.
        unsafe { stage.stream.to_device(stage.device.address(), stage.host.as_ptr(), bytes as u64) }?;
        pack(
            kernels,
            &stage.stream,
            target(work.tensor, work.slot, piece, &chunk.rows),
            stage.device.address(),
            *dtype as u32,
        )?;
        let all = work.pieces.iter().map(|p| p.rows * p.columns).sum::<u64>().max(1);
        done((u128::from(work.slot.bytes) * u128::from(count * piece.columns) / u128::from(all)) as u64);
    }
    for stage in &stages {
        stage.stream.wait()?;
    }
    Ok(())
}

/// Enough blocks to keep the device busy.
fn shape(target: &Target) -> Shape {
    let units = (target.rows * target.columns).div_ceil(8 * u64::from(THREADS));
    Shape { blocks: units.clamp(1, 4096) as u32, threads: THREADS, shared_bytes: 0 }
}

/// Packs the dense rows of device memory at `rows`.
fn pack(kernels: WeightKernels, stream: &Stream, target: Target, rows: u64, dtype: u32) -> Result<()> {
    let (mut target, mut rows, mut pitch, mut dtype) = (target, rows, target.columns, dtype);
    let mut arguments = [
        (&raw mut target).cast::<c_void>(),
        (&raw mut rows).cast(),
        (&raw mut pitch).cast(),
        (&raw mut dtype).cast(),
    ];
    // SAFETY: the kernel's parameters are (mpk_weights_target, const void*, uint64_t, uint32_t), copied by the call;
    // the target lies inside its tensor (`check_inside`), and `rows` has rows x columns values.
    unsafe { kernels.pack.launch(shape(&target), stream, &mut arguments) }
}

fn fill_random(kernels: WeightKernels, stream: &Stream, work: &Work<'_>, piece: &Piece) -> Result<()> {
    let Values::Random { key, norm, pitch, origin } = &piece.values else { return Ok(()) };
    if piece.rows * piece.columns == 0 {
        return Ok(());
    }
    let mut target = target(work.tensor, work.slot, piece, &(0..piece.rows));
    let (mut key, mut pitch, mut row, mut column, mut norm) =
        (*key, *pitch, origin.0, origin.1, u32::from(*norm));
    let mut arguments = [
        (&raw mut target).cast::<c_void>(),
        (&raw mut key).cast(),
        (&raw mut pitch).cast(),
        (&raw mut row).cast(),
        (&raw mut column).cast(),
        (&raw mut norm).cast(),
    ];
    // SAFETY: the kernel's parameters are (mpk_weights_target, uint64_t x 4, uint32_t), copied by the call; the
    // target lies inside its tensor (`check_inside`).
    unsafe { kernels.random.launch(shape(&target), stream, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use taskgraph::DType;
    use taskgraph::op_graph::{Role, Rows};
    use taskgraph::task_graph::Space;

    fn matrix(rows: u32, columns: u32) -> TensorEntry {
        let stride = columns.next_multiple_of(16);
        TensorEntry {
            name: "w".into(),
            dtype: DType::Bf16,
            dims: vec![rows, columns],
            strides: vec![stride, 1],
            space: Space::Device,
            bytes: u64::from(rows.next_multiple_of(16) * stride) * 2,
            role: Role::Weight { parts: Vec::new() },
            parts: Vec::new(),
            region_dims: vec![rows, columns],
            tiled: true,
            paired: false,
            output: false,
            rows: Rows::Fixed,
            overlay: None,
        }
    }

    fn piece(first_row: u64, rows: u64, columns: u64) -> Piece {
        let values = Values::Rows {
            source: "w".into(),
            shape: vec![rows as usize, columns as usize],
            origin: (0, 0),
            dtype: DType::F32,
        };
        Piece { values, first_row, first_column: 0, rows, columns }
    }

    #[test]
    fn chunks_cover_all_rows_once_and_end_on_tiles() {
        for (first, rows, row_bytes, chunk) in
            [(0, 100, 10, 400), (5, 100, 10, 400), (3, 7, 10, 1000), (0, 40, 1000, 100), (16, 33, 7, 7 * 20)]
        {
            let list = chunk_rows(first, rows, row_bytes, chunk);
            let mut next = 0;
            for (index, range) in list.iter().enumerate() {
                assert_eq!(range.start, next);
                assert!(range.end > range.start && (range.end - range.start) <= (chunk / row_bytes).max(1));
                if index + 1 < list.len() && chunk / row_bytes >= 16 {
                    assert_eq!((first + range.end) % 16, 0, "{list:?}");
                }
                next = range.end;
            }
            assert_eq!(next, rows);
        }
    }

    #[test]
    fn pieces_outside_their_tensor_are_refused() {
        let tensor = matrix(40, 30);
        assert!(check_inside(&tensor, &piece(8, 32, 30)).is_ok());
        assert!(check_inside(&tensor, &piece(9, 32, 30)).is_err());
        assert!(check_inside(&tensor, &piece(0, 40, 31)).is_err());
        let bytes = Piece { values: Values::Bytes(vec![0; 5000]), ..piece(0, 1, 1) };
        assert!(check_inside(&tensor, &bytes).is_err());
    }

    #[test]
    fn targets_name_the_padded_row_and_the_first_row_of_the_chunk() {
        let tensor = matrix(40, 30);
        let slot = Slot { address: 4096, bytes: tensor.bytes };
        let target = target(&tensor, slot, &piece(8, 32, 30), &(8..24));
        assert_eq!((target.addr, target.stride, target.first_row, target.rows), (4096, 32, 16, 16));
        assert_eq!((target.columns, target.dtype, target.layout), (30, 2, abi::MPK_LAYOUT_FRAGMENT));
        assert!(shape(&target).blocks >= 1);
    }
}
