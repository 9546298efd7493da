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
        /// By stores where all ranks reach each other's memory; else through NVSHMEM to those out of reach.
        Auto,
        /// By stores only; it is an error where a peer can't be reached.
        P2p,
        /// Through NVSHMEM only, as between nodes.
        Nvshmem,
    }
    /// How NVSHMEM's ranks find each other.
    Bootstrap for cuda::Bootstrap {
        /// By a token that rank 0 sends over MPI.
        UniqueId,
        /// By the MPI communicator.
        Mpi,
    }
    /// How the kernels of several ranks are started.
    Launch for config::LaunchChoice {
        /// By NVSHMEM's collective launch where it can be had, else cooperatively.
        Auto,
        /// By cuLaunchCooperativeKernel, each rank its own.
        Cooperative,
    }
    /// When a request gets pages of the KV cache.
    Kv for model_json::Kv {
        /// All that it can need, when it begins.
        Reserved,
        /// As it needs them; the youngest request waits where none is left.
        OnDemand,
    }
    /// Whether full pages of prompts are kept for later prompts that begin with the same tokens.
    PrefixCache for model_json::PrefixCache {
        /// Every prompt is computed.
        Off,
        /// What an earlier prompt has in common is not computed again.
        On,
    }
    /// How tasks get to workers.
    Placement for model_json::Placement {
        /// Each worker has its list.
        Static,
        /// Events launch tasks through schedulers.
        Dynamic,
    }
    /// How an allreduce is lowered.
    Allreduce for model_json::Allreduce {
        /// By size.
        Auto,
        /// Copies with signal, then a reduce.
        CopyReduce,
        /// Flagged words pushed to all ranks.
        OneShot,
        /// Reduce-scatter, then broadcast.
        TwoShot,
        /// Over nodes: a sum within each node, an exchange between nodes, the result spread within each node.
        Hierarchical,
    }
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
