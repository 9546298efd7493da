//! The values of options that are a choice, with the help of each.

use crate::engine::config;
use crate::model::model_json;
use clap::ValueEnum;
use distributed::cuda;

/// An option's values, and what each stands for.
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
    /// Which kind of machine runs the tasks.
    Backend for config::BackendChoice {
        /// CUDA where there is a GPU, otherwise the CPU.
        Auto,
        /// One persistent kernel per GPU.
        Cuda,
        /// Threads.
        Cpu,
    }
    /// How ranks write to each other's memory.
    Transport for cuda::Transport {
        /// Direct stores; NVSHMEM only to ranks whose memory is out of reach.
        Auto,
        /// Direct stores only; an error if a peer is out of reach.
        P2p,
        /// NVSHMEM only, as between nodes.
        Nvshmem,
        /// By the hosts, over MPI, for networks that NVSHMEM has no transport for.
        Host,
    }
    /// How NVSHMEM's ranks find each other.
    Bootstrap for cuda::Bootstrap {
        /// A token that rank 0 sends over MPI.
        UniqueId,
        /// The MPI communicator.
        Mpi,
    }
    /// How the kernels of several ranks are started.
    Launch for config::LaunchChoice {
        /// NVSHMEM's collective launch if it is available, else cooperative.
        Auto,
        /// cuLaunchCooperativeKernel on each rank.
        Cooperative,
    }
    /// When a request gets pages of the KV cache.
    Kv for model_json::Kv {
        /// All pages that it can need, when it starts.
        Reserved,
        /// Pages as it needs them; when none is left, the youngest request waits.
        OnDemand,
    }
    /// Whether full pages of prompts are kept for later prompts that begin with the same tokens.
    PrefixCache for model_json::PrefixCache {
        /// Every prompt is computed in full.
        Off,
        /// What a prompt shares with an earlier one is not computed again.
        On,
    }
    /// How tasks get to workers.
    Placement for model_json::Placement {
        /// Each worker has a fixed list.
        Static,
        /// Events launch tasks through schedulers.
        Dynamic,
    }
    /// How an allreduce is lowered.
    Allreduce for model_json::Allreduce {
        /// By size: one-shot for few rows, otherwise two-shot (on GPUs) or copies.
        Auto,
        /// Copies with signal, then a reduce.
        CopyReduce,
        /// Flagged words pushed to all ranks: quickest for few rows. Prompts take much memory.
        OneShot,
        /// Reduce-scatter, then broadcast.
        TwoShot,
        /// Over nodes: a sum within each node, an exchange between nodes, the result spread within each node.
        Hierarchical,
    }
}

/// Whether measured values are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TuningTable {
    /// Those that `mpk-bench tune` has kept for this machine, model and number of ranks, if there are any.
    Auto,
    /// None of them: the defaults.
    Off,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names on the command line are those of model.json.
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
    }
}
