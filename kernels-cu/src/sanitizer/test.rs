//! What the region sanitizer lets through and what it reports, with the kernels of `src/cpu/sanitizer/probe.cpp`, and one real
//! kernel whose task declares too little.

use crate::abi;
use crate::testing::{TestBatch, TestRank, TestTask, TestTensor, call_kernel};
use std::ffi::CStr;
use taskgraph::task_type::Access;
use taskgraph::{DType, Region};

const REFUSED: i32 = abi::MPK_ABORT_KERNEL as i32;

/// `add` of four rows of 8, with the rows that the task declares for each operand. With `slot`, the output stands
/// for the single row of this slot.
fn add_rows(rows: [u32; 3], slot: Option<u32>) -> i32 {
    let values = vec![1.0; 32];
    let mut tensors: Vec<TestTensor> =
        (0..3).map(|_| TestTensor::new(DType::F32, &[4, 8], &values)).collect();
    let view =
        |t: &mut TestTensor, rows: u32| t.view(&Access::new(0, Region::whole(&[4, 8]).with(0, 0, rows)));
    let declared: Vec<_> = tensors.iter_mut().zip(rows).map(|(t, rows)| view(t, rows)).collect();
    let memory: Vec<_> = tensors.iter_mut().map(|t| view(t, 4)).collect();
    let task = TestTask {
        params: crate::abi::params_words(&crate::abi::mpk_add_params { rows_kind: 0, first_row: 0 }),
        inputs: declared[..2].to_vec(),
        outputs: declared[2..].to_vec(),
        ..TestTask::default()
    };
    let kernel = super::kernel("add").unwrap().unwrap();
    super::forget(memory.as_ptr(), memory.len()).unwrap();
    super::forget(task.outputs.as_ptr(), 1).unwrap();
    if let Some(slot) = slot {
        let declare = super::library().unwrap().declare;
        // SAFETY: as in `declare`.
        unsafe { declare(task.outputs.as_ptr(), 0, slot, [0; 4].as_ptr(), [4, 8, 1, 1].as_ptr()) };
    }
    call_kernel(kernel, "add", &task, &memory, &mut TestBatch::rows(4), &TestRank::default())
}

#[test]
fn a_row_beyond_the_declared_ones_is_seen() {
    assert_eq!(add_rows([4, 4, 4], None), 0);
    assert_eq!(add_rows([4, 2, 4], None), REFUSED, "reads rows 2 and 3 of input 1");
    assert_eq!(add_rows([2, 2, 2], None), 0, "no more rows than the output has");
    assert_eq!(add_rows([4, 4, 4], Some(1)), REFUSED, "writes rows of other slots");
    assert_eq!(add_rows([4, 4, 4], None), 0);
}

/// A rank with the memory that a real one has. Every array is larger than what a probe touches.
struct Machine {
    /// Three tensors of [4, 8], one after the other: x, y and z.
    tensors: Box<[f32; 96]>,
    operands: Vec<abi::mpk_operand>,
    words: Vec<u64>,
    numbers: Vec<i32>,
    scratch: Vec<Vec<u64>>,
    scratch_list: Vec<*mut u8>,
    status: Vec<abi::mpk_status>,
    trace: Vec<abi::mpk_trace_record>,
    trace_count: Vec<u64>,
    requests: Vec<abi::mpk_request>,
    control: Box<abi::mpk_control>,
    sym: Vec<*mut u8>,
    variant: Box<abi::mpk_variant>,
    task: Box<abi::mpk_task>,
    config: Box<abi::mpk_batch_config>,
    output: Box<abi::mpk_batch_output>,
    batch: Box<abi::mpk_batch>,
    graph: Box<abi::mpk_graph>,
    rank: Box<abi::mpk_rank>,
}

/// Bytes of scratch memory that the probe's variant asks for; a worker has four times as many.
const SCRATCH: u32 = 256;

impl Machine {
    fn new() -> Machine {
        let mut tensors = Box::new([0.0f32; 96]);
        let operand = |tensor: usize| abi::mpk_operand {
            addr: &raw const tensors[32 * tensor] as u64,
            dims: [4, 8, 1, 1],
            strides: [8, 1, 0, 0],
            dtype: abi::MPK_F32 as u8,
            ndim: 2,
            layout: abi::MPK_LAYOUT_STRIDED as u8,
            symmetric: 0,
            pe: -1,
        };
        let operands = (0..3).map(operand).collect();
        tensors[0] = 1.0;
        let mut control = Box::new(abi::mpk_control::default());
        let mut machine = Machine {
            tensors,
            operands,
            words: vec![0; 512],
            numbers: vec![0; 512],
            scratch: vec![vec![0; SCRATCH as usize / 2]; 2],
            scratch_list: Vec::new(),
            status: vec![abi::mpk_status::default(); 2],
            trace: vec![abi::mpk_trace_record::default(); 12],
            trace_count: vec![0; 3],
            requests: vec![abi::mpk_request::default(); 4],
            sym: vec![(&raw mut *control).cast()],
            control,
            variant: Box::new(abi::mpk_variant { scratch_bytes: SCRATCH, ..Default::default() }),
            task: Box::default(),
            config: Box::default(),
            output: Box::default(),
            batch: Box::default(),
            graph: Box::default(),
            rank: Box::default(),
        };
        machine.connect();
        machine
    }

    fn connect(&mut self) {
        self.scratch_list = self.scratch.iter_mut().map(|s| s.as_mut_ptr().cast()).collect();
        // Arrays of four entries each, 16 entries apart.
        let numbers = self.numbers.as_mut_ptr();
        let array = |index: usize| numbers.wrapping_add(index * 16);
        *self.config = abi::mpk_batch_config {
            max_batch: 4,
            max_rows: 4,
            max_samples: 4,
            pages_per_slot: 2,
            page_size: 16,
            num_requests: 4,
            num_eos: 1,
            tokens: array(12),
            eos: array(13),
            requests: self.requests.as_ptr(),
            ..Default::default()
        };
        *self.batch = abi::mpk_batch {
            num_rows: 4,
            epoch: 1,
            row_token: array(0),
            row_active: array(1),
            row_position: array(2),
            active_slot: array(3),
            active_first_row: array(4),
            active_num_rows: array(5),
            active_context: array(6),
            sample_row: array(7),
            sample_active: array(8),
            active_num_samples: array(9),
            page_table: array(10),
            ..Default::default()
        };
        *self.task = abi::mpk_task { num_inputs: 1, num_outputs: 1, ..Default::default() };
        *self.graph = abi::mpk_graph {
            num_tasks: 1,
            num_events: 4,
            num_variants: 1,
            num_operands: 3,
            tasks: &raw const *self.task,
            variants: &raw const *self.variant,
            operands: self.operands.as_ptr(),
            counters: self.words.as_mut_ptr(),
            ..Default::default()
        };
        *self.rank = abi::mpk_rank {
            world: 1,
            num_workers: 2,
            num_graphs: 1,
            deadline_ns: 1_000_000,
            sym: self.sym.as_mut_ptr(),
            control: &raw mut *self.control,
            graphs: &raw mut *self.graph,
            batch_config: &raw mut *self.config,
            batch: &raw mut *self.batch,
            batch_output: &raw mut *self.output,
            remote_pushed: self.words.as_mut_ptr().wrapping_add(256),
            scratch: self.scratch_list.as_mut_ptr(),
            status: self.status.as_mut_ptr(),
            trace: self.trace.as_mut_ptr(),
            trace_count: self.trace_count.as_mut_ptr(),
            trace_capacity: 4,
            ..Default::default()
        };
        let operands = self.operands.as_ptr();
        super::forget(operands, 3).unwrap();
        for (operand, name) in self.operands.iter().zip(["x", "y", "z"]) {
            super::name_tensor(operands, name, (operand.addr, 128), 32, false).unwrap();
        }
    }

    /// Calls a probe as worker 0, with x as its input and y as its output. Returns its code and the report.
    fn call(&mut self, probe: &str, what: i32, address: u64) -> (i32, String) {
        self.task.args[..3].copy_from_slice(&[what, address as i32, (address >> 32) as i32]);
        let args = abi::mpk_kernel_args {
            rank: &raw const *self.rank,
            graph: &raw const *self.graph,
            task: &raw const *self.task,
            inputs: self.operands.as_ptr(),
            outputs: self.operands.as_ptr().wrapping_add(1),
            params: self.variant.params.as_ptr(),
            batch: &raw const *self.batch,
            scratch: self.scratch_list[0],
            worker: 0,
            task_index: 2,
        };
        let kernel = super::kernel(probe).unwrap().unwrap();
        let report = super::symbol(super::library().unwrap().handle, "mpk_sanitizer_report").unwrap();
        // SAFETY: report.cpp defines a function of this type under this name.
        let report: extern "C" fn() -> *const libc::c_char = unsafe { std::mem::transmute(report) };
        // SAFETY: everything that the probe may access outlives the call. It is stopped before any other access.
        let code = unsafe { kernel(&args) };
        // SAFETY: the text belongs to this thread, and ends with 0.
        (code, unsafe { CStr::from_ptr(report()) }.to_string_lossy().into_owned())
    }
}

const READ: i32 = 1;
const WRITE: i32 = 2;
const COPY_64_FROM: i32 = 3;
const CLEAR_64_AT: i32 = 4;
const ADD: i32 = 5;

#[test]
fn accesses_permitted_to_every_task_pass() {
    let mut machine = Machine::new();
    let (code, report) = machine.call("probe", 0, 0);
    assert_eq!((code, &report[..]), (0, ""));
    let (x, y) = (machine.operands[0].addr, machine.operands[1].addr);
    for (what, address) in [(READ, x + 124), (COPY_64_FROM, x + 64), (WRITE, y + 124), (CLEAR_64_AT, y + 64)]
    {
        let (code, report) = machine.call("probe", what, address);
        assert_eq!((code, &report[..]), (0, ""), "{what}");
    }
}

#[test]
fn everything_else_is_reported_before_it_happens() {
    let mut machine = Machine::new();
    let (x, y, z) = (machine.operands[0].addr, machine.operands[1].addr, machine.operands[2].addr);
    let scratch: Vec<u64> = machine.scratch_list.iter().map(|s| *s as u64).collect();
    let at = |numbers: *mut i32| numbers as u64;
    let (batch, config, rank) = (&machine.batch, &machine.config, &machine.rank);
    let cases = [
        (READ, z + 36, "reads 4 bytes", "tensor z, row 1, byte 4 of the row"),
        (WRITE, z + 36, "writes 4 bytes", "tensor z, row 1, byte 4 of the row"),
        (WRITE, y + 128, "writes 4 bytes", "tensor z, row 0, byte 0 of the row; nearest operand: output 0"),
        (CLEAR_64_AT, y + 96, "writes 32 bytes", "tensor z, row 0, byte 0"),
        (COPY_64_FROM, x + 96, "reads 32 bytes", "of an output that it has not written: tensor y, row 0"),
        (READ, y, "reads 4 bytes", "of an output that it has not written: tensor y, row 0"),
        (WRITE, x, "writes 4 bytes", "tensor x, row 0"),
        (WRITE, &raw const batch.num_rows as u64, "writes 4 bytes", "byte 12 of mpk_batch;"),
        (WRITE, at(batch.row_token) + 4, "writes 4 bytes", "byte 4 of mpk_batch.row_token"),
        (ADD, at(batch.active_context), "that it did not declare", "byte 0 of mpk_batch.active_context"),
        (WRITE, at(batch.page_table), "writes 4 bytes", "byte 0 of mpk_batch.page_table"),
        (READ, at(batch.page_table) + 32, "reads 4 bytes", "neither a tensor's nor the runtime's"),
        (WRITE, &raw const config.page_size as u64, "writes 4 bytes", "of mpk_batch_config"),
        (READ, config.requests as u64 + 72, "reads 4 bytes", "byte 72 of the request table"),
        (READ, config.eos as u64, "reads 4 bytes", "the end-of-sequence ids"),
        (READ, scratch[1], "reads 4 bytes", "byte 0 of the scratch memory of worker 1"),
        (WRITE, scratch[1] + 8, "writes 4 bytes", "byte 8 of the scratch memory of worker 1"),
        (WRITE, scratch[0] + u64::from(SCRATCH), "writes 4 bytes", "neither a tensor's nor the runtime's"),
        (ADD, machine.words.as_ptr() as u64 + 64, "", "byte 64 of the event counters of graph 0"),
        (READ, &raw const machine.control.iteration as u64, "reads 4 bytes", "of mpk_control of rank 0"),
        (WRITE, &raw const machine.control.abort as u64, "writes 4 bytes", "byte 0 of mpk_control of rank 0"),
        (WRITE, machine.status.as_ptr() as u64, "writes 4 bytes", "mpk_status of worker 0"),
        (READ, machine.trace.as_ptr() as u64, "reads 4 bytes", "the timeline of worker 0"),
        (WRITE, machine.sym.as_ptr() as u64, "writes 4 bytes", "mpk_rank.sym"),
        (WRITE, machine.operands.as_ptr() as u64, "writes 4 bytes", "the task's operand descriptors"),
        (
            READ,
            &raw const machine.operands[2] as u64,
            "reads 4 bytes",
            "byte 96 of the operand descriptors of graph 0",
        ),
        (READ, &raw const *machine.graph as u64, "reads 4 bytes", "the graphs"),
        (WRITE, machine.variant.params.as_ptr() as u64, "writes 4 bytes", "the parameters of its variant"),
        (READ, rank.remote_pushed as u64, "reads 4 bytes", "the numbers of remote triggers pushed"),
        (WRITE, &raw const machine.output.finished as u64, "writes 4 bytes", "mpk_batch_output"),
        (READ, &raw const x as u64, "reads 4 bytes", "neither a tensor's nor the runtime's"), // the caller's frame
        (READ, 16, "reads 4 bytes", "neither a tensor's nor the runtime's"),
    ];
    let values = machine.tensors.clone();
    for (what, address, access, place) in cases {
        // What the address holds, if it is mapped.
        // SAFETY: all addresses but the last are those of memory that this test holds.
        let read = |a: u64| if a > 4096 { unsafe { (a as *const u32).read_volatile() } } else { 0 };
        let before = read(address);
        let (code, report) = machine.call("probe", what, address);
        assert_eq!(code, REFUSED, "operation {what} at {place}");
        assert!(
            report.starts_with("region sanitizer: rank 0, worker 0: probe task 2 (operator 0"),
            "{report}"
        );
        assert!(report.contains(access) && report.contains(place), "{report}\nlacks {access:?} or {place:?}");
        assert_eq!(read(address), before, "{report}");
    }
    assert_eq!(machine.tensors, values);
    let (code, _) = machine.call("probe", 0, 0);
    assert_eq!(code, 0, "a refused task leaves nothing behind");
}

#[test]
fn a_wait_for_flagged_words_passes_and_its_test_is_checked() {
    let mut machine = Machine::new();
    let plain = machine.operands[0];
    machine.operands[0].dtype = abi::MPK_F32_FLAGGED as u8;
    machine.operands[0].dims = [1, 4, 1, 1];
    machine.task.flag_count = 1;
    let z = machine.operands[2].addr;
    let (code, report) = machine.call("probe_wait", 0, 0);
    assert_eq!((code, &report[..]), (abi::MPK_ABORT_DEADLINE as i32, ""), "no word arrives");
    assert_eq!(machine.control.abort, abi::MPK_ABORT_DEADLINE);
    assert_eq!(machine.status[0].timed_out, 1);
    // The test of flagged words cannot fail. It says yes, and the task then fails.
    let (code, report) = machine.call("probe_ready", READ, z);
    assert_eq!(code, 1);
    assert!(report.contains("tensor z, row 0"), "{report}");
    machine.operands[0] = plain;
    assert_eq!(machine.call("probe", 0, 0).0, REFUSED);
    assert_eq!(machine.call("probe", 0, 0).0, 0);
}

#[test]
fn pages_of_slots_that_are_not_active_are_reported() {
    let mut machine = Machine::new();
    // x is a cache of four pages of two planes, one token of two elements each. Slot 0 is active, with pages 2 and 1, and two tokens.
    machine.operands[0].dims = [4, 2, 1, 2];
    machine.operands[0].strides = [4, 2, 2, 1];
    machine.operands[0].ndim = 4;
    machine.config.page_size = 1;
    machine.batch.num_active = 1;
    let x = machine.operands[0].addr;
    machine.numbers[5 * 16] = 1; // its rows in this iteration
    machine.numbers[6 * 16] = 1; // its context
    machine.numbers[10 * 16] = 2;
    machine.numbers[10 * 16 + 1] = 1;
    let declare = super::library().unwrap().declare;
    // SAFETY: as in `declare`.
    unsafe { declare(machine.operands.as_ptr(), 2, 0, [0; 4].as_ptr(), [4, 1, 1, 1].as_ptr()) };
    for (page, allowed) in [(0, false), (1, true), (2, true), (3, false)] {
        let (code, _) = machine.call("probe", READ, x + page * 16 + 8);
        assert_eq!(code == 0, allowed, "page {page}");
    }
}
