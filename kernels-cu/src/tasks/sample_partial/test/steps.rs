//! The sampling operators one after the other on several ranks, and the cases that they run on.

use crate::abi::{MPK_SAMPLING_NOISE, MPK_SAMPLING_ON, mpk_sampling};
use crate::registry::registry;
use crate::testing::{TestBatch, TestTensor, random_values, run_tasks};
use serde_json::json;
use taskgraph::op_graph::{Attrs, Role};
use taskgraph::task_type::{LocalOp, OpView, OperandView, TensorType};
use taskgraph::{Capacity, DType, Rows, Sharding, Split, Target};

/// Draws without filters and penalties.
pub(super) fn plain(seed: u64) -> mpk_sampling {
    mpk_sampling {
        seed,
        flags: MPK_SAMPLING_ON | MPK_SAMPLING_NOISE,
        top_k: 0,
        inverse_temperature: 1.0,
        top_p: 1.0,
        log_min_p: f32::NEG_INFINITY,
        repetition: 1.0,
        inverse_repetition: 1.0,
        presence: 0.0,
        frequency: 0.0,
        num_prompt_tokens: 0,
        logprobs: 0,
        reserved: 0,
    }
}

/// Every way to choose, each with and without the others.
pub(super) fn ways(seed: u64) -> Vec<mpk_sampling> {
    let mut ways = Vec::new();
    for top_k in [0, 1, 7, 50, 3000] {
        for top_p in [1.0, 0.9, 0.3] {
            for min_p in [0.0f32, 0.02] {
                if top_k > 1024 && top_p < 1.0 {
                    continue; // refused
                }
                let inverse_temperature = 1.0 / 0.7;
                ways.push(mpk_sampling {
                    top_k,
                    top_p,
                    log_min_p: min_p.ln(),
                    inverse_temperature,
                    ..plain(seed)
                });
            }
        }
    }
    ways.push(mpk_sampling { flags: MPK_SAMPLING_ON, ..plain(seed) });
    ways
}

/// Samples, one in each slot, with all that the operators need.
pub(super) struct Case {
    /// [samples][vocabulary]
    pub(super) logits: Vec<Vec<f32>>,
    /// Words of `token_counts`, [slots][vocabulary].
    pub(super) counts: Vec<Vec<u32>>,
    pub(super) batch: TestBatch,
}

impl Case {
    /// Sample i is in slot i, its new token at `positions[i]`.
    pub(super) fn new(logits: Vec<Vec<f32>>, sampling: Vec<mpk_sampling>, positions: &[u32]) -> Case {
        let samples = logits.len();
        let mut batch = TestBatch::rows(samples as u32);
        batch.active_context = positions.iter().map(|p| *p as i32 - 1).collect();
        batch.sampling = sampling;
        Case { counts: vec![vec![0; logits[0].len()]; samples], logits, batch }
    }
}

/// One operator on one rank.
pub(super) struct Step<'a> {
    pub(super) name: &'a str,
    pub(super) attrs: &'a Attrs,
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) batch: &'a mut TestBatch,
}

impl Step<'_> {
    /// `inputs`: a rank's own tensors with their global dimensions and shardings.
    pub(super) fn run(&mut self, inputs: Vec<(TestTensor, Vec<u64>, Sharding)>) -> Vec<TestTensor> {
        let contract = registry().get(self.name).unwrap().clone();
        let (mut tensors, global): (Vec<_>, Vec<_>) = inputs.into_iter().map(|(t, d, s)| (t, (d, s))).unzip();
        let views = tensors.iter().zip(&global).map(|(tensor, (dims, sharding))| OperandView {
            name: "input",
            ty: TensorType { dims: dims.clone(), ..tensor.ty() },
            sharding,
            role: &Role::Activation,
        });
        let samples = self.batch.num_samples;
        let capacity = Capacity { rows: samples, samples, active: samples };
        let mut view = OpView {
            name: "test",
            attrs: self.attrs,
            inputs: views.collect(),
            outputs: Vec::new(),
            capacity,
        };
        let types = contract.infer(&view).unwrap();
        let rule = contract.shard(&view, self.world).unwrap();
        view.outputs = types
            .iter()
            .zip(&rule.outputs)
            .map(|(ty, sharding)| OperandView {
                name: "output",
                ty: ty.clone(),
                sharding,
                role: &Role::Activation,
            })
            .collect();
        let local = |ty: &TensorType, sharding: &Sharding| TensorType {
            dims: sharding.local_dims(&ty.dims, self.rank, self.world),
            ..ty.clone()
        };
        let op = LocalOp {
            global: &view,
            inputs: tensors.iter().map(TestTensor::ty).collect(),
            outputs: types.iter().zip(&rule.outputs).map(|(ty, s)| local(ty, s)).collect(),
            rank: self.rank,
            world: self.world,
        };
        // Tasks of several samples, their number different for each number of ranks.
        let parts = self.attrs["parts"].as_u64().unwrap() as u32;
        let partition = contract.partition(&op, &Target::cpu(parts * (1 + self.world))).unwrap();
        run_tasks(self.name, &partition, &op.outputs, &mut tensors, &[], self.batch)
    }
}

pub(super) fn words(dtype: DType, dims: &[u32], values: &[u32]) -> TestTensor {
    let mut tensor = TestTensor::poisoned(dtype, dims);
    let bytes: Vec<u8> = values.iter().flat_map(|w| w.to_ne_bytes()).collect();
    tensor.data.bytes_mut().copy_from_slice(&bytes);
    tensor
}

/// Slices of all ranks, one after the other.
pub(super) fn gathered(slices: &[TestTensor]) -> (TestTensor, Vec<u64>) {
    let mut dims = slices[0].dims.clone();
    dims[0] = slices.len() as u32;
    let values: Vec<u32> = slices.iter().flat_map(TestTensor::words).collect();
    let global = dims.iter().map(|d| u64::from(*d)).collect();
    (words(DType::U32, &dims, &values), global)
}

/// All steps on `world` ranks with `parts` parts each: the tokens, the same on all ranks, and the records of the second
/// pass.
pub(super) fn sample(case: &Case, world: u32, parts: u32) -> (Vec<u32>, TestTensor) {
    let (samples, vocabulary) = (case.logits.len() as u32, case.logits[0].len() as u64);
    let slots = case.counts.len() as u32;
    let attrs = json!({"slices": world, "parts": parts, "kept": vocabulary.min(1024)});
    let attrs = attrs.as_object().unwrap().clone();
    let mut batch = case.batch.clone();
    let columns = match world {
        1 => Sharding::Replicated,
        _ => Sharding::split(1, vocabulary, Split::Even { unit: 16 }),
    };
    let slices = match world {
        1 => Sharding::Replicated,
        _ => Sharding::split(0, u64::from(world), Split::Even { unit: 1 }),
    };
    let local = |rank: u32| {
        let own = if world == 1 { 0..vocabulary } else { columns.ranges(rank, world)[0].clone() };
        let (own, width) = (own.start as usize..own.end as usize, (own.end - own.start) as u32);
        let logits: Vec<f32> = case.logits.iter().flat_map(|row| row[own.clone()].iter().copied()).collect();
        let counts: Vec<u32> = case.counts.iter().flat_map(|row| row[own.clone()].iter().copied()).collect();
        [
            (
                TestTensor::new(DType::F32, &[samples, width], &logits).with_rows(Rows::Samples),
                vec![u64::from(samples), vocabulary],
                columns.clone(),
            ),
            (
                words(DType::U32, &[slots, width], &counts),
                vec![u64::from(slots), vocabulary],
                columns.clone(),
            ),
        ]
    };
    let (mut records, mut lists, mut weighed) = (Vec::new(), Vec::new(), Vec::new());
    for rank in 0..world {
        let mut step =
            |name, inputs| Step { name, attrs: &attrs, rank, world, batch: &mut batch }.run(inputs);
        let mut found = step("sample_partial", local(rank).to_vec());
        let own = found.pop().unwrap();
        let mut global: Vec<u64> = own.dims.iter().map(|d| u64::from(*d)).collect();
        global[0] = u64::from(world);
        records.push(found.pop().unwrap());
        // A single rank does without `sample_merge`; here, it has it for some numbers of parts.
        let merges = world > 1 || parts.is_multiple_of(2);
        lists.push(match merges {
            true => step("sample_merge", vec![(own, global, slices.clone())]).remove(0),
            false => own,
        });
    }
    let (records, records_dims) = gathered(&records);
    let (lists, lists_dims) = gathered(&lists);
    for rank in 0..world {
        let [logits, counts] = local(rank);
        let joined = (records.clone(), records_dims.clone(), Sharding::Replicated);
        let mut step = Step { name: "sample_weigh", attrs: &attrs, rank, world, batch: &mut batch };
        weighed.push(step.run(vec![joined, logits, counts]).remove(0));
    }
    let (weighed, weighed_dims) = gathered(&weighed);
    let mut tokens: Option<Vec<u32>> = None;
    for rank in 0..world {
        let whole =
            |tensor: &TestTensor, dims: &Vec<u64>| (tensor.clone(), dims.clone(), Sharding::Replicated);
        let inputs =
            vec![whole(&records, &records_dims), whole(&weighed, &weighed_dims), whole(&lists, &lists_dims)];
        let mut step = Step { name: "sample_reduce", attrs: &attrs, rank, world, batch: &mut batch };
        let next = step.run(inputs)[0].words();
        assert_eq!(*tokens.get_or_insert_with(|| next.clone()), next, "ranks 0 and {rank} differ");
    }
    (tokens.unwrap_or_default(), weighed)
}

pub(super) fn logits(seed: u64, n: usize, scale: f32) -> Vec<f32> {
    random_values(seed, n).iter().map(|v| v * scale).collect()
}
