//! The allreduce inside the running kernel: from the last task that writes a partial sum to the first task that reads
//! the sum.
//!
//! The graph is a chain of links. A link is a linear that is split by columns, then a linear that is split by rows,
//! whose partial sums are reduced (f32, or bf16 with `--allreduce-dtype activation`). The weights are powers of two,
//! chosen so that each sum is exact, depends on every rank's part, and differs from the sums of the two links before: a
//! buffer might still hold those. The times come from a timeline; each rank uses its own clock.

use crate::cli::bench::own_graph::{all_equal, model, tensor, time};
use crate::cli::bench::program::{Scratch, finish};
use crate::cli::bench::samples::Samples;
use crate::cli::choices::AllreduceDtype;
use crate::cli::console::print_line;
use crate::cli::program::{Failure, prepare, tell_once, with_console};
use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::{Engine, ModelSpec, RunConfig};
use crate::model::app_error::AppError;
use distributed::launcher::launched_ranks;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Number of links of a chain, a multiple of the number of factors.
const LINKS: usize = 24;
/// The factors of the links, in turn. Their product is 1.
const FACTORS: [f64; 3] = [2.0, 2.0, 0.25];
/// Inner columns per rank.
const INNER: usize = 16;
/// Columns of a row of the sum.
const COLUMNS: usize = 2048;
/// Iterations on the timeline.
const TRACED: u32 = 20;

/// What is timed.
#[derive(Clone, Debug, clap::Args)]
pub struct Case {
    /// Size of the sum in bytes, if it is f32: a multiple of 64 up to 8,192, or a multiple of 8,192.
    #[arg(long, default_value_t = 8192)]
    pub bytes: usize,
    /// Number of repetitions. The median, minimum and maximum are reported.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
    #[command(flatten)]
    #[allow(missing_docs, reason = "would be shown as help")]
    pub runtime: RuntimeArgs,
}

impl Case {
    /// Rows and columns of a sum.
    fn sizes(&self) -> Result<(usize, usize), AppError> {
        let row = COLUMNS * 4;
        match self.bytes {
            64..=8192 if self.bytes.is_multiple_of(64) => Ok((1, self.bytes / 4)),
            _ if self.bytes > row && self.bytes.is_multiple_of(row) && self.bytes / row <= 512 => {
                Ok((self.bytes / row, COLUMNS))
            }
            bytes => Err(AppError::input(format!(
                "--bytes {bytes}: expected a multiple of 64 up to {row}, or a multiple of {row} up to {}",
                512 * row
            ))),
        }
    }
}

/// The value of every element of `x`, and again after all links.
const VALUE: f64 = 1.5;

/// model.json of the chain.
fn chain(ranks: usize, rows: usize, columns: usize, sums: &str) -> String {
    let inner = INNER * ranks;
    let split = |mut tensor: Value, dim: usize| {
        tensor["shard"] = json!({"dim": dim, "kind": "even", "unit": INNER});
        tensor
    };
    // A rank's share of the sum: a half, a quarter, ..., and the rest for the last rank. Each is a power of two.
    let share = |rank: usize| 0.5f64.powi((rank + 1).min(ranks - 1) as i32);
    let mut tensors = vec![
        tensor("x", "input", "f32", [rows, columns], |_, _| VALUE),
        split(tensor("up", "weight", "bf16", [inner, columns], |r, c| f64::from(r % columns == c)), 0),
    ];
    for (number, factor) in FACTORS.iter().enumerate() {
        let part = |_, c: usize| factor * share(c / INNER) / INNER as f64;
        tensors.push(split(tensor(&format!("down{number}"), "weight", "bf16", [columns, inner], part), 1));
    }
    let link = |number: usize| {
        let from = if number == 0 { "x".into() } else { format!("y{}", number - 1) };
        let (inner, sum) = (format!("h{number}"), format!("y{number}"));
        [
            json!({"op": "linear", "inputs": [from, "up"], "outputs": [inner], "attrs": {"output_dtype": "f32"}}),
            json!({"op": "linear", "inputs": [inner, format!("down{}", number % FACTORS.len())],
                   "outputs": [sum], "attrs": {"output_dtype": sums}}),
        ]
    };
    model(rows as u32, tensors, (0..LINKS).flat_map(link).collect(), &format!("y{}", LINKS - 1))
}

/// Runs the benchmark and prints one JSON object, on rank 0. Returns the exit status.
pub fn run(case: &Case) -> i32 {
    let ranks = launched_ranks().unwrap_or(1) as usize;
    let prepared = case.runtime.contradiction().map_or(Ok(()), |problem| Err(AppError::input(problem)));
    let prepared = prepared.and_then(|()| {
        let (rows, columns) = case.sizes()?;
        if ranks < 2 {
            let what = "an allreduce needs several ranks: `mpirun -n 2 mpk-bench allreduce`";
            return Err(AppError::input(what));
        }
        prepare(&case.runtime)?;
        let rounded = case.runtime.allreduce_dtype == Some(AllreduceDtype::Activation);
        let sums = if rounded { "bf16" } else { "f32" };
        Ok((ModelSpec::json(&chain(ranks, rows, columns, sums))?, Scratch::new()?))
    });
    let (mut spec, scratch) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return tell_once(&error),
    };
    spec.overrides = case.runtime.overrides();
    let timeline = scratch.path("timeline.json");
    let config = RunConfig {
        trace: Some(timeline.clone()),
        trace_iterations: Some(TRACED),
        // Each process has its own path for the timeline, so the configurations differ.
        in_common: vec![("the options".into(), format!("{case:?}"))],
        ..case.runtime.run_config()
    };
    let engine = match Engine::load(spec, with_console(config)) {
        Ok(engine) => engine,
        // The engine has reported the error.
        Err(error) => return error.exit_status(),
    };
    if engine.info().rank > 0 {
        return engine.serve().map_or_else(|error| error.exit_status(), |()| 0);
    }
    let done = measure(case, &engine);
    finish(&engine, done, |mut object| {
        object["us"] = json!(hops(&timeline)?);
        print_line(&object.to_string())
    })
}

fn measure(case: &Case, engine: &Engine) -> Result<Value, Failure> {
    let timed = time(engine, case.repeats, |run| all_equal(run, VALUE))?;
    let link = Samples::of(timed.ns.samples.iter().map(|ns| ns / 1e3 / LINKS as f64).collect());
    let info = engine.info();
    Ok(json!({
        "schema": "mpk-bench/1",
        "what": "allreduce",
        "bytes": case.bytes,
        "allreduce": info.model.runtime.allreduce,
        "allreduce_dtype": info.model.runtime.allreduce_dtype,
        "placement": info.model.runtime.placements(),
        "backend": info.backend,
        "tp": info.ranks,
        "links": LINKS,
        // Time of a link: two small products and the allreduce, with the timeline on.
        "link_us": link,
        "verdict": {"right": true, "outputs": format!("all {VALUE}"), "ranks": "the same bits"},
    }))
}

#[derive(Deserialize)]
struct Line {
    pid: u32,
    cat: String,
    ts: f64,
    dur: f64,
    #[serde(default)]
    args: Arguments,
}

#[derive(Default, Deserialize)]
struct Arguments {
    op: Option<String>,
    iteration: Option<u32>,
}

/// Microseconds from the last end of a link's second linear to the first begin of the next link's first linear, over all
/// ranks, links and iterations of the timeline.
fn hops(timeline: &Path) -> Result<Samples, AppError> {
    let failed = |error: &dyn std::fmt::Display| AppError::failed(format!("{}: {error}", timeline.display()));
    let file = std::fs::File::open(timeline).map_err(|e| failed(&e))?;
    // By rank, iteration and link: the last end of the second linear, and the first begin of the next first linear.
    let mut ends: BTreeMap<(u32, u32, usize), f64> = BTreeMap::new();
    let mut begins: BTreeMap<(u32, u32, usize), f64> = BTreeMap::new();
    for line in BufReader::new(file).lines() {
        let line = line.map_err(|e| failed(&e))?;
        let text = line.trim_end().trim_end_matches(',');
        if !text.starts_with(r#"{"ph":"X""#) {
            continue;
        }
        let line: Line = serde_json::from_str(text).map_err(|e| failed(&e))?;
        let (Some(op), Some(iteration), "task") = (&line.args.op, line.args.iteration, &line.cat[..]) else {
            continue;
        };
        let number = |text: &str| text.parse::<usize>().ok();
        if let Some(link) = op.strip_prefix('y').and_then(number) {
            let end = ends.entry((line.pid, iteration, link)).or_insert(0.0);
            *end = end.max(line.ts + line.dur);
        } else if let Some(link) = op.strip_prefix('h').and_then(number).filter(|&link| link > 0) {
            let begin = begins.entry((line.pid, iteration, link - 1)).or_insert(f64::INFINITY);
            *begin = begin.min(line.ts);
        }
    }
    let hops = begins.iter().filter_map(|(key, begin)| Some(begin - ends.get(key)?));
    let mut hops = Samples::of(hops.collect()).ok_or_else(|| failed(&"the timeline holds no link"))?;
    // There are thousands of samples, too many to print.
    hops.samples.clear();
    Ok(hops)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_the_ranks_add_up_and_each_counts() {
        for ranks in 2..=8 {
            let text: Value = serde_json::from_str(&chain(ranks, 1, 64, "f32")).unwrap();
            let down = text["graph"]["tensors"].as_array().unwrap().iter().find(|t| t["name"] == "down0");
            let values = down.unwrap()["data"]["values"].as_array().unwrap();
            let row: Vec<f64> = values[..INNER * ranks].iter().map(|v| v.as_f64().unwrap()).collect();
            assert_eq!(row.iter().sum::<f64>(), FACTORS[0], "{ranks} ranks");
            assert!(row.iter().all(|&v| v > 0.0 && v.log2().fract() == 0.0), "{row:?}");
        }
        assert_eq!(FACTORS.iter().product::<f64>(), 1.0);
        assert!(LINKS.is_multiple_of(FACTORS.len()));
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let sizes = |bytes| {
            let line = ["mpk-bench".to_string(), "allreduce".into(), "--bytes".into(), format!("{bytes}")];
            #[derive(clap::Parser)]
            struct Program {
                #[command(flatten)]
                case: Case,
            }
            use clap::Parser;
            Program::parse_from(line.into_iter().filter(|word| word != "allreduce")).case.sizes()
        };
        assert_eq!(sizes(8192).unwrap(), (1, 2048));
        assert_eq!(sizes(131_072).unwrap(), (16, 2048));
        assert_eq!(sizes(1024).unwrap(), (1, 256));
        for bytes in [0, 10, 8200, 12_288] {
            assert!(sizes(bytes).is_err(), "{bytes}");
        }
    }
}
