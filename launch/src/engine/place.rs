//! A machine and a model: what tuning values are measured for.

use crate::model::hf_config::ModelConfig;
use serde::{Deserialize, Serialize};
use std::hash::{Hash, Hasher};
use taskgraph::words::counted;
use xxhash_rust::xxh3::Xxh3;

/// The machine and model that tuning values are valid for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The device's name in the hardware table, or the CPU with its number of workers.
    pub device: String,
    /// The properties of the model that decide the sizes of its tasks.
    pub shape: String,
    /// Number of ranks.
    pub ranks: u32,
}

impl Place {
    /// The place of a model on `ranks` ranks. `gpu` is the name of a row of the hardware table.
    pub fn new(config: &ModelConfig, gpu: Option<&str>, workers: u32, ranks: u32) -> Place {
        let device = match gpu {
            Some(name) => name.to_string(),
            None => format!("{}, {}", cpu_name(), counted(workers, "worker")),
        };
        let shape = format!(
            "{} layers, hidden {}, intermediate {}, {} + {} heads of {}, vocabulary {}, {:?}",
            config.num_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            config.dtype
        );
        Place { device, shape, ranks }
    }

    /// The name of the file of its table.
    pub(super) fn file_name(&self) -> String {
        let mut hash = Xxh3::new();
        (&self.device, &self.shape, self.ranks, env!("CARGO_PKG_VERSION")).hash(&mut hash);
        format!("{:016x}.json", hash.finish())
    }
}

/// The processor's name according to the operating system.
fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split(": ").nth(1)).unwrap_or("cpu").trim().to_string()
}
