//! Opens what model.json names: configuration, weights, tokenizer.

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

/// What model.json runs.
#[derive(Debug)]
pub enum ModelSource {
    /// A model of a supported family.
    Model(Box<Model>),
    /// An op graph of the user's own, as given.
    Graph {
        /// The value of `graph`.
        graph: Value,
        /// The weights of its constants, if `weights` is given.
        weights: Option<RandomWeights>,
    },
}

/// An opened model; every tensor that it needs has been found with the right shape.
#[derive(Debug)]
pub struct Model {
    /// What the arithmetic depends on.
    pub config: ModelConfig,
    /// Where the weights come from.
    pub weights: WeightSource,
    /// The checkpoint's tokenizer, if it has one.
    pub tokenizer: Option<Tokenizer>,
}

impl ModelSource {
    /// Opens and checks what `model` names. Nothing is read of the weights but their headers.
    ///
    /// # Errors
    /// Any of [`Checkpoint::open`], [`Checkpoint::validate`], [`families::read_config`],
    /// [`families::parse_config`] and [`Tokenizer::open`].
    pub fn open(model: &ModelJson) -> Result<Self, InputError> {
        let random = model.weights.as_ref().map(|w| RandomWeights::new(w.random.seed));
        if let Some(folder) = model.checkpoint_folder() {
            std::fs::read_dir(&folder).map_err(|error| no_folder(&folder, error))?;
            // The configuration first: an unsupported architecture is the better news than a missing shard. The
            // checkpoint is opened early only where the configuration does not name the dtype.
            let mut opened = None;
            let config = families::read_config(&folder, || {
                let checkpoint = Checkpoint::open(&folder)?;
                let dtype = checkpoint.main_dtype();
                opened = Some(checkpoint);
                dtype
            })?;
            let checkpoint = match opened {
                Some(checkpoint) => checkpoint,
                None => Checkpoint::open(&folder)?,
            };
            checkpoint.validate(&config, &families::tensors(&config))?;
            let tokenizer = Tokenizer::open(&folder)?;
            let weights = WeightSource::Checkpoint(checkpoint);
            return Ok(Self::Model(Box::new(Model { config, weights, tokenizer })));
        }
        if let (Some(config), Some(random)) = (&model.config, random) {
            // transformers' own default where a configuration names no dtype.
            let config = families::parse_config(&model.file(), "config", config, || Ok(WeightDtype::F32))?;
            let weights = WeightSource::Random(random);
            return Ok(Self::Model(Box::new(Model { config, weights, tokenizer: None })));
        }
        match &model.graph {
            Some(graph) => Ok(Self::Graph { graph: graph.clone(), weights: random }),
            None => Err(InputError::field(
                &model.file(),
                ".",
                "no model: give \"checkpoint\", \"config\" with \"weights\", or \"graph\"",
            )),
        }
    }
}

/// The folder that model.json's `checkpoint` names cannot be opened.
fn no_folder(folder: &Path, error: std::io::Error) -> InputError {
    if error.kind() != std::io::ErrorKind::NotFound {
        return InputError::unreadable(folder, error);
    }
    InputError::Checkpoint {
        path: folder.to_path_buf(),
        problem: format!("cannot read this folder: {error}"),
        fix: format!(
            "download a model into it with `hf download NAME --local-dir {}`, or correct `checkpoint` in model.json",
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
