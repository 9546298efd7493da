//! Activations that are written in the layout that their readers prefer, so that no copy changes the layout in between.

use super::collectives::Uses;
use super::local::local_op;
use crate::op_graph::{Op, OpGraph, Role};
use crate::options::BuildOptions;
use crate::passes::op_view;
use crate::registry::Registry;
use crate::task_type::{LocalOp, TensorType};
use rustc_hash::FxHashMap;

/// The local type on each rank, for tensors whose type differs from their sharding's.
#[derive(Debug, Default)]
pub(crate) struct Layouts(FxHashMap<u32, Vec<TensorType>>);

impl Layouts {
    /// For a graph that has been sharded and fused.
    pub fn new(graph: &OpGraph, registry: &Registry, options: &BuildOptions, uses: &Uses) -> Self {
        let mut layouts = Layouts::default();
        let mut readers: FxHashMap<u32, Vec<(&Op, usize)>> = FxHashMap::default();
        for reader in &graph.ops {
            for (input, &tensor) in reader.inputs.iter().enumerate() {
                readers.entry(tensor).or_default().push((reader, input));
            }
        }
        for (&tensor, readers) in &readers {
            let known = &graph.tensors[tensor as usize];
            let Some(writer) = uses.writer(tensor).map(|writer| &graph.ops[writer]) else { continue };
            let output = writer.outputs.iter().position(|&t| t == tensor);
            let (Some(output), Role::Activation, false) = (output, &known.role, known.output) else {
                continue;
            };
            let Some(writes) = registry.get(&writer.op_type) else { continue };
            let of_writer = op_view(graph, writer);
            let types: Option<Vec<TensorType>> = (0..options.world)
                .map(|rank| {
                    let mut wanted = readers.iter().map(|(reader, input)| {
                        let view = op_view(graph, reader);
                        let local = local_op(&view, rank, options.world);
                        registry.get(&reader.op_type)?.reads_as(&local, *input, &options.target)
                    });
                    // All readers must prefer the same type.
                    let ty = wanted.next()??;
                    let alike = wanted.all(|other| other.as_ref() == Some(&ty));
                    let local = local_op(&of_writer, rank, options.world);
                    (alike && writes.writes_as(&local, output, &ty, &options.target)).then_some(ty)
                })
                .collect();
            if let Some(types) = types {
                layouts.0.insert(tensor, types);
            }
        }
        layouts
    }

    /// The local types of `tensor`, if they differ from its sharding's.
    pub fn of(&self, tensor: u32) -> Option<&[TensorType]> {
        self.0.get(&tensor).map(Vec::as_slice)
    }

    /// Sets the types of the operands of `local`, an operator with these inputs and outputs.
    pub fn apply(&self, inputs: &[u32], outputs: &[u32], local: &mut LocalOp<'_>) {
        let rank = local.rank as usize;
        let types = local.inputs.iter_mut().zip(inputs).chain(local.outputs.iter_mut().zip(outputs));
        for (ty, tensor) in types {
            if let Some(types) = self.0.get(tensor) {
                ty.clone_from(&types[rank]);
            }
        }
    }
}
