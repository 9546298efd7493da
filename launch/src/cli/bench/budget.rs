//! Where the microseconds of an iteration go, from a timeline (`--trace`).
//!
//! The operators of an iteration are ordered by their first tasks. The *hop* of an operator is the time from the last end of all earlier
//! operators to its first begin; it is negative if the operator begins before that. The *span* is the time from its first begin to its last
//! end. Hops and spans add up to the iteration. The time from the last end of an iteration to the first begin of the next is the step
//! between the two.

use crate::model::app_error::AppError;
use crate::model::files;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Which iterations are evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Iterations in which every request yields a token. Each one must be followed by another, because it includes the step between the
    /// two.
    Decode,
    /// Iterations with prompt tokens, each evaluated separately.
    Prefill,
}

/// A line of the timeline file.
#[derive(Deserialize)]
struct Line {
    name: String,
    #[serde(default)]
    cat: String,
    pid: u32,
    #[serde(default)]
    tid: u32,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Arguments,
}

#[derive(Default, Deserialize)]
struct Arguments {
    op: Option<String>,
    iteration: Option<u32>,
    graph: Option<String>,
    #[serde(default)]
    page_us: f64,
}

/// A task on the timeline.
struct Task {
    op: String,
    task_type: String,
    worker: u32,
    begin: f64,
    end: f64,
    page: f64,
}

/// Times of one operator in microseconds: means over all layers and iterations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Operator {
    /// Name of the operator without its layer.
    pub op: String,
    /// Task type.
    pub task_type: String,
    /// How many operators have this name in one iteration.
    pub count: f64,
    /// From the last end before it to its first begin.
    pub hop_us: f64,
    /// From its first begin to its last end.
    pub span_us: f64,
    /// From its first begin to its last one.
    pub begins_us: f64,
    /// Median run time of its tasks.
    pub run_us: f64,
    /// GPU: mean time that its tasks wait for streamed weights.
    pub page_us: f64,
    /// Number of tasks.
    pub tasks: f64,
    /// Largest number of its tasks on one worker.
    pub most_of_a_worker: f64,
    /// Hops and spans of all operators with this name in one iteration.
    pub total_us: f64,
}

/// A rank's budget.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Budget {
    /// Number of evaluated iterations.
    pub iterations: usize,
    /// The graph that they ran.
    pub graph: String,
    /// Median time from first begin to first begin.
    pub iteration_us: f64,
    /// Mean of the same; operators and steps add up to it.
    pub mean_us: f64,
    /// Median time from the last end to the next first begin.
    pub between_us: f64,
    /// The part of it that the batch step takes until it publishes its result.
    pub batch_step_us: f64,
    /// Time after that in which results go to the host, during the next iteration.
    pub hand_out_us: f64,
    /// In the order in which they run.
    pub operators: Vec<Operator>,
    /// How each rank's workers spent their time, as shares.
    pub workers: Vec<BTreeMap<String, f64>>,
}

/// Reads a timeline and sums it up.
///
/// # Errors
/// The file cannot be read, or has no iterations of this phase. Decoding needs two iterations in a row.
pub fn of_file(path: &Path, phase: Phase) -> Result<Budget, AppError> {
    let failed = |e: &dyn std::fmt::Display| AppError::input(format!("{}: {e}", path.display()));
    let file = files::open(path)?;
    let mut lines = Vec::new();
    for line in BufReader::new(file).lines() {
        let line = line.map_err(|e| failed(&e))?;
        let text = line.trim_end().trim_end_matches(',');
        // All other lines are names, and the brackets around the events.
        if text.starts_with(r#"{"ph":"X""#) {
            lines.push(serde_json::from_str(text).map_err(|e| failed(&e))?);
        }
    }
    sum_up(lines, phase).map_err(|problem| failed(&problem))
}

/// Sums up the decode iterations of a timeline in memory.
///
/// # Errors
/// The text is no timeline, or has fewer than two decode iterations in a row.
pub(crate) fn of_text(text: &[u8]) -> Result<Budget, String> {
    let mut lines = Vec::new();
    for line in text.split(|&byte| byte == b'\n').filter(|line| line.starts_with(br#"{"ph":"X""#)) {
        let line = line.strip_suffix(b",").unwrap_or(line);
        lines.push(serde_json::from_slice(line).map_err(|e| e.to_string())?);
    }
    sum_up(lines, Phase::Decode).map_err(str::to_string)
}

fn sum_up(lines: Vec<Line>, phase: Phase) -> Result<Budget, &'static str> {
    if lines.is_empty() {
        return Err("this is no timeline, or an empty one; `mpk-run --trace FILE` writes one");
    }
    let mut iterations: BTreeMap<u32, (String, Vec<Task>)> = BTreeMap::new();
    let (mut steps, mut hand_outs) = (Vec::new(), Vec::new());
    let mut slices: BTreeMap<u32, Vec<(f64, f64, String)>> = BTreeMap::new();
    let mut threads: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for line in lines {
        let (rank, first) = (line.pid, line.pid == 0);
        match &line.cat[..] {
            "step" if first && line.name == "batch step" => {
                steps.push((line.args.iteration.unwrap_or(0), line.dur))
            }
            "step" if first => hand_outs.push(line.dur),
            "step" => {}
            _ => {
                let what = if line.cat == "task" { "run".to_string() } else { line.name.clone() };
                slices.entry(rank).or_default().push((line.ts, line.dur, what));
                threads.entry(rank).or_default().insert(line.tid);
            }
        }
        if let (true, "task", Some(iteration)) = (first, &line.cat[..], line.args.iteration) {
            let graph = line.args.graph.unwrap_or_default();
            let of = iterations.entry(iteration).or_insert_with(|| (graph, Vec::new()));
            of.1.push(Task {
                op: line.args.op.unwrap_or_default(),
                task_type: line.name,
                worker: line.tid,
                begin: line.ts,
                end: line.ts + line.dur,
                page: line.args.page_us,
            });
        }
    }
    let prefill = phase == Phase::Prefill;
    // The graph that most iterations of this phase ran.
    let mut graphs: HashMap<&str, usize> = HashMap::new();
    for (graph, _) in iterations.values().filter(|(graph, _)| graph.starts_with("prefill") == prefill) {
        *graphs.entry(graph).or_default() += 1;
    }
    let graph = graphs.into_iter().max_by_key(|&(name, count)| (count, name.to_string()));
    let graph = graph.ok_or("the timeline has no iteration of this phase")?.0.to_string();
    let begin = |tasks: &[Task]| tasks.iter().map(|t| t.begin).fold(f64::INFINITY, f64::min);
    let end = |tasks: &[Task]| tasks.iter().map(|t| t.end).fold(0.0, f64::max);
    let (mut periods, mut between, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    for (&number, (name, tasks)) in iterations.iter().filter(|(_, (name, _))| *name == graph) {
        let next = iterations.get(&(number + 1)).filter(|(next, _)| next == name);
        match next {
            Some((_, next)) if !prefill => {
                periods.push(begin(next) - begin(tasks));
                between.push(begin(next) - end(tasks));
            }
            _ if prefill => periods.push(end(tasks) - begin(tasks)),
            _ => continue,
        }
        kept.push((number, tasks));
    }
    if kept.is_empty() {
        return Err(
            "the timeline has fewer than two decode iterations in a row; use a larger --trace-iterations",
        );
    }
    let numbers: BTreeSet<u32> = kept.iter().map(|&(number, _)| number + 1).collect();
    steps.retain(|(number, _)| numbers.contains(number));
    let window = (begin(kept[0].1), begin(kept[0].1) + periods.iter().sum::<f64>());
    Ok(Budget {
        iterations: kept.len(),
        mean_us: periods.iter().sum::<f64>() / periods.len() as f64,
        iteration_us: median(&mut periods),
        between_us: median(&mut between),
        batch_step_us: median(&mut steps.into_iter().map(|(_, took)| took).collect::<Vec<_>>()),
        hand_out_us: median(&mut hand_outs),
        operators: operators(&kept),
        workers: slices.iter().map(|(rank, slices)| shares(slices, window, threads[rank].len())).collect(),
        graph,
    })
}

/// Sums of one operator over iterations and layers.
#[derive(Default)]
struct Sum {
    place: f64,
    count: usize,
    hop: f64,
    span: f64,
    begins: f64,
    page: f64,
    tasks: usize,
    most: f64,
    runs: Vec<f64>,
}

fn operators(iterations: &[(u32, &Vec<Task>)]) -> Vec<Operator> {
    let mut sums: BTreeMap<(String, String), Sum> = BTreeMap::new();
    for (_, tasks) in iterations {
        let mut ops: BTreeMap<(&str, &str), Vec<&Task>> = BTreeMap::new();
        for task in tasks.iter() {
            ops.entry((&task.op, &task.task_type)).or_default().push(task);
        }
        let first = |tasks: &[&Task]| tasks.iter().map(|t| t.begin).fold(f64::INFINITY, f64::min);
        let mut ordered: Vec<_> = ops.into_iter().map(|(key, tasks)| (first(&tasks), key, tasks)).collect();
        ordered.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut last: Option<f64> = None;
        for (place, (begin, (op, task_type), tasks)) in ordered.iter().enumerate() {
            let sum = sums.entry((without_layer(op).to_string(), task_type.to_string())).or_default();
            let end = tasks.iter().map(|t| t.end).fold(0.0, f64::max).max(last.unwrap_or(0.0));
            let mut of_worker: HashMap<u32, usize> = HashMap::new();
            tasks.iter().for_each(|t| *of_worker.entry(t.worker).or_default() += 1);
            sum.place += place as f64;
            sum.count += 1;
            sum.hop += last.map_or(0.0, |last| begin - last);
            sum.span += end - begin;
            sum.begins += tasks.iter().map(|t| t.begin).fold(0.0, f64::max) - begin;
            sum.page += tasks.iter().map(|t| t.page).sum::<f64>();
            sum.tasks += tasks.len();
            sum.most += of_worker.values().copied().max().unwrap_or(0) as f64;
            sum.runs.extend(tasks.iter().map(|t| t.end - t.begin));
            last = Some(end);
        }
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    let place = |sum: &Sum| sum.place / sum.count as f64;
    sums.sort_by(|a, b| place(&a.1).total_cmp(&place(&b.1)));
    let rounds = iterations.len() as f64;
    let operator = |((op, task_type), mut sum): ((String, String), Sum)| {
        let mean = |value: f64| value / sum.count as f64;
        Operator {
            op,
            task_type,
            count: sum.count as f64 / rounds,
            hop_us: mean(sum.hop),
            span_us: mean(sum.span),
            begins_us: mean(sum.begins),
            page_us: sum.page / sum.tasks as f64,
            tasks: mean(sum.tasks as f64),
            most_of_a_worker: mean(sum.most),
            total_us: (sum.hop + sum.span) / rounds,
            run_us: median(&mut sum.runs),
        }
    };
    sums.into_iter().map(operator).collect()
}

/// `layer12.qkv` and `layers.12.qkv` become `qkv`.
fn without_layer(op: &str) -> &str {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let Some((head, rest)) = op.split_once('.') else { return op };
    match rest.split_once('.') {
        Some((middle, rest)) if number(middle) => rest,
        _ if head.strip_prefix("layer").is_some_and(number) => rest,
        _ => op,
    }
}

/// How a rank's workers spent the time window, as shares.
fn shares(slices: &[(f64, f64, String)], window: (f64, f64), workers: usize) -> BTreeMap<String, f64> {
    let all = (window.1 - window.0) * workers as f64;
    let mut shares: BTreeMap<String, f64> = BTreeMap::new();
    for (begin, took, what) in slices {
        let within = (begin + took).min(window.1) - begin.max(window.0);
        if within > 0.0 {
            *shares.entry(what.clone()).or_default() += within / all;
        }
    }
    let rest = 1.0 - shares.values().sum::<f64>();
    shares.insert("between tasks".into(), rest.max(0.0));
    shares
}

/// The median; 0 if there are no values.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

impl Budget {
    /// The budget as a table for people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        // Writing to memory does not fail.
        let _ = writeln!(
            out,
            "{}: {:.1} us per iteration (median of {}, mean {:.1}), {:.1} between two, of which the batch step takes {:.1}",
            self.graph, self.iteration_us, self.iterations, self.mean_us, self.between_us, self.batch_step_us
        );
        let _ = writeln!(
            out,
            "{:<28}{:>6}{:>9}{:>9}{:>9}{:>9}{:>9}{:>7}{:>7}{:>10}{:>7}",
            "operator",
            "count",
            "hop us",
            "span us",
            "begins",
            "run us",
            "page us",
            "tasks",
            "max/w",
            "total us",
            "%"
        );
        for o in &self.operators {
            let _ = writeln!(
                out,
                "{:<28}{:>6.0}{:>9.2}{:>9.2}{:>9.2}{:>9.2}{:>9.2}{:>7.0}{:>7.1}{:>10.1}{:>7.1}",
                format!("{} ({})", o.op, o.task_type).chars().take(27).collect::<String>(),
                o.count,
                o.hop_us,
                o.span_us,
                o.begins_us,
                o.run_us,
                o.page_us,
                o.tasks,
                o.most_of_a_worker,
                o.total_us,
                100.0 * o.total_us / self.mean_us
            );
        }
        for (rank, shares) in self.workers.iter().enumerate() {
            let shares: Vec<_> =
                shares.iter().map(|(what, s)| format!("{what} {:.1} %", 100.0 * s)).collect();
            let _ = writeln!(out, "workers of rank {rank}: {}", shares.join(", "));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &[&str]) -> Vec<Line> {
        text.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn task(iteration: u32, op: &str, worker: u32, begin: f64, took: f64) -> String {
        format!(
            r#"{{"name":"linear","cat":"task","pid":0,"tid":{worker},"ts":{begin},"dur":{took},
                "args":{{"op":"{op}","task":2,"iteration":{iteration},"graph":"decode-1"}}}}"#
        )
    }

    #[test]
    fn a_file_that_is_no_timeline_is_refused_as_such() {
        let problem = of_text(b"{\"schema\": \"mpk-model/1\"}").unwrap_err();
        assert!(problem.starts_with("this is no timeline"), "{problem}");
    }

    #[test]
    fn hops_and_spans_add_up_to_the_iteration() {
        let mut text = Vec::new();
        for iteration in [4, 5] {
            let at = f64::from(iteration) * 100.0;
            for layer in 0..2 {
                let at = at + 30.0 * f64::from(layer);
                text.push(task(iteration, &format!("layer{layer}.up"), 0, at, 10.0));
                text.push(task(iteration, &format!("layer{layer}.up"), 1, at + 2.0, 12.0));
                text.push(task(iteration, &format!("layer{layer}.down"), 0, at + 17.0, 5.0));
            }
        }
        let step =
            r#"{"name":"batch step","cat":"step","pid":0,"tid":2,"ts":455,"dur":7.5,"args":{"iteration":5}}"#;
        let wait = r#"{"name":"wait event","cat":"wait","pid":0,"tid":1,"ts":414,"dur":16}"#;
        text.extend([step.to_string(), wait.to_string()]);
        let budget =
            sum_up(lines(&text.iter().map(String::as_str).collect::<Vec<_>>()), Phase::Decode).unwrap();
        assert_eq!((budget.iterations, budget.iteration_us, budget.between_us), (1, 100.0, 48.0));
        assert_eq!(budget.batch_step_us, 7.5);
        let names: Vec<_> = budget.operators.iter().map(|o| (&o.op[..], o.count)).collect();
        assert_eq!(names, [("up", 2.0), ("down", 2.0)]);
        let (up, down) = (&budget.operators[0], &budget.operators[1]);
        assert_eq!((up.span_us, up.begins_us, up.tasks, up.run_us), (14.0, 2.0, 2.0, 12.0));
        assert_eq!((down.hop_us, down.span_us), (3.0, 5.0));
        let sum: f64 = budget.operators.iter().map(|o| o.total_us).sum();
        assert_eq!(sum + budget.between_us, budget.iteration_us, "no microsecond is left out");
        let share = &budget.workers[0];
        assert!((share["run"] - 54.0 / 200.0).abs() < 1e-9, "{share:?}");
        assert!((share["wait event"] - 16.0 / 200.0).abs() < 1e-9, "{share:?}");
        assert!((share.values().sum::<f64>() - 1.0).abs() < 1e-9, "{share:?}");
        assert!(budget.table().contains("down (linear)"));
    }

    #[test]
    fn layers_have_one_row() {
        for (op, name) in [
            ("layer12.qkv", "qkv"),
            ("layers.3.mlp.down", "mlp.down"),
            ("lm_head", "lm_head"),
            ("a.b", "a.b"),
        ] {
            assert_eq!(without_layer(op), name);
        }
    }

    #[test]
    fn a_timeline_without_decoding_is_refused() {
        for phase in [Phase::Decode, Phase::Prefill] {
            assert!(sum_up(Vec::new(), phase).is_err());
            assert!(sum_up(lines(&[&task(4, "up", 0, 1.0, 1.0)]), phase).is_err());
        }
    }

    #[test]
    fn a_timeline_that_is_no_regular_file_is_refused_before_it_is_read() {
        for device in ["/dev/zero", "/dev/null"] {
            let error = of_file(Path::new(device), Phase::Decode).unwrap_err();
            assert!(error.status == 2 && error.message.contains("not a regular file"), "{error}");
        }
    }

    #[test]
    fn an_iteration_of_prompts_needs_no_other_after_it() {
        let prefill = |task: String| task.replace("decode-1", "prefill-512");
        let text = [
            prefill(task(3, "layer0.up", 0, 100.0, 10.0)),
            prefill(task(3, "layer0.down", 1, 115.0, 20.0)),
            task(4, "layer0.up", 0, 150.0, 1.0),
        ];
        let budget = sum_up(lines(&text.each_ref().map(|text| &text[..])), Phase::Prefill).unwrap();
        assert_eq!((&budget.graph[..], budget.iterations, budget.iteration_us), ("prefill-512", 1, 35.0));
        assert_eq!((budget.operators[1].hop_us, budget.operators[1].span_us), (5.0, 20.0));
    }
}
