//! Tuning values that `mpk-bench tune` measured for a model's shape on a machine. They are saved next to the compiled kernels. Without
//! them, the values that come with the program apply (`measured.rs`).
//! This module also decides which values a run uses.
//!
//! The file's name contains the device, the shape, the number of ranks and the program's version, so a run finds only values that
//! were measured for it. Rank 0 reads the file and sends the values to the other ranks, because all ranks must cut their graphs
//! alike.

use crate::engine::agreement::together;
use crate::engine::config::RunConfig;
use crate::engine::error::Error;
use crate::engine::measured;
pub use crate::engine::place::Place;
use crate::model::app_error::AppError;
use crate::model::model_json::{ModelJson, Placement};
use distributed::World;
use kernels_cu::gpu::{self, Cache, PrivateFolder};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use taskgraph::{Backend, Knob, Target, Tuning};

const SCHEMA: &str = "mpk-tuning/1";

/// Placement if neither model.json nor the command line sets one: 0 static, 1 dynamic.
pub const DYNAMIC: Knob = Knob {
    name: "placement.dynamic",
    default: 0,
    candidates: &[0, 1],
    about: "0: static placement, 1: dynamic placement, if neither model.json nor the command line sets one",
};

/// All knobs of a kind of machine, by name.
pub fn knobs(backend: Backend) -> Vec<&'static Knob> {
    let mut knobs = kernels_cu::registry::registry().knobs();
    knobs.push(&DYNAMIC);
    if backend == Backend::Cuda {
        knobs.extend(gpu::KNOBS);
    }
    knobs.sort_by_key(|knob| knob.name);
    knobs
}

/// A tuning table as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    schema: String,
    version: String,
    /// The machine and model that it is for.
    #[serde(flatten)]
    pub place: Place,
    /// The values that replace defaults.
    pub values: Tuning,
    /// The measurements, for people to read.
    pub measured: BTreeMap<String, serde_json::Value>,
}

impl Table {
    /// A table of this version of the program.
    pub fn new(place: Place, values: Tuning, measured: BTreeMap<String, serde_json::Value>) -> Table {
        Table { schema: SCHEMA.into(), version: env!("CARGO_PKG_VERSION").into(), place, values, measured }
    }
}

/// The folder of tuning tables. They decide how tasks are cut, so only this user may be able to write to the folder.
#[derive(Clone, Debug)]
pub struct Tables {
    folder: PrivateFolder,
}

impl Tables {
    /// The folder next to the cache of compiled kernels.
    ///
    /// # Errors
    /// There is no such folder, or it belongs to another user.
    pub fn from_environment() -> Result<Tables, AppError> {
        let cache = Cache::from_environment().map_err(|e| AppError::from(distributed::Error::Code(e)))?;
        let folder = cache.folder().parent().unwrap_or(cache.folder()).join("tuning");
        let folder = PrivateFolder::new(folder);
        folder.check().map_err(|problem| {
            AppError::environment(format!(
                "the folder of tuning tables {} {problem}",
                folder.path().display()
            ))
            .with_help("set MPK_CACHE_DIR to a folder of your own")
        })?;
        Ok(Tables { folder })
    }

    /// The path of the table for `place`, whether it exists or not.
    pub fn path(&self, place: &Place) -> PathBuf {
        self.folder.path().join(place.file_name())
    }

    /// The table for `place`, if this version of the program measured one.
    ///
    /// # Errors
    /// The file exists but is no valid table.
    pub fn find(&self, place: &Place) -> Result<Option<Table>, AppError> {
        let path = self.path(place);
        let Ok(text) = std::fs::read(&path) else { return Ok(None) };
        let broken = |problem: String| {
            AppError::input(format!("{}: {problem}", path.display()))
                .with_help("remove the file or run `mpk-bench tune` again; `RunConfig::use_tuning_table = false` ignores it")
        };
        let table: Table = serde_json::from_slice(&text).map_err(|error| broken(error.to_string()))?;
        if table.schema != SCHEMA || table.place != *place {
            return Err(broken("it is for another model, machine or version of the program".into()));
        }
        Ok((table.version == env!("CARGO_PKG_VERSION")).then_some(table))
    }

    /// Stores a table, replacing an earlier one. Returns its path.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep(&self, table: &Table) -> Result<PathBuf, AppError> {
        let path = self.path(&table.place);
        let failed = |problem: String| AppError::environment(format!("{}: {problem}", path.display()));
        self.folder.create().map_err(failed)?;
        let text = serde_json::to_vec_pretty(table).unwrap_or_default();
        // Written to a temporary file first, because another run may read the table now.
        let part = path.with_extension(format!("{}.part", std::process::id()));
        let written = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, &path));
        written.map_err(|error| {
            let _ = std::fs::remove_file(&part);
            failed(error.to_string())
        })?;
        Ok(path)
    }
}

/// The values in force, found without any other rank: those of the table if one was measured here, otherwise those that come with the
/// program (`measured.rs`), overridden by those that were given.
///
/// # Errors
/// A knob does not allow its value, or the table is broken.
pub fn resolve(config: &RunConfig, place: &Place, backend: Backend) -> Result<Tuning, AppError> {
    let mut tuning = Tuning::default();
    if config.use_tuning_table {
        // Without a folder there is no table. The compiler reports what is wrong with the folder.
        let table = Tables::from_environment().map_or(Ok(None), |tables| tables.find(place))?;
        tuning = table.map(|table| table.values).or_else(|| measured::values(place)).unwrap_or_default();
    }
    tuning.extend(&config.tuning);
    check(&tuning, backend)?;
    if !tuning.is_empty() {
        let values: Vec<String> = tuning.iter().map(|(name, value)| format!("{name} {value}")).collect();
        tracing::info!(
            "tuned for this machine and shape: {} (RunConfig::use_tuning_table = false for defaults)",
            values.join(", ")
        );
    }
    Ok(tuning)
}

/// The values of a user graph, for which there are no tables.
///
/// # Errors
/// A knob does not allow its value.
pub fn of_user_graph(config: &RunConfig, backend: Backend) -> Result<Tuning, AppError> {
    check(&config.tuning, backend)?;
    Ok(config.tuning.clone())
}

fn check(tuning: &Tuning, backend: Backend) -> Result<(), AppError> {
    tuning.check(knobs(backend)).map_err(|problem| AppError::input(format!("RunConfig::tuning: {problem}")))
}

/// Cuts graphs by `tuning`, and places them by it if the model does not say how.
pub fn use_values(tuning: Tuning, model: &mut ModelJson, target: &mut Target) {
    if tuning.of(&DYNAMIC) != 0 {
        model.runtime.placement.get_or_insert(Placement::Dynamic.into());
    }
    target.tuning = tuning;
}

/// Collective: the values that rank 0 resolves for `place` apply to all ranks.
///
/// # Errors
/// Those of [`resolve`] on rank 0.
pub fn apply(
    world: &World,
    config: &RunConfig,
    place: &Place,
    model: &mut ModelJson,
    target: &mut Target,
) -> Result<(), Error> {
    let resolved =
        if world.rank() == 0 { resolve(config, place, target.backend) } else { Ok(Tuning::default()) };
    let own = together(world, resolved)?;
    let text = world.broadcast(0, serde_json::to_vec(&own).unwrap_or_default());
    use_values(serde_json::from_slice(&text).unwrap_or_default(), model, target);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(ranks: u32) -> Place {
        Place { device: "h200".into(), shape: "1 layer".into(), ranks }
    }

    fn tables(folder: &std::path::Path) -> Tables {
        Tables { folder: PrivateFolder::new(folder.join("tuning")) }
    }

    #[test]
    fn a_table_is_found_for_its_place_only() {
        let folder = tempfile::tempdir().unwrap();
        let tables = tables(folder.path());
        assert_eq!(tables.find(&place(1)).unwrap(), None);
        let mut values = Tuning::default();
        values.set("attention.split_positions", 256);
        let table = Table::new(place(1), values, BTreeMap::new());
        tables.keep(&table).unwrap();
        assert_eq!(tables.find(&place(1)).unwrap(), Some(table));
        assert_eq!(tables.find(&place(2)).unwrap(), None);
    }

    #[test]
    fn a_broken_table_is_an_error_that_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let tables = tables(folder.path());
        tables.keep(&Table::new(place(1), Tuning::default(), BTreeMap::new())).unwrap();
        std::fs::copy(tables.path(&place(1)), tables.path(&place(2))).unwrap();
        assert!(tables.find(&place(2)).unwrap_err().to_string().contains("another model"));
        std::fs::write(tables.path(&place(1)), b"{").unwrap();
        assert!(tables.find(&place(1)).is_err());
    }

    #[test]
    fn values_are_checked_and_of_the_ring_only_where_there_is_one() {
        let mut tuning = Tuning::default();
        tuning.set("ring.stages_in_flight", 3);
        let config = RunConfig { tuning, use_tuning_table: false, ..RunConfig::default() };
        assert!(resolve(&config, &place(1), Backend::Cuda).is_ok());
        let error = resolve(&config, &place(1), Backend::Cpu).unwrap_err();
        assert!(error.to_string().contains("no knob `ring.stages_in_flight`"), "{error}");
    }

    #[test]
    fn every_knob_has_its_default_among_its_candidates_in_order() {
        for knob in knobs(Backend::Cuda) {
            assert!(knob.candidates.contains(&knob.default), "{}", knob.name);
            assert!(knob.candidates.is_sorted(), "{}", knob.name);
            assert!(!knob.about.is_empty() && knob.name.contains('.'), "{}", knob.name);
        }
    }
}
