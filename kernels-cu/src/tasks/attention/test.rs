use super::division::{kv_heads_of_task, slots_of_task};
use super::test_case::Case;
use crate::isa::Isa;
use crate::registry::registry;
use crate::tasks::heads::Heads;
use crate::testing::{Call, TestRank, TestTask, TestTensor, run_task};
use serde_json::json;
use taskgraph::op_graph::{Attrs, Role};
use taskgraph::task_type::{LocalOp, OpView, OperandView, TensorType};
use taskgraph::{Capacity, DType, Rows, Sharding, Target};

pub(super) fn case(dtype: DType, heads: u32, kv_heads: u32, head_dim: u32) -> Case {
    Case {
        dtype,
        heads,
        kv_heads,
        head_dim,
        page_size: 16,
        splits: 1,
        qk_norm: false,
        slots: vec![(37, 1)],
        world: 1,
        prefill: None,
        kv_heads_of_task: 1,
        window: 0,
        wide: 0,
    }
}

#[test]
fn decode_and_prefill_equal_the_reference_over_head_shapes() {
    for (heads, kv_heads, head_dim) in
        [(2, 2, 16), (8, 1, 64), (6, 2, 18), (5, 5, 2), (12, 4, 80), (16, 8, 128), (7, 1, 34), (4, 2, 96)]
    {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for slots in [vec![(37, 1)], vec![(0, 1), (5, 11), (130, 3)], vec![(0, 29), (64, 1)]] {
                Case { slots, qk_norm: heads % 2 == 0, ..case(dtype, heads, kv_heads, head_dim) }.verify();
            }
        }
    }
}

#[test]
fn pages_of_all_sizes_and_splits_of_all_numbers() {
    for page_size in [1, 2, 8, 64] {
        for splits in [1, 2, 3, 5] {
            for slots in [vec![(0, 1), (63, 2), (64, 1)], vec![(299, 1), (3, 70)], vec![(0, 9)]] {
                let dtype = if splits == 3 { DType::Bf16 } else { DType::F32 };
                Case { slots, page_size, splits, qk_norm: true, ..case(dtype, 4, 2, 32) }.verify();
            }
        }
    }
}

/// If heads of a rank have different numbers of query heads (12 heads of 4, 6 ranks), each has its own task. The tasks of several
/// heads also have several slots, since there is one worker.
#[test]
fn tasks_of_several_key_value_heads() {
    for (heads, kv_heads, world, most) in
        [(8, 8, 1, 2), (16, 4, 1, 4), (12, 4, 1, 8), (6, 3, 1, 2), (16, 8, 2, 4), (12, 4, 6, 2)]
    {
        for dtype in [DType::F32, DType::Bf16] {
            let slots = vec![(37, 1), (0, 1), (5, 11), (130, 3)];
            let one = Case { slots, world, qk_norm: true, ..case(dtype, heads, kv_heads, 32) };
            let several = Case { kv_heads_of_task: most, ..one.clone() };
            several.verify();
            let (data, rank) = (one.data(), world - 1);
            assert!(
                several.run(&data, rank).0.data.bytes() == one.run(&data, rank).0.data.bytes(),
                "{several:?}"
            );
        }
    }
}

#[test]
fn key_value_heads_share_a_task_where_workers_have_several() {
    let (heads, of_task) = (
        Heads::global(json!({"heads": 32, "kv_heads": 8, "head_dim": 128}).as_object().unwrap()).unwrap(),
        kv_heads_of_task,
    );
    let target = |most: Option<u64>| {
        let mut target = Target::cuda(taskgraph::target::device("h200").unwrap());
        if let Some(most) = most {
            target.tuning.set("attention.kv_heads", most);
        }
        target
    };
    assert_eq!([1, 16, 17, 128].map(|active| of_task(&heads, active, 1, &target(None))), [1, 1, 2, 2]);
    assert_eq!([16, 32, 64, 128].map(|active| of_task(&heads, active, 1, &target(Some(8)))), [1, 2, 4, 8]);
    assert_eq!(of_task(&heads, 128, 1, &target(Some(1))), 1);
    assert_eq!(of_task(&heads, 128, 2, &target(None)), 1);
    assert_eq!(of_task(&heads, 128, 1, &Target::cpu(2)), 1);
}

/// Each worker has one task if the tasks of all slots would be more than the workers.
#[test]
fn slots_share_a_task_where_workers_have_several() {
    let heads =
        Heads::global(json!({"heads": 32, "kv_heads": 8, "head_dim": 128}).as_object().unwrap()).unwrap();
    let mut target = Target::cuda(taskgraph::target::device("h200").unwrap());
    let of_task = |active, kv_heads, target: &Target| slots_of_task(&heads, active, kv_heads, target);
    assert_eq!(
        [17, 32, 33, 34, 64, 100, 128, 256].map(|active| of_task(active, 2, &target)),
        [1, 1, 1, 2, 2, 4, 4, 4]
    );
    assert_eq!(of_task(128, 1, &target), 1, "tasks get more heads first");
    target.tuning.set("attention.slots", 1);
    assert_eq!(of_task(128, 2, &target), 1);
}

#[test]
fn ranks_whose_heads_begin_inside_a_group() {
    for (heads, kv_heads, world) in [(12, 4, 6), (12, 4, 3), (8, 2, 8), (8, 8, 4), (6, 2, 2)] {
        for splits in [1, 2] {
            let slots = vec![(20, 2), (0, 3)];
            Case { slots, splits, world, qk_norm: true, ..case(DType::F32, heads, kv_heads, 16) }.verify();
        }
    }
}

#[test]
fn a_long_prompt_fills_whole_tiles() {
    Case { slots: vec![(70, 150)], page_size: 32, ..case(DType::Bf16, 4, 2, 64) }.verify();
}

/// The bits of a row do not depend on the rows that come with it.
#[test]
fn chunks_of_a_prompt_give_the_same_bits() {
    for (dtype, page_size) in [(DType::Bf16, 64), (DType::F32, 8)] {
        let whole = Case { slots: vec![(0, 140)], page_size, qk_norm: true, ..case(dtype, 8, 2, 64) };
        let width = 8 * 64 * dtype.size() as usize;
        for isa in [Isa::Avx512, Isa::Avx2] {
            let data = whole.data();
            let Some((expected, cache)) = isa.with(|| whole.run(&data, 0)) else { continue };
            let cached = cache.values();
            for (context, rows) in [(0, 1), (0, 64), (1, 63), (63, 2), (64, 76), (100, 7), (139, 1)] {
                let chunk = Case { slots: vec![(context, rows)], ..whole.clone() };
                let mut chunk_data = chunk.data();
                for p in 0..context {
                    for head in 0..whole.kv_heads {
                        let at = whole.cache_at(&data, 0, p, whole.kv_heads, head, false);
                        chunk_data.slots[0].keys[p as usize][head as usize] = cached[at..at + 64].to_vec();
                    }
                }
                let got = isa.with(|| chunk.run(&chunk_data, 0).0).unwrap();
                let n = rows as usize * width;
                let from = context as usize * width;
                assert!(got.data.bytes()[..n] == expected.data.bytes()[from..from + n], "{context} + {rows}");
            }
        }
    }
}

/// A task that writes new keys and values to a page reads them there itself: with a wrong page, what it computes or what the cache has is
/// wrong too. The page of the new rows is swapped with a page of another slot, one at a time.
#[test]
fn a_wrong_page_shows_in_the_output_or_in_the_cache() {
    // Decode rows and a prompt, in two pages each. The first slot's new row begins a page.
    let slots = vec![(16, 1), (0, 20), (37, 3)];
    for (splits, prefill) in [(1, None), (2, None), (1, Some(4))] {
        let case = Case { slots: slots.clone(), splits, prefill, ..case(DType::F32, 4, 2, 16) };
        let data = case.data();
        let right = case.run(&data, 0);
        case.check(&data, 0, &right.0, &right.1);
        for (a, page) in [(0, 1), (1, 0), (1, 1), (2, 2)] {
            let mut wrong = case.data();
            let at = |active: usize, page: usize| {
                (case.slots.len() - active) * data.pages_per_slot as usize + page
            };
            let spare = at(3, 0); // the slot that takes no part
            wrong.page_table.swap(at(a, page), spare);
            // The cache before is that of the right pages: only the kernel's table is wrong.
            let (out, cache) = case.run_with(&data, 0, &mut case.batch(&wrong), |_, _| true);
            let checks = || case.check(&data, 0, &out, &cache);
            let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(checks));
            assert!(found.is_err(), "{case:?}: page {page} of slot {a} is wrong, and nothing shows it");
        }
    }
}

#[test]
fn positions_beyond_the_slot_s_pages_are_refused() {
    let case = case(DType::F32, 2, 1, 16);
    let data = case.data();
    let mut batch = case.batch(&data);
    batch.pages_per_slot = 1;
    let mut tensor = TestTensor::poisoned(DType::F32, &[4, 64]);
    let mut cache = TestTensor::poisoned(DType::F32, &[4, 2, 16, 16]);
    let whole = |t: &mut TestTensor| {
        let region = taskgraph::Region::whole(&t.dims);
        t.view(&taskgraph::task_type::Access::rows_of_slot(0, region, 0, 1))
    };
    let (view, cache) = (whole(&mut tensor), whole(&mut cache));
    let task = TestTask {
        params: vec![16, 1, 0, 0, 0, 0, 0, 1, 0],
        args: [0, 0, 0, 1, 0, 2, 1, 1],
        inputs: vec![view, view, view, cache, view],
        outputs: vec![view, cache],
        scratch_bytes: 1 << 20,
    };
    let code = run_task("attention", &task, &mut batch, &TestRank::default(), Call::Run);
    assert_eq!(code, crate::abi::MPK_ABORT_KERNEL as i32);
}

#[test]
fn splits_fill_the_workers() {
    let attention = registry().get("attention").unwrap().clone();
    let view_of = |attrs: &Attrs, active, workers| {
        let qkv = TensorType { dtype: DType::Bf16, dims: vec![8, 16 * 32], rows: Rows::Tokens };
        let cache = TensorType { dtype: DType::Bf16, dims: vec![64, 8, 64, 32], rows: Rows::Fixed };
        let rope = TensorType { dtype: DType::F32, dims: vec![640, 32], rows: Rows::Fixed };
        let roles = [Role::Activation, Role::Persistent { region_dims: None }, Role::Constant];
        let types = [qkv, cache, rope];
        let view = OpView {
            name: "test",
            attrs,
            inputs: types
                .iter()
                .zip(&roles)
                .map(|(ty, role)| OperandView {
                    name: "x",
                    ty: ty.clone(),
                    sharding: &Sharding::Replicated,
                    role,
                })
                .collect(),
            outputs: Vec::new(),
            capacity: Capacity { rows: 8, samples: active, active },
        };
        let outputs = attention.infer(&view).unwrap();
        let op = LocalOp { global: &view, inputs: types.to_vec(), outputs, rank: 0, world: 1 };
        let expansion = attention.expand(&op, &Target::cpu(workers)).unwrap();
        expansion.map_or(1, |e| e.temporaries[0].ty.dims[2])
    };
    let attrs = json!({"heads": 8, "kv_heads": 4, "head_dim": 32}).as_object().unwrap().clone();
    assert_eq!(view_of(&attrs, 1, 4), 1);
    assert_eq!(view_of(&attrs, 2, 4), 1);
    assert_eq!(view_of(&attrs, 1, 8), 2);
    assert_eq!(view_of(&attrs, 1, 132), 5, "none of fewer than 128 positions");
    assert_eq!(view_of(&attrs, 8, 132), 4, "not more tasks than workers");
}
