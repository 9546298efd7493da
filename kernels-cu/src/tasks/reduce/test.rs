use crate::abi::{MPK_ABORT_DEADLINE, MPK_OK, mpk_reduce_params, params_words};
use crate::isa::Isa;
use crate::testing::{Call, TestBatch, TestRank, TestTask, TestTensor, random_values, rounded, run_task};
use std::sync::atomic::{AtomicU64, Ordering};
use taskgraph::task_type::Access;
use taskgraph::{DType, Region};

const EPOCH: u32 = 0x4000_0001;
/// The fourth of five flagged tensors: epoch x 5 + 3 has wrapped.
const FLAGS: [u32; 2] = [5, 3];
const TAG: u32 = EPOCH.wrapping_mul(5) + 3;

struct Setup {
    world: u32,
    rank: u32,
    rows: u32,
    used: u32,
    columns: u32,
    dtype: DType,
    /// Element type of the summands.
    summands: DType,
    flagged: bool,
    residual: bool,
}

struct Operands {
    own: TestTensor,
    receive: TestTensor,
    residual: TestTensor,
    out: TestTensor,
    /// The sum in the order that the contract prescribes, for the rows in use.
    expected: Vec<f32>,
    /// The same sum in double precision.
    exact: Vec<f64>,
}

impl Setup {
    /// Tensors twice as wide as the tile, which is in their right half.
    fn operands(&self) -> Operands {
        let (w, r, c) = (self.world as usize, self.rows as usize, self.columns as usize);
        let parts = rounded(self.summands, &random_values(u64::from(self.columns), w * r * 2 * c));
        let residual = random_values(77, r * 2 * c);
        let at = |rank: usize, row: usize, column: usize| (rank * r + row) * 2 * c + c + column;
        let (mut expected, mut exact) = (Vec::new(), Vec::new());
        for row in 0..self.used as usize {
            for column in 0..c {
                let others = if self.residual { f64::from(residual[at(0, row, column)]) } else { 0.0 };
                exact.push((0..w).map(|rank| f64::from(parts[at(rank, row, column)])).sum::<f64>() + others);
                let mut sum = parts[at(0, row, column)];
                for rank in 1..w {
                    sum += parts[at(rank, row, column)];
                }
                expected.push(if self.residual { sum + residual[at(0, row, column)] } else { sum });
            }
        }
        let dims = [self.world, self.rows, 2 * self.columns];
        let one = |dtype, values: &[f32]| TestTensor::new(dtype, &dims[1..], values);
        let mut received = parts.clone();
        let own = one(self.summands, &parts[self.rank as usize * r * 2 * c..][..r * 2 * c]);
        let mut receive =
            TestTensor::poisoned(if self.flagged { DType::F32Flagged } else { self.summands }, &dims);
        if self.flagged {
            for (word, value) in receive.data.bytes_mut().chunks_exact_mut(8).zip(&parts) {
                word.copy_from_slice(&(u64::from(TAG) << 32 | u64::from(value.to_bits())).to_ne_bytes());
            }
        } else {
            received[self.rank as usize * r * 2 * c..][..r * 2 * c].fill(f32::NAN); // its own slot is not read
            receive = TestTensor::new(self.summands, &dims, &received);
        }
        let out = TestTensor::poisoned(self.dtype, &dims[1..]);
        Operands { own, receive, residual: one(DType::F32, &residual), out, expected, exact }
    }

    fn task(&self, operands: &mut Operands) -> TestTask {
        let c = self.columns;
        let tile = Access::new(0, Region::whole(&[self.rows, 0]).with(1, c, 2 * c));
        let all = Access::new(0, Region::whole(&[self.world, self.rows, 0]).with(2, c, 2 * c));
        let mut inputs = Vec::new();
        if !self.flagged {
            inputs.push(operands.own.view(&tile));
        }
        inputs.push(operands.receive.view(&all));
        if self.residual {
            inputs.push(operands.residual.view(&tile));
        }
        let flags = u32::from(self.flagged) + 2 * u32::from(self.residual);
        let params = mpk_reduce_params { world: self.world, rank: self.rank, rows_kind: 0, flags };
        assert_eq!(params_words(&params), [self.world, self.rank, 0, flags], "taskgraph writes these words");
        TestTask {
            params: params_words(&params),
            inputs,
            outputs: vec![operands.out.view(&tile)],
            ..TestTask::default()
        }
    }

    fn batch(&self) -> TestBatch {
        TestBatch { epoch: EPOCH, flags: FLAGS, ..TestBatch::rows(self.used) }
    }

    fn check(&self, operands: &Operands) {
        let c = self.columns as usize;
        let expected = rounded(self.dtype, &operands.expected);
        let got = operands.out.values();
        for (sum, exact) in operands.expected.iter().zip(&operands.exact) {
            assert!((f64::from(*sum) - exact).abs() <= 1e-6 * f64::from(self.world + 1), "{sum}, {exact}");
        }
        for (row, values) in got.chunks(2 * c).enumerate() {
            let live = row < self.used as usize;
            assert!(values[..c].iter().all(|v| v.is_nan()), "wrote outside of its tile");
            if live {
                assert_eq!(values[c..], expected[row * c..][..c], "row {row}");
            } else {
                assert!(values[c..].iter().all(|v| v.is_nan()), "wrote a row that is not in use");
            }
        }
    }
}

#[test]
fn sums_in_rank_order_and_adds_the_residual_once() {
    const F32: DType = DType::F32;
    for world in [2, 3, 8] {
        for columns in [1, 16, 37, 64] {
            for (dtype, summands, flagged, residual) in [
                (F32, F32, false, true),
                (DType::Bf16, F32, false, false),
                (F32, F32, true, true),
                (DType::F16, F32, true, false),
                (F32, DType::Bf16, false, true),
                (F32, DType::F16, false, true),
                (DType::Bf16, DType::Bf16, false, false),
                (DType::F16, DType::F16, false, true),
                (F32, DType::F16, false, false),
            ] {
                let rank = world / 2;
                let setup =
                    Setup { world, rank, rows: 5, used: 3, columns, dtype, summands, flagged, residual };
                for isa in Isa::ALL {
                    isa.with(|| {
                        let mut operands = setup.operands();
                        let task = setup.task(&mut operands);
                        for call in if flagged { vec![Call::Ready, Call::Run] } else { vec![Call::Run] } {
                            let code =
                                run_task("reduce", &task, &mut setup.batch(), &TestRank::default(), call);
                            assert_eq!(code, i32::from(call == Call::Ready));
                        }
                        setup.check(&operands);
                    });
                }
            }
        }
    }
}

fn words(tensor: &mut TestTensor) -> &[AtomicU64] {
    let bytes = tensor.data.bytes_mut();
    // SAFETY: the bytes are aligned to a cache line, 8 for each word, and only used as atomics while this lives.
    unsafe { std::slice::from_raw_parts(bytes.as_mut_ptr().cast(), bytes.len() / 8) }
}

#[test]
fn waits_for_every_word_of_its_own_write() {
    for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512] {
        isa.with(|| {
            let setup = Setup {
                world: 2,
                rank: 0,
                rows: 2,
                used: 2,
                columns: 37,
                dtype: DType::F32,
                summands: DType::F32,
                flagged: true,
                residual: true,
            };
            let mut operands = setup.operands();
            let task = setup.task(&mut operands);
            let mut receive =
                std::mem::replace(&mut operands.receive, TestTensor::poisoned(DType::F32, &[1]));
            let words = words(&mut receive);
            // Words of the previous write; some of them have the right value but the wrong tag.
            let arriving: Vec<u64> = words.iter().map(|w| w.load(Ordering::Relaxed)).collect();
            for word in words {
                word.fetch_sub(1 << 32, Ordering::Relaxed);
            }
            let ready = || run_task("reduce", &task, &mut setup.batch(), &TestRank::default(), Call::Ready);
            assert_eq!(ready(), 0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for (i, (word, value)) in words.iter().zip(&arriving).enumerate() {
                        if i % 40 == 0 {
                            std::thread::sleep(std::time::Duration::from_millis(2));
                        }
                        word.store(*value, Ordering::Release);
                    }
                });
                let code = run_task("reduce", &task, &mut setup.batch(), &TestRank::default(), Call::Run);
                assert_eq!(code, MPK_OK as i32);
            });
            setup.check(&operands);
            assert_eq!(ready(), 1);
            // A single word of an older write must be noticed, and so must one of a later write, which means
            // that the expected word was lost.
            let word = &words[37 + 2 * 37 * 2 + 5];
            for other in [-1i64, 1, -5, 5, i64::from(i32::MIN)] {
                let tag = (i64::from(TAG) + other) as u32;
                let value = word.load(Ordering::Relaxed);
                word.store(u64::from(tag) << 32 | u64::from(value as u32), Ordering::Relaxed);
                assert_eq!(ready(), 0, "tag {tag}");
                word.store(value, Ordering::Relaxed);
                assert_eq!(ready(), 1);
            }
        });
    }
}

/// Rows that are not in use keep old tags, which must not recur after a wrap.
#[test]
fn all_rows_count_where_words_are_refreshed() {
    let setup = Setup {
        world: 2,
        rank: 0,
        rows: 3,
        used: 3,
        columns: 16,
        dtype: DType::F32,
        summands: DType::F32,
        flagged: true,
        residual: false,
    };
    let mut operands = setup.operands();
    let task = setup.task(&mut operands);
    for (refresh, first_missing) in [(false, 1), (true, 0)] {
        // One row is in use; no word of the other rows has arrived.
        let epoch = if refresh { EPOCH - 1 } else { EPOCH };
        let tag = epoch.wrapping_mul(5) + 3;
        for (i, word) in words(&mut operands.receive).iter().enumerate() {
            let tag = if i / 32 % 3 == 0 { tag } else { tag.wrapping_sub(5) };
            word.store(u64::from(tag) << 32, Ordering::Relaxed);
        }
        let mut batch = TestBatch { epoch, flags: FLAGS, ..TestBatch::rows(1) };
        let ready = run_task("reduce", &task, &mut batch, &TestRank::default(), Call::Ready);
        assert_eq!(ready, first_missing, "refresh {refresh}");
    }
}

#[test]
fn a_word_that_never_comes_ends_in_the_deadline() {
    let setup = Setup {
        world: 2,
        rank: 0,
        rows: 1,
        used: 1,
        columns: 16,
        dtype: DType::F32,
        summands: DType::F32,
        flagged: true,
        residual: false,
    };
    let mut operands = setup.operands();
    let task = setup.task(&mut operands);
    words(&mut operands.receive)[16].fetch_sub(1 << 32, Ordering::Relaxed);
    let code = run_task("reduce", &task, &mut setup.batch(), &TestRank::default(), Call::Run);
    assert_eq!(code, MPK_ABORT_DEADLINE as i32);
}

/// In a block of rows, the rows in use are summed: they are counted from the tensor's first row, not from the
/// block's.
#[test]
fn a_block_of_rows_counts_the_rows_before_it() {
    for (used, live) in [(1, 0), (2, 0), (3, 1), (4, 2), (9, 2)] {
        let setup = Setup {
            world: 2,
            rank: 1,
            rows: 5,
            used,
            columns: 37,
            dtype: DType::F32,
            summands: DType::F32,
            flagged: false,
            residual: true,
        };
        let mut operands = Setup { used: 5, ..setup }.operands();
        let (c, first) = (setup.columns, 2);
        let block = |r: Region, dim| r.with(dim, first, first + 2).with(dim + 1, c, 2 * c);
        let (tile, all) =
            (Access::new(0, block(Region::whole(&[]), 0)), Access::new(0, block(Region::whole(&[2]), 1)));
        let mut task = setup.task(&mut operands);
        task.inputs =
            vec![operands.own.view(&tile), operands.receive.view(&all), operands.residual.view(&tile)];
        task.outputs = vec![operands.out.view(&tile)];
        task.args[0] = first as i32;
        let code = run_task("reduce", &task, &mut setup.batch(), &TestRank::default(), Call::Run);
        assert_eq!(code, MPK_OK as i32);
        let c = c as usize;
        for (row, values) in operands.out.values().chunks(2 * c).enumerate() {
            let is_live = (2..2 + live).contains(&row);
            assert!(values[..c].iter().all(|v| v.is_nan()), "wrote outside of its tile");
            match is_live {
                true => assert_eq!(values[c..], operands.expected[row * c..][..c], "row {row} of {used}"),
                false => assert!(values[c..].iter().all(|v| v.is_nan()), "wrote row {row} of {used}"),
            }
        }
    }
}
