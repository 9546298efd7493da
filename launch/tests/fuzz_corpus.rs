//! Replays the corpus of the fuzz targets (`fuzz/`) and some mutations of it: no crash, no hang, no gigabyte.
//!
//! `MPK_FUZZ_SECONDS=600 cargo test --release -p mpk-launch --test fuzz_corpus` continues with other mutations for this long
//! per target. `scripts/fuzz.sh` finds more in that time, because it sees which code an input reaches.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[path = "../../fuzz/inputs.rs"]
mod inputs;

/// Time limit for one input, on a slow machine.
const LONGEST: Duration = Duration::from_secs(20);
/// Mutations of each target's corpus; each takes well under a millisecond.
const MUTATIONS: u64 = 500;

/// Bytes with a meaning in JSON, safetensors or regular expressions.
const SPECIAL: &[u8] = b"\0\"\\{}[]:,-.0919eEtfn()*+?|^$\xff\x80";

fn corpus() -> Vec<(String, Vec<PathBuf>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    let paths = |folder: &Path| {
        let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    paths(&folder).iter().map(|folder| (name(folder), paths(folder))).collect()
}

/// Runs one input, and saves it to a file if it does harm.
fn run(target: fn(&[u8]), bytes: &[u8], what: &str) {
    let begin = Instant::now();
    let ended = std::panic::catch_unwind(|| target(bytes)).is_ok();
    if !ended || begin.elapsed() >= LONGEST {
        let path = std::env::temp_dir().join("mpk-fuzz-harm");
        fs::write(&path, bytes).expect("the input that does harm");
        let took = begin.elapsed();
        panic!(
            "{what} {}, after {took:?}; it is kept in {}",
            if ended { "ends late" } else { "panics" },
            path.display()
        );
    }
}

/// Peak memory of this process in bytes.
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("this process's status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("VmHWM");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[test]
fn the_corpus_and_its_mutations_do_no_harm() {
    let corpus = corpus();
    let names: Vec<&str> = corpus.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["checkpoint", "model_json", "task_graph_json", "tokenizer_json"]);
    let more = std::env::var("MPK_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let more = Duration::from_secs(more.unwrap_or(0));
    for (name, paths) in &corpus {
        let target = inputs::target(name).expect("a target for each folder");
        assert!(paths.len() >= 5, "{name}: {} inputs", paths.len());
        let inputs: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).expect("an input")).collect();
        for (path, bytes) in paths.iter().zip(&inputs) {
            run(target, bytes, &path.display().to_string());
        }
        // Always the same mutations: xorshift from a fixed start.
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as usize % below.max(1)
        };
        let begin = Instant::now();
        for number in 0.. {
            if number >= MUTATIONS && begin.elapsed() >= more {
                println!("{name}: {number} mutations, {} bytes of memory at the peak", peak_memory());
                break;
            }
            let index = next(inputs.len());
            let mut bytes = inputs[index].clone();
            for _ in 0..=next(4) {
                let at = next(bytes.len());
                match next(5) {
                    _ if bytes.is_empty() => bytes.push(SPECIAL[next(SPECIAL.len())]),
                    0 => bytes[at] = SPECIAL[next(SPECIAL.len())],
                    1 => bytes[at] ^= 1 << next(8),
                    2 => bytes.insert(at, SPECIAL[next(SPECIAL.len())]),
                    3 => {
                        let end = (at + next(16)).min(bytes.len());
                        bytes.drain(at..end);
                    }
                    _ => {
                        // A piece of another input.
                        let other = &inputs[next(inputs.len())];
                        let from = next(other.len());
                        let piece = other[from..(from + next(64)).min(other.len())].to_vec();
                        bytes.splice(at..at, piece);
                    }
                }
            }
            run(target, &bytes, &format!("{name}: mutation {number} of {}", paths[index].display()));
        }
        assert!(peak_memory() < 1 << 30, "{name}: {} bytes at the peak", peak_memory());
    }
}
