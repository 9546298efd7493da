//! The list of passes.

use super::common::CommonSubexpressions;
use super::compose::Compose;
use super::dead::DeadOperators;
use super::fuse::Fuse;
use super::in_place::InPlace;
use super::infer::Infer;
use super::pass::{Context, Pass, Property};
use super::shard::Shard;
use crate::error::BuildError;
use crate::op_graph::OpGraph;
use crate::options::BuildOptions;
use crate::registry::Registry;
use std::sync::Arc;

/// The properties that lowering to tasks needs.
const FINAL: &[Property] = &[Property::Typed, Property::Composed, Property::Sharded];

/// The passes that a graph goes through, in order. The default is this crate's own list.
///
/// ```
/// use taskgraph::{BuildError, OpGraph, Pass, Passes};
/// use taskgraph::passes::{Context, Property};
///
/// #[derive(Debug)]
/// struct Count;
///
/// impl Pass for Count {
///     fn name(&self) -> &'static str {
///         "count"
///     }
///     fn keeps(&self) -> &'static [Property] {
///         &[Property::Typed, Property::Composed, Property::Sharded, Property::Live, Property::Fused]
///     }
///     fn run(&self, graph: &mut OpGraph, _: &Context<'_>) -> Result<(), BuildError> {
///         println!("{} operators", graph.ops.len());
///         Ok(())
///     }
/// }
///
/// let mut passes = Passes::default();
/// passes.insert_after("fuse", Count)?;
/// assert!(passes.names().any(|name| name == "count"));
/// # Ok::<(), BuildError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Passes {
    list: Vec<Arc<dyn Pass>>,
}

impl Default for Passes {
    fn default() -> Self {
        let mut passes = Passes::empty();
        passes.push(Infer);
        passes.push(Compose);
        passes.push(DeadOperators);
        passes.push(CommonSubexpressions);
        passes.push(Shard);
        passes.push(Fuse);
        passes.push(InPlace);
        passes
    }
}

impl Passes {
    /// An empty list.
    pub fn empty() -> Self {
        Passes { list: Vec::new() }
    }

    /// The passes in order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Pass>> {
        self.list.iter()
    }

    /// Their names in order.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.list.iter().map(|p| p.name())
    }

    /// Adds a pass at the end.
    pub fn push(&mut self, pass: impl Pass + 'static) {
        self.list.push(Arc::new(pass));
    }

    /// Adds a pass before the one named `place`.
    ///
    /// # Errors
    /// The list has no pass of that name.
    pub fn insert_before(&mut self, place: &str, pass: impl Pass + 'static) -> Result<(), BuildError> {
        let at = self.position(place)?;
        self.list.insert(at, Arc::new(pass));
        Ok(())
    }

    /// Adds a pass after the one named `place`.
    ///
    /// # Errors
    /// The list has no pass of that name.
    pub fn insert_after(&mut self, place: &str, pass: impl Pass + 'static) -> Result<(), BuildError> {
        let at = self.position(place)?;
        self.list.insert(at + 1, Arc::new(pass));
        Ok(())
    }

    /// Removes the pass named `name` and returns it, so that it may be inserted again elsewhere.
    ///
    /// # Errors
    /// The list has no pass of that name.
    pub fn remove(&mut self, name: &str) -> Result<Arc<dyn Pass>, BuildError> {
        let at = self.position(name)?;
        Ok(self.list.remove(at))
    }

    /// Moves the pass named `name` to just before the one named `place`.
    ///
    /// # Errors
    /// The list has no pass of one of the names.
    pub fn move_before(&mut self, name: &str, place: &str) -> Result<(), BuildError> {
        self.position(place)?;
        let pass = self.remove(name)?;
        let at = self.position(place)?;
        self.list.insert(at, pass);
        Ok(())
    }

    fn position(&self, name: &str) -> Result<usize, BuildError> {
        self.list.iter().position(|p| p.name() == name).ok_or_else(|| {
            let names: Vec<&str> = self.names().collect();
            BuildError::pass(name, format!("is not in the list; it has {}", names.join(", ")))
        })
    }

    /// Runs the passes on `graph`.
    ///
    /// # Errors
    /// The error of a pass; a pass that needs a property which does not hold at its place; or a list after which the graph cannot
    /// be lowered.
    pub fn run(
        &self,
        graph: &mut OpGraph,
        registry: &Registry,
        options: &BuildOptions,
    ) -> Result<(), BuildError> {
        self.run_observed(graph, registry, options, |_, _| {})
    }

    /// Like [`Passes::run`]. `after` gets the name of each pass and the graph after it.
    ///
    /// # Errors
    /// Those of [`Passes::run`].
    pub fn run_observed(
        &self,
        graph: &mut OpGraph,
        registry: &Registry,
        options: &BuildOptions,
        mut after: impl FnMut(&str, &OpGraph),
    ) -> Result<(), BuildError> {
        self.check()?;
        let context = Context { registry, options };
        for pass in &self.list {
            pass.run(graph, &context)?;
            after(pass.name(), graph);
        }
        Ok(())
    }

    /// Checks that each pass, and the lowering, gets the properties that it needs.
    ///
    /// # Errors
    /// The first pass that does not.
    pub fn check(&self) -> Result<(), BuildError> {
        let mut holds: Vec<Property> = Vec::new();
        for pass in &self.list {
            if let Some(missing) = pass.needs().iter().find(|p| !holds.contains(p)) {
                return Err(BuildError::pass(pass.name(), self.missing(*missing, pass.name())));
            }
            holds.retain(|p| pass.keeps().contains(p));
            holds.extend(pass.gives());
        }
        match FINAL.iter().find(|p| !holds.contains(p)) {
            Some(missing) => {
                let last = self.list.last().map_or("none", |p| p.name());
                Err(BuildError::pass(last, self.missing(*missing, "the lowering to tasks")))
            }
            None => Ok(()),
        }
    }

    fn missing(&self, property: Property, user: &str) -> String {
        let givers: Vec<&str> = Passes::default()
            .list
            .iter()
            .chain(&self.list)
            .filter(|p| p.gives().contains(&property))
            .map(|p| p.name())
            .collect();
        format!(
            "{user} needs a graph that is {property}, which does not hold here; put {} before it, after the last pass that does not keep `{property}`",
            givers.first().map_or("a pass that gives it".to_string(), |g| format!("`{g}`"))
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_checked_before_it_runs() {
        let mut passes = Passes::default();
        assert_eq!(passes.check(), Ok(()));
        passes.move_before("shard", "infer").unwrap();
        let error = passes.check().unwrap_err().to_string();
        assert!(error.contains("pass `shard`") && error.contains("put `infer` before it"), "{error}");
        let mut passes = Passes::default();
        passes.remove("shard").unwrap();
        assert!(passes.check().is_err());
        assert!(passes.insert_after("nothing", Infer).unwrap_err().to_string().contains("infer, compose"));
        assert!(Passes::empty().check().is_err());
    }
}
