//! The names that a user can give for a model: a model.json, a Hugging Face folder, or a name on the Hugging Face hub.

use crate::model::error::InputError;
use crate::model::files;
use crate::model::model_json::ModelJson;
use std::path::{Path, PathBuf};

/// Opens `model`. A folder with a config.json is a model with model.json's defaults. A name such as `Qwen/Qwen3-8B` is
/// looked up in the Hugging Face cache if no such file exists. Everything else is a model.json. [`ModelJson::with`]
/// later checks whether the fields are consistent.
///
/// # Errors
/// Any error of [`ModelJson::read`], a folder without config.json, or a hub name that is not in the cache.
pub fn open(model: &Path) -> Result<ModelJson, InputError> {
    if model.is_dir() {
        return checkpoint(model);
    }
    match hub_name(model) {
        Some(hub) if !model.exists() => {
            // The snapshot's folder is named after a commit.
            let name = Some(hub.to_string());
            Ok(ModelJson { name, ..checkpoint(&in_cache(hub, &caches())?)? })
        }
        None if is_word(model) && !files::is_there(model) => Err(InputError::Checkpoint {
            path: model.into(),
            problem: "there is no such file or folder".into(),
            fix: "give a model.json, a Hugging Face folder, or a hub name such as Qwen/Qwen3-8B".into(),
        }),
        _ => ModelJson::read_unchecked(model),
    }
}

/// True for a name such as `Qwen3-8B`: likely a hub name without its organisation.
pub(crate) fn is_word(model: &Path) -> bool {
    model.components().count() == 1 && model.extension().is_none_or(|extension| extension != "json")
}

fn checkpoint(folder: &Path) -> Result<ModelJson, InputError> {
    let config = folder.join("config.json");
    if !files::is_there(&config) {
        // Giving the folder of a model.json is a likely mistake.
        let file = folder.join("model.json");
        let fix = match file.exists() {
            true => format!("did you mean {}?", file.display()),
            false => "give a Hugging Face folder, or a model.json".to_string(),
        };
        let problem = "this is a folder without config.json".into();
        return Err(InputError::Checkpoint { path: folder.into(), problem, fix });
    }
    Ok(ModelJson::of_checkpoint(folder))
}

/// Recognises `ORGANISATION/NAME` with the characters that the hub allows.
fn hub_name(model: &Path) -> Option<&str> {
    let name = model.to_str()?;
    let (organisation, repository) = name.split_once('/')?;
    let allowed = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    (allowed(organisation) && allowed(repository) && !name.ends_with(".json")).then_some(name)
}

/// The folder of the hub's clients: the first of HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and HOME that is set.
fn caches() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("HF_HUB_CACHE")
        .or_else(|| variable("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/huggingface/hub")))
}

/// The snapshot of `name` that `main` refers to.
fn in_cache(name: &str, cache: &Option<PathBuf>) -> Result<PathBuf, InputError> {
    let missing = |problem: String| InputError::Checkpoint {
        path: name.into(),
        problem,
        fix: format!("download it with `hf download {name}`"),
    };
    let Some(cache) = cache else {
        return Err(missing(
            "no such file, and no Hugging Face cache was found (neither HF_HOME nor HOME is set)".into(),
        ));
    };
    let repository = cache.join(format!("models--{}", name.replace('/', "--")));
    let revision = files::read_if_there(&repository.join("refs/main"))?.ok_or_else(|| {
        missing(format!(
            "there is no such file, and no such model in the Hugging Face cache {}",
            cache.display()
        ))
    })?;
    let revision = String::from_utf8_lossy(&revision);
    let snapshot = repository.join("snapshots").join(revision.trim());
    if !files::is_there(&snapshot.join("config.json")) {
        return Err(missing(format!("{} is incomplete: it has no config.json", snapshot.display())));
    }
    Ok(snapshot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub() {
        for name in ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "a/b_c.d"] {
            assert_eq!(hub_name(Path::new(name)), Some(name));
        }
        for other in
            ["model.json", "dir/model.json", "/abs/dir", "a/b/c", "./x", "../x", "a/", "a/b c", "a/.b"]
        {
            assert_eq!(hub_name(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn the_cache_has_the_snapshot_of_main() {
        let cache = tempfile::tempdir().unwrap();
        let some = Some(cache.path().to_path_buf());
        let message = in_cache("Qwen/Qwen3-8B", &some).unwrap_err().whole();
        assert!(message.contains("hf download Qwen/Qwen3-8B"), "{message}");
        let repository = cache.path().join("models--Qwen--Qwen3-8B");
        let snapshot = repository.join("snapshots/0123abc");
        std::fs::create_dir_all(repository.join("refs")).unwrap();
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::write(repository.join("refs/main"), "0123abc\n").unwrap();
        let message = in_cache("Qwen/Qwen3-8B", &some).unwrap_err().whole();
        assert!(message.contains("incomplete") && message.contains("hf download"), "{message}");
        std::fs::write(snapshot.join("config.json"), "{}").unwrap();
        assert_eq!(in_cache("Qwen/Qwen3-8B", &some).unwrap(), snapshot);
        assert!(in_cache("a/b", &None).unwrap_err().whole().contains("HF_HOME"));
    }

    #[test]
    fn a_single_word_that_is_no_file_may_lack_its_organisation() {
        let message = open(Path::new("Qwen3-8B")).unwrap_err().whole();
        assert!(message.contains("a hub name such as Qwen/Qwen3-8B"), "{message}");
        assert!(open(Path::new("none.json")).unwrap_err().whole().contains("cannot read none.json"));
    }

    #[test]
    fn a_folder_is_a_model() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/qwen3");
        let model = open(&folder).unwrap();
        assert_eq!(model.checkpoint_folder().unwrap(), folder);
        let empty = tempfile::tempdir().unwrap();
        let message = open(empty.path()).unwrap_err().whole();
        assert!(message.contains("without config.json"), "{message}");
        std::fs::write(empty.path().join("model.json"), "{}").unwrap();
        let message = open(empty.path()).unwrap_err().whole();
        assert!(message.contains("did you mean") && message.contains("model.json?"), "{message}");
    }
}
