use super::Add;
use super::reference::add;
use crate::isa::Isa;
use crate::testing::{TestBatch, TestOp, TestTensor, assert_close, random_values, rounded};
use serde_json::json;
use taskgraph::task_type::{OpView, OperandView, TensorType};
use taskgraph::{Attrs, Capacity, DType, Role, Rows, Sharding, TaskType};

#[test]
fn adds_on_every_level_and_leaves_unused_rows_alone() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (rows, used, columns, others) in
            [(1u32, 1u32, 16u32, 1), (5, 3, 203, 3), (8, 8, 1, 2), (17, 17, 97, 1)]
        {
            let n = (rows * columns) as usize;
            let mut summands = vec![rounded(dtype, &random_values(1, n))];
            summands.extend((0..others).map(|i| random_values(2 + i, n)));
            let expected = add(&summands);
            for isa in Isa::ALL {
                let got = isa.with(|| {
                    let tensor = |(i, values): (usize, &Vec<f32>)| {
                        TestTensor::new(if i == 0 { dtype } else { DType::F32 }, &[rows, columns], values)
                    };
                    let mut inputs: Vec<TestTensor> = summands.iter().enumerate().map(tensor).collect();
                    let op = TestOp::new("add", json!({}), rows).workers(3);
                    op.run(&mut inputs, &mut TestBatch::rows(used)).unwrap()[0].values()
                });
                let Some(got) = got else { continue };
                let live = (used * columns) as usize;
                assert_close(&got[..live], &expected[..live], 1e-6, 1.0, "add");
                assert!(got[live..].iter().all(|v| v.is_nan()));
            }
        }
    }
}

#[test]
fn operands_whose_rows_differ_are_told_apart() {
    let (attrs, role, sharding) = (Attrs::new(), Role::Input, Sharding::Replicated);
    let operand = |name, rows| OperandView {
        name,
        ty: TensorType { dtype: DType::F32, dims: vec![2, 4], rows },
        sharding: &sharding,
        role: &role,
    };
    let refused = |a, b| {
        let inputs = vec![operand("x", a), operand("p", b)];
        let capacity = Capacity { rows: 2, samples: 2, active: 1 };
        let view = OpView { name: "add", attrs: &attrs, inputs, outputs: Vec::new(), capacity };
        Add.infer(&view).map(|_| ()).unwrap_err().0
    };
    assert_eq!(
        refused(Rows::Tokens, Rows::Fixed),
        "`x` counts token rows, `p` has fixed rows; declare `p` with \"rows\": \"tokens\""
    );
    assert!(refused(Rows::Fixed, Rows::Samples).ends_with("declare `x` with \"rows\": \"samples\""));
    assert_eq!(refused(Rows::Tokens, Rows::Samples), "`x` counts token rows, `p` counts sampled rows");
}
