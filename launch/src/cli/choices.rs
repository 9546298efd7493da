//! Options with a fixed set of values, and the help text of each value.

use crate::engine::config;
use crate::model::model_json;
use clap::ValueEnum;
use distributed::cuda;

/// Defines options whose values map one to one to the library's enums.
macro_rules! choices {
    ($($(#[$doc:meta])* $name:ident for $target:ty { $($(#[$value_doc:meta])* $value:ident),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
        pub enum $name {
            $($(#[$value_doc])* $value),+
        }

        impl From<$name> for $target {
            fn from(choice: $name) -> Self {
                match choice {
                    $($name::$value => Self::$value),+
                }
            }
        }
    )+};
}

choices! {
    /// What runs the tasks.
    Backend for config::BackendChoice {
        /// CUDA where there is a GPU, otherwise the CPU.
        Auto,
        /// GPUs: one persistent kernel per GPU.
        Cuda,
        /// CPU: workers are threads.
        Cpu,
    }
    /// How ranks write to each other's memory.
    Transport for cuda::Transport {
        /// Direct stores; NVSHMEM only to ranks whose memory is out of reach.
        Auto,
        /// Direct stores only; an error if a peer's memory is out of reach.
        P2p,
        /// NVSHMEM only, as between nodes.
        Nvshmem,
        /// The hosts copy over MPI, for networks without an NVSHMEM transport.
        Host,
    }
    /// How NVSHMEM's ranks find each other.
    Bootstrap for cuda::Bootstrap {
        /// With an id that rank 0 sends over MPI. Works with any MPI.
        UniqueId,
        /// With the MPI communicator.
        Mpi,
    }
    /// How the kernels of several ranks are launched.
    Launch for config::LaunchChoice {
        /// NVSHMEM's collective launch if it is available, otherwise cooperative.
        Auto,
        /// cuLaunchCooperativeKernel on each rank.
        Cooperative,
    }
    /// When a request gets pages of the KV cache.
    Kv for model_json::Kv {
        /// When it starts, it gets all the pages that it may need.
        Reserved,
        /// It gets pages as it needs them. If none is left, the youngest request waits.
        OnDemand,
    }
    /// Whether the KV cache of prompts is kept for later prompts that begin with the same tokens.
    PrefixCache for model_json::PrefixCache {
        /// Compute every prompt in full.
        Off,
        /// Compute only the part of a prompt that follows the pages it shares with an earlier one.
        On,
    }
    /// How tasks are assigned to workers.
    Placement for model_json::Placement {
        /// Each worker has a fixed list of tasks.
        Static,
        /// Schedulers assign tasks when their events complete.
        Dynamic,
    }
    /// How an allreduce is lowered.
    Allreduce for model_json::Allreduce {
        /// Copy-reduce with `--transport host`. Hierarchical if one of several nodes has several ranks. Otherwise by size: one-shot
        /// for few rows, copy-reduce for more, and two-shot on GPUs for many.
        Auto,
        /// Each rank copies its part to every peer with a signal, then reduces.
        CopyReduce,
        /// Each rank pushes flagged words to every peer. Fastest for few rows; prompts need much memory.
        OneShot,
        /// Reduce-scatter, then broadcast.
        TwoShot,
        /// For several nodes: reduce within each node, exchange between nodes, broadcast within each node.
        Hierarchical,
    }
    /// The type in which ranks send the summands of an allreduce.
    AllreduceDtype for model_json::AllreduceDtype {
        /// On GPUs, the activations' type for prompts in graphs of 256 rows or more; otherwise f32.
        Auto,
        /// Always f32.
        F32,
        /// The activations' type in all graphs. Only f32 can be pushed, so another way replaces one-shot.
        Activation,
    }
}

/// Whether the values that `mpk-bench tune` found are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TuningTable {
    /// Use the values that `mpk-bench tune` saved for this machine, model and number of ranks, if any.
    Auto,
    /// Use the defaults.
    Off,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The command line and model.json use the same names.
    fn spelt_alike<T: ValueEnum, U: From<T> + serde::Serialize>() {
        for value in T::value_variants() {
            let name = value.to_possible_value().unwrap().get_name().to_string();
            assert_eq!(serde_json::json!(U::from(value.clone())), name);
        }
    }

    #[test]
    fn choices_are_spelt_as_in_model_json() {
        spelt_alike::<Placement, model_json::Placement>();
        spelt_alike::<Allreduce, model_json::Allreduce>();
        spelt_alike::<AllreduceDtype, model_json::AllreduceDtype>();
    }
}
