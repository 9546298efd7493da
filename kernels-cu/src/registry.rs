//! The task types by name and by number.
//!
//! A task type is registered by one line, `pub mod NAME;`, in `src/tasks/mod.rs`. Its module has a `REGISTRATION`. Task
//! types that the protocol itself knows keep the numbers of `enum mpk_core_task_type`. The others are numbered from
//! `MPK_TASK_TYPE_FIRST_REGISTERED` in the order of the lines.

use crate::abi;
use crate::sanitizer::{self, SanitizerError};
use std::sync::{Arc, PoisonError, RwLock};
use taskgraph::{Registry, TaskType};

pub use crate::abi::KernelFn;

/// A task's code on the GPU: the C++ type from its folder's `gpu.cuh`, with template arguments for the task.
///
/// # Errors
/// The reason why the GPU code cannot run this task.
pub type GpuCode = fn(&GpuSite<'_>) -> Result<String, String>;

/// Everything that GPU code may be specialised for: facts that tasks of one graph can share.
#[derive(Clone, Debug)]
pub struct GpuSite<'a> {
    /// The variant's parameters (the words of the task type's `params.h` struct).
    pub params: &'a [u32],
    /// Operands that it reads; `addr` is 0.
    pub inputs: &'a [abi::mpk_operand],
    /// Operands that it writes; `addr` is 0.
    pub outputs: &'a [abi::mpk_operand],
    /// The capacity of an iteration of the graph.
    pub capacity: taskgraph::Capacity,
}

/// The entry of a task's folder in the registry. The functions are declared in [`abi`] (`mpk_task_NAME` and
/// `mpk_task_NAME_ready`) for every registered name.
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    /// Name of the operator and of the task type.
    pub name: &'static str,
    /// The fixed number of a task type that the protocol itself knows (`enum mpk_core_task_type`).
    pub core_number: Option<u16>,
    /// Creates its contract; `None` if taskgraph creates the tasks itself.
    pub contract: Option<fn() -> Arc<dyn TaskType>>,
    /// CPU code; `None` if the type only composes others, or has nothing to run.
    pub run: Option<KernelFn>,
    /// CPU code that checks whether every flagged word that the task reads has arrived.
    pub ready: Option<KernelFn>,
    /// GPU code; `None` if the type has nothing to run.
    pub gpu: Option<GpuCode>,
}

include!(concat!(env!("OUT_DIR"), "/registrations.rs"));

/// Core task types without code.
const PROTOCOL_TYPES: &[(&str, u16)] = &[
    ("terminate", abi::MPK_TASK_TYPE_TERMINATE as u16),
    ("begin_task_graph", abi::MPK_TASK_TYPE_BEGIN_TASK_GRAPH as u16),
    ("empty", abi::MPK_TASK_TYPE_EMPTY as u16),
];

/// Task types of other crates, in the order in which they were added.
static ADDED: RwLock<Vec<&'static Registration>> = RwLock::new(Vec::new());

/// Adds a task type from another crate, for this process. Every rank must add the same types in the same order before
/// it builds a graph. Such a type has CPU code only, because GPU code is compiled from this crate's folders.
///
/// # Errors
/// The name is in use, or the type has a core number or GPU code.
pub fn add(registration: &'static Registration) -> Result<(), String> {
    let Registration { name, core_number, gpu, .. } = registration;
    if type_number(name).is_some() {
        return Err(format!("task type `{name}` is already registered; choose another name"));
    }
    if core_number.is_some() || gpu.is_some() {
        return Err(format!(
            "task type `{name}`: only task types in kernels-cu may have a core number or GPU code"
        ));
    }
    ADDED.write().unwrap_or_else(PoisonError::into_inner).push(registration);
    Ok(())
}

/// Every registration.
fn registrations() -> Vec<&'static Registration> {
    let added = ADDED.read().unwrap_or_else(PoisonError::into_inner);
    REGISTRATIONS.iter().chain(added.iter()).copied().collect()
}

/// Every registration with its number.
fn numbered() -> impl Iterator<Item = (u16, &'static Registration)> {
    let mut next = abi::MPK_TASK_TYPE_FIRST_REGISTERED as u16;
    registrations().into_iter().map(move |registration| {
        let number = registration.core_number.unwrap_or_else(|| {
            next += 1;
            next - 1
        });
        (number, registration)
    })
}

/// All contracts, for the graph builder.
pub fn registry() -> Registry {
    let mut registry = Registry::default();
    for registration in registrations() {
        if let Some(contract) = registration.contract {
            registry.register(contract());
        }
    }
    registry
}

/// The number of the task type `name` in the ABI, core types included.
pub fn type_number(name: &str) -> Option<u16> {
    let core = PROTOCOL_TYPES.iter().find(|t| t.0 == name).map(|t| t.1);
    core.or_else(|| numbered().find(|(_, r)| r.name == name).map(|(number, _)| number))
}

/// The registration of the task type `name`.
pub fn registration(name: &str) -> Option<&'static Registration> {
    registrations().into_iter().find(|registration| registration.name == name)
}

/// The name of the task type with this number.
pub fn type_name(number: u16) -> Option<&'static str> {
    let core = PROTOCOL_TYPES.iter().find(|t| t.1 == number).map(|t| t.0);
    core.or_else(|| numbered().find(|(n, _)| *n == number).map(|(_, r)| r.name))
}

/// CPU kernels by task type number. Entries of types without code are null. With `MPK_SANITIZE=1` the kernels are
/// checked ([`crate::sanitizer`]).
///
/// # Errors
/// The sanitizer is not available.
pub fn kernel_table() -> Result<Vec<abi::mpk_kernel>, SanitizerError> {
    let size = numbered().map(|(number, _)| usize::from(number) + 1).max().unwrap_or(0);
    let mut table = vec![abi::mpk_kernel { run: None, ready: None }; size];
    for (number, registration) in numbered() {
        let mut kernel = abi::mpk_kernel { run: registration.run, ready: registration.ready };
        if sanitizer::enabled() {
            let (run, ready) = (sanitizer::kernel(registration.name)?, sanitizer::ready(registration.name)?);
            if run.is_none() && kernel.run.is_some() || ready.is_none() && kernel.ready.is_some() {
                tracing::warn!(
                    "the region sanitizer does not check {}: it is not among its sources",
                    registration.name
                );
            }
            kernel = abi::mpk_kernel { run: run.or(kernel.run), ready: ready.or(kernel.ready) };
        }
        table[usize::from(number)] = kernel;
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_core_types_keep_theirs() {
        let mut seen = std::collections::BTreeMap::new();
        for (number, registration) in numbered() {
            assert!(
                seen.insert(number, registration.name).is_none(),
                "{} shares a number",
                registration.name
            );
            assert_eq!(type_number(registration.name), Some(number));
            assert_eq!(type_name(number), Some(registration.name));
            let core = number < abi::MPK_TASK_TYPE_FIRST_REGISTERED as u16;
            assert_eq!(core, registration.core_number.is_some());
        }
        assert_eq!(type_number("begin_task_graph"), Some(1));
        assert_eq!(type_number("no such type"), None);
    }
}
