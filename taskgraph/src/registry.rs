//! The task types and collectives that a graph may use, by name.

use crate::collective::{self, Collective};
use crate::task_type::TaskType;
use crate::tuning::Knob;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The operators that a graph may use: the registered task types, and the collectives, including those of this crate
/// ([`collective::built_in`]).
#[derive(Clone, Debug)]
pub struct Registry {
    types: BTreeMap<&'static str, Arc<dyn TaskType>>,
    collectives: BTreeMap<&'static str, Arc<dyn Collective>>,
}

impl Default for Registry {
    fn default() -> Self {
        let mut registry = Registry { types: BTreeMap::new(), collectives: BTreeMap::new() };
        collective::built_in().into_iter().for_each(|c| registry.register_collective(c));
        registry
    }
}

impl Registry {
    /// Adds a type. It replaces an earlier type with the same name.
    pub fn register(&mut self, task_type: Arc<dyn TaskType>) {
        self.types.insert(task_type.name(), task_type);
    }
    /// The type named `name`.
    pub fn get(&self, name: &str) -> Option<&Arc<dyn TaskType>> {
        self.types.get(name)
    }
    /// All types, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn TaskType>> {
        self.types.values()
    }
    /// Adds a collective. It replaces an earlier collective with the same name.
    pub fn register_collective(&mut self, collective: Arc<dyn Collective>) {
        self.collectives.insert(collective.name(), collective);
    }
    /// The collective named `name`.
    pub fn collective(&self, name: &str) -> Option<&Arc<dyn Collective>> {
        self.collectives.get(name)
    }
    /// All collectives, by name.
    pub fn collectives(&self) -> impl Iterator<Item = &Arc<dyn Collective>> {
        self.collectives.values()
    }
    /// The knobs of all types and collectives, by name. A knob that several types share appears once.
    pub fn knobs(&self) -> Vec<&'static Knob> {
        let of_types = self.types.values().flat_map(|t| t.knobs());
        let of_collectives = self.collectives.values().flat_map(|c| c.knobs());
        let by_name: BTreeMap<&str, &Knob> =
            of_types.chain(of_collectives).map(|knob| (knob.name, *knob)).collect();
        by_name.into_values().collect()
    }
}
