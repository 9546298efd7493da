//! model.json files for tests, in a folder that is removed with them.

use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A model.json (and what belongs to it) in a temporary folder.
pub struct ModelFile {
    folder: TempDir,
    json: Value,
}

impl ModelFile {
    /// From this value.
    pub fn new(json: Value) -> Self {
        let folder = tempfile::Builder::new().prefix("mpk-model").tempdir().expect("a temporary folder");
        let file = ModelFile { folder, json };
        file.write();
        file
    }

    /// From a fixture; the checkpoint is used in place.
    pub fn of_fixture(name: &str) -> Self {
        let folder = crate::folders::model_folder(name);
        let mut json = read_json(&folder.join("model.json"));
        json["checkpoint"] = json!(folder.join(json["checkpoint"].as_str().unwrap_or(".")));
        ModelFile::new(json)
    }

    /// From a fixture, with a copy of its checkpoint that the test may damage.
    pub fn copy_of_fixture(name: &str) -> Self {
        let source = crate::folders::model_folder(name);
        let mut json = read_json(&source.join("model.json"));
        json["checkpoint"] = json!("checkpoint");
        let file = ModelFile::new(json);
        let target = file.folder().join("checkpoint");
        fs::create_dir(&target).expect("a folder for the copy");
        for entry in fs::read_dir(&source).expect("the fixture's folder").flatten() {
            let name = entry.file_name();
            if name != "model.json" && name != "expected.json" {
                fs::copy(entry.path(), target.join(name)).expect("a copy of the checkpoint");
            }
        }
        file
    }

    /// Random weights for this Hugging Face configuration.
    pub fn random(config: Value, seed: u64) -> Self {
        ModelFile::new(
            json!({"schema": "mpk-model/1", "config": config, "weights": {"random": {"seed": seed}}}),
        )
    }

    /// Changes the value of a field, given by its path (`runtime.kv_pages`); missing objects on the way
    /// are created.
    pub fn set(mut self, path: &str, value: impl Into<Value>) -> Self {
        let mut at = &mut self.json;
        for name in path.split('.') {
            let object = at.as_object_mut().unwrap_or_else(|| panic!("{path}: not in an object"));
            at = object.entry(name).or_insert_with(|| Value::Object(Map::new()));
        }
        *at = value.into();
        self.write();
        self
    }

    /// Changes a JSON file of the copied checkpoint.
    pub fn edit(self, name: &str, change: impl FnOnce(&mut Value)) -> Self {
        let path = self.checkpoint().join(name);
        let mut json = read_json(&path);
        change(&mut json);
        fs::write(&path, json.to_string()).expect("the file can be written");
        self
    }

    /// Changes the bytes of a file of the copied checkpoint.
    pub fn edit_bytes(self, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> Self {
        let path = self.checkpoint().join(name);
        let mut bytes = fs::read(&path).expect("the file of the checkpoint");
        change(&mut bytes);
        fs::write(&path, bytes).expect("the file can be written");
        self
    }

    /// The copied checkpoint.
    pub fn checkpoint(&self) -> PathBuf {
        self.folder().join("checkpoint")
    }

    /// Path of model.json.
    pub fn path(&self) -> PathBuf {
        self.folder().join("model.json")
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn write(&self) {
        fs::write(self.path(), self.json.to_string()).expect("model.json can be written");
    }
}

/// Reads a JSON file.
///
/// # Panics
/// It is missing or not JSON.
pub fn read_json(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
