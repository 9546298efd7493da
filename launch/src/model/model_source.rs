//! Opens the files that model.json names: configuration, weights, tokenizer.

use serde_json::Value;
use std::path::Path;

use crate::model::{
    checkpoint::Checkpoint,
    error::InputError,
    families,
    hf_config::{ModelConfig, WeightDtype},
    model_json::ModelJson,
    random_weights::RandomWeights,
    tokenizer::Tokenizer,
    weights::WeightSource,
};

/// What model.json asks to run.
#[derive(Debug)]
pub enum ModelSource {
    /// A model of a supported family.
    Model(Box<Model>),
    /// A user graph, as given.
    Graph {
        /// The value of `graph`.
        graph: Value,
        /// The weights of its constants, if `weights` is given.
        weights: Option<RandomWeights>,
    },
}

/// An opened model. All tensors that it needs were found with the right shapes.
#[derive(Debug)]
pub struct Model {
    /// The values that the arithmetic depends on.
    pub config: ModelConfig,
    /// The source of the weights.
    pub weights: WeightSource,
    /// The checkpoint's tokenizer, if it has one and was read ([`ModelSource::open_on`]).
    pub tokenizer: Option<Tokenizer>,
}

impl ModelSource {
    /// Opens and checks the model that `model` names. Of the weights, only the headers are read.
    ///
    /// # Errors
    /// Any error of [`Checkpoint::open`], [`Checkpoint::validate`], [`families::read_config`],
    /// [`families::parse_config`] or [`Tokenizer::open`].
    pub fn open(model: &ModelJson) -> Result<Self, InputError> {
        Self::open_on(model, 0)
    }

    /// Like [`ModelSource::open`], on rank `rank` of a job. Only rank 0 handles text, so the other ranks do not read
    /// the tokenizer, which may take longer than all other files.
    ///
    /// # Errors
    /// Those of [`ModelSource::open`].
    pub fn open_on(model: &ModelJson, rank: u32) -> Result<Self, InputError> {
        let random = model.weights.as_ref().map(|w| RandomWeights::new(w.random.seed));
        if let Some(folder) = model.checkpoint_folder() {
            std::fs::read_dir(&folder).map_err(|error| no_folder(&folder, error))?;
            // The configuration is read first, because an unsupported architecture is more useful to report than a
            // missing shard. The checkpoint is opened earlier only if the configuration does not name the dtype.
            let mut opened = None;
            let config = families::read_config(&folder, || {
                let checkpoint = Checkpoint::open(&folder)?;
                let dtype = checkpoint.main_dtype();
                opened = Some(checkpoint);
                dtype
            })?;
            let mut checkpoint = match opened {
                Some(checkpoint) => checkpoint,
                None => Checkpoint::open(&folder)?,
            };
            checkpoint.tie_embeddings(&config);
            checkpoint.validate(&config, &families::tensors(&config))?;
            let tokenizer = if rank == 0 { Tokenizer::open(&folder)? } else { None };
            let weights = WeightSource::Checkpoint(checkpoint);
            return Ok(Self::Model(Box::new(Model { config, weights, tokenizer })));
        }
        if let (Some(config), Some(random)) = (&model.config, random) {
            // transformers' default if a configuration names no dtype.
            let config = families::parse_config(&model.file(), "config", config, || Ok(WeightDtype::F32))?;
            let weights = WeightSource::Random(random);
            return Ok(Self::Model(Box::new(Model { config, weights, tokenizer: None })));
        }
        match &model.graph {
            Some(graph) => Ok(Self::Graph { graph: graph.clone(), weights: random }),
            None => Err(InputError::field(
                &model.file(),
                ".",
                "no model: add \"checkpoint\", \"config\" with \"weights\", or \"graph\"",
            )),
        }
    }
}

/// The error if the folder named by model.json's `checkpoint` cannot be opened.
fn no_folder(folder: &Path, error: std::io::Error) -> InputError {
    if error.kind() != std::io::ErrorKind::NotFound {
        return InputError::unreadable(folder, error);
    }
    InputError::Checkpoint {
        path: folder.to_path_buf(),
        problem: format!("cannot read this folder: {error}"),
        fix: format!(
            "correct `checkpoint` in model.json, or download a model into the folder with `hf download NAME --local-dir {}`",
            folder.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The checkpoints that Hugging Face transformers wrote for the golden tests.
    #[test]
    fn the_families_fixtures_open() {
        for (name, architecture) in [
            ("llama", "LlamaForCausalLM"),
            ("mistral", "MistralForCausalLM"),
            ("qwen2", "Qwen2ForCausalLM"),
            ("qwen3", "Qwen3ForCausalLM"),
        ] {
            let path =
                Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name).join("model.json");
            let model = ModelJson::read(&path).unwrap();
            let Ok(ModelSource::Model(source)) = ModelSource::open(&model) else {
                panic!("{name} does not open")
            };
            assert_eq!(source.config.architecture(), architecture);
            model.sizes(&source.config).unwrap();
        }
    }

    /// Only rank 0 handles requests and their text, so only rank 0 notices a damaged tokenizer.
    #[test]
    fn only_rank_0_reads_the_tokenizer() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/qwen3");
        let folder = tempfile::tempdir().unwrap();
        for file in std::fs::read_dir(fixture).unwrap().map(Result::unwrap) {
            std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
        }
        let text = serde_json::json!({"schema": "mpk-model/1", "checkpoint": folder.path()}).to_string();
        let model = ModelJson::parse(Path::new("m.json"), text.as_bytes()).unwrap();
        let open = |rank| match ModelSource::open_on(&model, rank) {
            Ok(ModelSource::Model(source)) => Ok(source.tokenizer.is_some()),
            Ok(ModelSource::Graph { .. }) => panic!("a checkpoint, not a graph"),
            Err(error) => Err(error.to_string()),
        };
        assert_eq!((open(0), open(1)), (Ok(false), Ok(false)), "there is none");
        std::fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
        assert_eq!(open(1), Ok(false));
        assert!(open(0).unwrap_err().contains("tokenizer.json"));
    }

    #[test]
    fn sources_without_a_checkpoint() {
        let open = |text: &str| ModelSource::open(&ModelJson::parse(Path::new("m.json"), text.as_bytes())?);
        let graph = r#"{"schema": "mpk-model/1", "graph": {"x": 1}, "weights": {"random": {"seed": 3}}}"#;
        let Ok(ModelSource::Graph { graph, weights }) = open(graph) else { panic!() };
        assert_eq!((graph["x"].as_u64(), weights), (Some(1), Some(RandomWeights::new(3))));
        let random = r#"{"schema": "mpk-model/1", "weights": {"random": {"seed": 3}},
            "config": {"architectures": ["Qwen3ForCausalLM"], "hidden_size": "x"}}"#;
        let message = open(random).unwrap_err().to_string();
        assert!(message.contains("m.json: `config.hidden_size`"), "{message}");
        let missing = r#"{"schema": "mpk-model/1", "checkpoint": "/nonexistent/folder"}"#;
        let error = open(missing).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/folder: cannot read"), "{error}");
        let help = error.help().unwrap();
        assert!(help.contains("hf download NAME --local-dir /nonexistent/folder"), "{help}");
    }
}
