//! What all members of the linear family write alike: contract and registration of a task type.

/// Writes a member's contract and registration: name, struct, source, residual, constant inputs, fusions.
macro_rules! member {
    ($name:literal, $type:ident, $run:ident, $family:expr, $constants:expr, $fusions:expr) => {
        /// Registry entry.
        pub const REGISTRATION: crate::registry::Registration = crate::registry::Registration {
            name: $name,
            core_number: None,
            contract: Some(|| std::sync::Arc::new($type)),
            run: Some(crate::abi::$run),
            ready: None,
            gpu: Some(|site: &crate::registry::GpuSite<'_>| $family.gpu(site)),
        };

        /// Contract of the task type.
        #[derive(Debug)]
        pub struct $type;

        impl taskgraph::TaskType for $type {
            fn name(&self) -> &'static str {
                $name
            }
            fn attributes(&self) -> &'static [taskgraph::Attribute] {
                $family.attributes()
            }

            fn knobs(&self) -> &'static [&'static taskgraph::Knob] {
                crate::tasks::linear_knobs::KNOBS
            }
            fn infer(
                &self,
                op: &taskgraph::task_type::OpView<'_>,
            ) -> Result<Vec<taskgraph::task_type::TensorType>, taskgraph::task_type::OpError> {
                $family.infer(op)
            }
            fn shard(
                &self,
                op: &taskgraph::task_type::OpView<'_>,
                world: u32,
            ) -> Result<taskgraph::task_type::ShardRule, taskgraph::task_type::OpError> {
                $family.shard(op, world)
            }
            fn partition(
                &self,
                op: &taskgraph::task_type::LocalOp<'_>,
                target: &taskgraph::Target,
            ) -> Result<taskgraph::task_type::Partition, taskgraph::task_type::OpError> {
                $family.partition(op, target)
            }
            fn expand(
                &self,
                op: &taskgraph::task_type::LocalOp<'_>,
                target: &taskgraph::Target,
            ) -> Result<Option<taskgraph::task_type::Expansion>, taskgraph::task_type::OpError> {
                $family.expand(op, target)
            }
            fn reads_as(
                &self,
                op: &taskgraph::task_type::LocalOp<'_>,
                input: usize,
                target: &taskgraph::Target,
            ) -> Option<taskgraph::task_type::TensorType> {
                $family.reads_as(op, input, target)
            }
            fn writes_as(
                &self,
                op: &taskgraph::task_type::LocalOp<'_>,
                _output: usize,
                ty: &taskgraph::task_type::TensorType,
                target: &taskgraph::Target,
            ) -> bool {
                $family.writes_as(op, ty, target)
            }
            fn tiled_inputs(&self) -> &'static [usize] {
                if matches!($family.source, crate::tasks::source::Source::RmsNorm) { &[2] } else { &[1] }
            }

            fn paired_inputs(&self, target: &taskgraph::Target) -> &'static [usize] {
                $family.paired_inputs(self.tiled_inputs(), target)
            }

            fn constant_inputs(&self) -> &'static [usize] {
                $constants
            }
            fn may_overwrite(&self) -> &'static [(usize, usize)] {
                // The residual, which is the last input.
                if $family.residual { &[(2, 0), (3, 0)] } else { &[] }
            }
            fn pushable_output(&self) -> Option<usize> {
                // A gated product is never partial.
                (!$family.gated).then_some(0)
            }
            fn push_param(&self) -> Option<usize> {
                Some(crate::tasks::linear_family::PUSH_PARAM)
            }
            fn fuses(
                &self,
                op: &taskgraph::task_type::OpView<'_>,
                world: u32,
                target: &taskgraph::Target,
            ) -> bool {
                $family.fuses(op, world, target)
            }
            fn fusions(&self) -> &'static [taskgraph::task_type::Fusion] {
                $fusions
            }
        }
    };
}
pub(crate) use member;
