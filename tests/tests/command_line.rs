//! Proves that the command line keeps its contract: the output of `--json` and of text, ends of sequence,
//! prompts and their order, traces, and exit status 0 where it is due. Bad input is in `bad_input`, emitted
//! graphs in `emitted_graphs.rs`.

use mpk_tests::fixtures::Fixture;
use mpk_tests::model_file::read_json;
use mpk_tests::task_graph::emit;
use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// One object, always with exactly these fields ([`mpk_tests::RunJson`] refuses unknown ones).
#[test]
fn json_is_one_object_of_the_contract() {
    let model = ModelFile::of_fixture("mistral");
    for ranks in [1, 2] {
        let job =
            Job::new(ranks).arg(model.path()).args(["--prompt-tokens", "1,2,3", "--max-new-tokens", "4"]);
        let finished = job.clone().arg("--json").run().expect(0).expect_nothing_left();
        assert!(
            finished.stdout.ends_with('\n') && finished.stdout.lines().count() == 1,
            "{}",
            finished.stdout
        );
        let raw: Value = serde_json::from_str(&finished.stdout).expect("one object");
        let keys = |v: &Value| v.as_object().expect("an object").keys().cloned().collect::<BTreeSet<_>>();
        let set = |names: &[&str]| names.iter().map(|s| s.to_string()).collect::<BTreeSet<_>>();
        assert_eq!(keys(&raw), set(&["schema", "backend", "tp", "requests", "timing"]));
        let request = set(&["prompt_tokens", "tokens", "text", "finish_reason"]);
        assert_eq!(keys(&raw["requests"][0]), request, "no logprobs unless asked for");
        assert!(raw["requests"][0]["text"].is_null(), "there is no tokenizer");
        let found = finished.json();
        assert_eq!((&found.schema[..], &found.backend[..], found.tp), ("mpk-run/1", "cpu", ranks));
        assert_eq!(found.requests[0].prompt_tokens, [1, 2, 3]);
        let timing = &found.timing;
        assert!(timing.load_s > 0.0 && timing.prefill_s > 0.0 && timing.decode_s > 0.0, "{timing:?}");
        // The prompt's iteration gives the first token.
        assert_eq!(timing.decode_steps, 3);
        let per_token = 1000.0 * timing.decode_s / 3.0;
        assert!((timing.ms_per_token - per_token).abs() <= 1e-9 * per_token, "{timing:?}");
    }
}

/// All prompts wait at once.
#[test]
fn there_may_be_thousands_of_prompts() {
    let prompts = vec![[1, 2, 3]; 1500];
    let generate = json!({"prompt_tokens": prompts, "max_new_tokens": 1, "ignore_eos": true});
    let model = ModelFile::of_fixture("qwen3").set("max_batch", 8).set("generate", generate);
    let found = Job::new(1).arg(model.path()).run_json();
    assert!(
        found.requests.len() == 1500 && found.requests.iter().all(|r| r.tokens == found.requests[0].tokens)
    );
}

#[test]
fn log_probabilities_are_sorted_and_sum_to_one() {
    let model = ModelFile::of_fixture("mistral");
    for (asked, count) in [(1, 1), (3, 3), (128, 128)] {
        let job = Job::new(2).arg(model.path()).args(["--prompt-tokens", "5,6", "--max-new-tokens", "3"]);
        let found = job.args(["--logprobs", &asked.to_string(), "--ignore-eos"]).run_json();
        let lists = found.requests[0].logprobs.as_ref().expect("logprobs");
        assert_eq!(lists.len(), 3);
        // A greedy token is the best one.
        let own = found.requests[0].token_logprobs.as_ref().expect("the tokens' own");
        assert_eq!(*own, lists.iter().map(|list| list[0].1).collect::<Vec<f64>>());
        for (list, &token) in lists.iter().zip(&found.requests[0].tokens) {
            assert_eq!(list.len(), count);
            assert_eq!(list[0].0, token);
            assert!(list.is_sorted_by(|a, b| a.1 >= b.1), "{list:?}");
            let total: f64 = list.iter().map(|e| e.1.exp()).sum();
            assert!(total <= 1.0 + 1e-4, "{total}");
            // 128 of 211 tokens have nearly all of the probability.
            assert!(asked < 128 || total > 0.95, "{total}");
        }
    }
}

/// No log-probabilities differ from an empty list of them; `--logprobs 0` is the same as no option.
#[test]
fn no_log_probabilities() {
    let model = ModelFile::of_fixture("mistral");
    let job = Job::new(1).arg(model.path()).args(["--prompt-tokens", "5", "--max-new-tokens", "2"]);
    let found = job.args(["--logprobs", "0"]).run_json();
    assert!(found.requests[0].logprobs.is_none() && found.requests[0].token_logprobs.is_none());
}

/// Without `--json` the texts are printed in order, each with a newline. They are the same as those of `--json`.
#[test]
fn text_is_that_of_json() {
    for name in ["llama", "tiny"] {
        let fixture = Fixture::open(name);
        let requests: Vec<_> =
            fixture.expected.requests.iter().filter(|r| r.prompt.is_some()).cloned().collect();
        assert!(requests.len() > 1);
        for ignore_eos in [false, true] {
            let model =
                fixture.model_of(&requests).set("generate.ignore_eos", ignore_eos).set("max_batch", 2);
            for ranks in [1, 2] {
                let found = Job::new(ranks).arg(model.path()).run_json();
                let finished = Job::new(ranks).arg(model.path()).run().expect(0).expect_nothing_left();
                let mut rest = finished.stdout.as_str();
                for (index, (found, request)) in found.requests.iter().zip(&requests).enumerate() {
                    // The prompt's number, then its text.
                    let begin = format!("{}==> prompt {}: ", if index > 0 { "\n" } else { "" }, index + 1);
                    rest =
                        rest.strip_prefix(&begin).unwrap_or_else(|| panic!("{begin:?} is not at {rest:?}"));
                    let (prompt, text) = rest.split_once(" <==\n").expect("the end of the line");
                    let word =
                        request.prompt.as_ref().and_then(|p| p.split_whitespace().next()).unwrap_or("");
                    assert!(prompt.contains(word), "{prompt:?} has no {word:?}");
                    let expected = format!("{}\n", found.text.as_ref().expect("a text"));
                    rest = text.strip_prefix(&expected).unwrap_or_else(|| panic!("{expected:?}: {text:?}"));
                }
                assert_eq!(rest, "", "{name}, ignore_eos {ignore_eos}, {ranks} ranks");
            }
        }
    }
}

/// `--stop` ends an answer before the text, replaces `generate.stop`, and needs a tokenizer.
#[test]
fn stop_strings() {
    let tiny = ModelFile::of_fixture("tiny");
    let job = || {
        let job = Job::new(2).arg(tiny.path());
        job.args(["--prompt", "In the beginning", "--max-new-tokens", "24", "--ignore-eos", "--greedy"])
    };
    let whole = job().run_json().requests[0].text.clone().expect("text");
    let word = whole.split_whitespace().nth(3).expect("several words");
    let before = &whole[..whole.find(word).expect("the word")];
    let found = job().args(["--stop", "\u{1}", "--stop", word]).run_json();
    assert_eq!(found.requests[0].text.as_deref(), Some(before));
    assert_eq!(found.requests[0].finish_reason, "stop");
    let random = ModelFile::of_fixture("mistral");
    let refused =
        Job::alone().arg(random.path()).args(["--prompt-tokens", "1", "--stop", "x"]).run().expect(2);
    assert!(
        refused.stderr.contains("--stop") && refused.stderr.contains("tokenizer.json"),
        "{}",
        refused.stderr
    );
}

/// The text of a single prompt is printed alone; with `--logprobs` a line for each token follows it.
#[test]
fn log_probabilities_are_printed_after_the_text() {
    let fixture = Fixture::open("tiny");
    let model = fixture.model();
    let job =
        || Job::new(2).arg(model.path()).args(["--prompt", "In the beginning", "--max-new-tokens", "4"]);
    let text = format!("{}\n", job().run_json().requests[0].text.as_ref().expect("a text"));
    assert_eq!(job().run().expect(0).stdout, text);
    // Tokens that are not the two best show their own log-probability as well.
    let options = ["--logprobs", "2", "--presence-penalty", "2", "--temperature", "3", "--seed", "5"];
    let found = job().args(options).run_json();
    let text = format!("{}\n", found.requests[0].text.as_ref().expect("a text"));
    let printed = job().args(options).run().expect(0).stdout;
    let lines: Vec<&str> = printed.strip_prefix(&text).expect("the text first").lines().collect();
    assert_eq!(lines.len(), 4, "{printed}");
    let own = found.requests[0].token_logprobs.as_ref().expect("the tokens' own");
    let lists = found.requests[0].logprobs.as_ref().expect("log-probabilities");
    assert!(own.iter().zip(lists).any(|(own, list)| list.iter().all(|(_, other)| own < other)), "{own:?}");
    for ((line, own), tops) in lines.iter().zip(own).zip(lists) {
        assert!(line.contains(&format!(" {own:.4}:")), "{line}");
        for (token, logprob) in tops {
            assert!(line.contains(&format!(" {token} ")), "{line}");
            assert!(line.contains(&format!("{logprob:.4}")), "{line}");
        }
    }
}

/// Without a tokenizer the ids are printed.
#[test]
fn tokens_are_printed_where_there_is_no_tokenizer() {
    let model = ModelFile::of_fixture("mistral");
    let job = Job::new(2).arg(model.path()).args([
        "--prompt-tokens",
        "34",
        "--max-new-tokens",
        "3",
        "--ignore-eos",
    ]);
    assert_eq!(job.run().expect(0).stdout.split_whitespace().collect::<Vec<_>>(), ["137", "7", "146"]);
}

/// The command line's prompts replace those of model.json; the order of texts and tokens is kept.
#[test]
fn prompts_of_the_command_line_replace_those_of_the_file() {
    let fixture = Fixture::open("tiny");
    let model = fixture.model();
    let job = Job::new(2)
        .arg(model.path())
        .args(["--max-new-tokens", "3", "--prompt-tokens", "7,8", "--prompt", "In the beginning"])
        .args(["--prompt-tokens", "9", "--prompt", "LORD's"]);
    let found = job.run_json();
    let prompts: Vec<&[u32]> = found.requests.iter().map(|r| &r.prompt_tokens[..]).collect();
    assert_eq!(prompts, [&[7, 8][..], &[1136, 259, 1786, 1256], &[9], &[44, 342, 501]]);
    assert!(found.requests.iter().all(|r| r.tokens.len() <= 3));
}

/// A request ends at the first of several ends of sequence; with `--ignore-eos` it continues.
#[test]
fn ends_of_sequence() {
    let fixture = Fixture::open("qwen3");
    assert!(fixture.expected.eos_token_ids.len() > 1);
    let index = fixture.expected.requests.iter().position(|r| r.finish_reason == "eos").expect("one ends");
    let request = &fixture.expected.requests[index];
    let model = fixture.model_of(std::slice::from_ref(request)).set("generate.ignore_eos", false);
    let found = Job::new(2).arg(model.path()).run_json();
    assert_eq!(found.requests[0].tokens, request.tokens[..request.finish_length]);
    assert_eq!(found.requests[0].finish_reason, "eos");
    let found = Job::new(2).arg(model.path()).arg("--ignore-eos").run_json();
    assert_eq!(found.requests[0].tokens, request.tokens);
    assert_eq!(found.requests[0].finish_reason, "length");
}

/// New tokens end when the sequence is full, or when the requested number is reached.
#[test]
fn lengths() {
    let fixture = Fixture::open("mistral");
    let request = &fixture.expected.requests[0];
    let model = fixture.model_of(std::slice::from_ref(request));
    for new in [1, 2, 24] {
        let found = Job::new(1).arg(model.path()).args(["--max-new-tokens", &new.to_string()]).run_json();
        assert_eq!(found.requests[0].tokens, request.tokens[..new]);
    }
    let room = 5;
    let model = model.set("max_seq_len", request.prompt_tokens.len() + room);
    let found = Job::new(2).arg(model.path()).run_json();
    assert_eq!(found.requests[0].tokens, request.tokens[..room]);
    assert_eq!(found.requests[0].finish_reason, "length");
}

/// `mpirun -n 8` of the example, as in the README, on any number of cores.
#[test]
fn eight_ranks_of_the_example() {
    let fixture = Fixture::open("tiny");
    let path = mpk_tests::folders::model_folder("tiny").join("model.json");
    let finished = Job::new(8).arg(&path).run().expect(0).expect_nothing_left();
    println!("{:?}", finished.elapsed);
    let expected = &fixture.expected.requests[0];
    let in_file = read_json(&path)["generate"]["prompts"][0].clone();
    assert_eq!(in_file.as_str(), expected.prompt.as_deref());
    assert_eq!(finished.stdout, format!("{}\n", expected.text.as_ref().expect("a text")));
}

/// Logs come from rank 0 unless asked, and never to stdout.
#[test]
fn logs_go_to_stderr() {
    let model = ModelFile::of_fixture("mistral");
    let job = Job::new(2).arg(model.path()).args(["--prompt-tokens", "1", "--max-new-tokens", "2", "--json"]);
    let finished = job.run();
    assert!(finished.stderr.contains("backend cpu"), "auto says what it takes: {}", finished.stderr);
    let lines = finished.stderr.matches("backend cpu").count();
    assert_eq!(lines, 1, "{}", finished.stderr);
    finished.json();
}

/// The timeline has every task of every iteration of every rank once, on its worker, in order.
#[test]
fn traces_hold_every_task() {
    let fixture = Fixture::open("qwen3");
    let some: Vec<_> = fixture.expected.requests.iter().take(3).cloned().collect();
    let model = fixture.model_of(&some).set("generate.max_new_tokens", 4);
    for placement in ["static", "dynamic"] {
        let choice = ["--placement", placement, "--allreduce", "copy-reduce", "--workers", "2"];
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("trace.json");
        let found = Job::new(2).arg(model.path()).args(choice).arg("--trace").arg(&path).run_json();
        let untraced = Job::new(2).arg(model.path()).args(choice).run_json();
        assert_eq!(found.result(), untraced.result(), "a trace changes nothing");

        let graphs = emit(&model, 2, &choice);
        let sizes: BTreeMap<&str, usize> =
            graphs.all().map(|g| (&g[0].name[..], g[0].all_tasks.len())).collect();
        let trace = read_json(&path);
        let events = trace["traceEvents"].as_array().expect("traceEvents");
        // Tasks by rank, iteration and graph; slices by rank and worker.
        let mut tasks: BTreeMap<(u64, u64, &str), BTreeSet<u64>> = BTreeMap::new();
        let mut slices: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
        let mut named: BTreeSet<String> = BTreeSet::new();
        let (mut kinds, mut steps_seen) = (BTreeSet::<String>::new(), 0);
        for event in events {
            let number = |v: &Value| v.as_u64().unwrap_or_else(|| panic!("no number in {event}"));
            if event["ph"] == "M" {
                named.insert(event["args"]["name"].as_str().expect("a name").into());
                continue;
            }
            assert_eq!(event["ph"], "X", "{event}");
            let (rank, worker) = (number(&event["pid"]), number(&event["tid"]));
            let (begin, took) = (event["ts"].as_f64().expect("ts"), event["dur"].as_f64().expect("dur"));
            assert!(begin >= 0.0 && took >= 0.0, "{event}");
            slices.entry((rank, worker)).or_default().push((begin, begin + took));
            if event["cat"] != "task" {
                kinds.insert(event["name"].as_str().expect("a name").into());
                steps_seen += u64::from(event["name"] == "batch step");
                continue;
            }
            let arguments = &event["args"];
            let graph = arguments["graph"].as_str().expect("the graph's name");
            let of = tasks.entry((rank, number(&arguments["iteration"]), graph)).or_default();
            assert!(of.insert(number(&arguments["task"])), "{placement}: twice: {event}");
        }
        for name in ["rank 0", "rank 1", "worker 0", "worker 1"] {
            assert!(named.contains(name), "{named:?}");
        }
        let iterations: BTreeSet<(u64, &str)> = tasks.keys().map(|k| (k.1, k.2)).collect();
        let steps = iterations.len() as u64;
        assert_eq!(
            iterations.iter().map(|i| i.0).collect::<BTreeSet<_>>().len() as u64,
            steps,
            "one graph each"
        );
        assert!(steps > found.timing.decode_steps, "{steps} iterations, {:?}", found.timing);
        assert_eq!(steps_seen, 2 * steps, "a batch step before each iteration of each rank");
        let queue_or_event = if placement == "static" { "wait event" } else { "wait queue" };
        for kind in ["wait batch step", queue_or_event] {
            assert!(kinds.contains(kind), "{placement}: {kinds:?}");
        }
        for rank in 0..2 {
            for &(iteration, graph) in &iterations {
                let what = format!("{placement}, rank {rank}, iteration {iteration}, graph {graph}");
                let of = tasks.get(&(rank, iteration, graph)).unwrap_or_else(|| panic!("{what}: no task"));
                let all: BTreeSet<u64> = (2..sizes[graph] as u64).collect();
                let missing: Vec<&u64> = all.difference(of).collect();
                assert!(missing.is_empty(), "{what}: tasks {missing:?} are missing");
            }
        }
        for ((rank, worker), mut slices) in slices {
            slices.sort_by(|a, b| a.partial_cmp(b).expect("numbers"));
            // Times are rounded to nanoseconds.
            let apart = slices.windows(2).all(|w| w[1].0 >= w[0].1 - 0.002);
            assert!(apart, "{placement}: slices of worker {worker} of rank {rank} overlap");
        }
    }
}

/// `--trace-iterations` keeps the last iterations complete.
#[test]
fn traces_can_be_cut_to_the_last_iterations() {
    let fixture = Fixture::open("qwen3");
    let some: Vec<_> = fixture.expected.requests.iter().take(2).cloned().collect();
    let model = fixture.model_of(&some).set("generate.max_new_tokens", 6);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let iterations = |options: &[&str]| {
        let path = folder.path().join("trace.json");
        Job::new(2).arg(model.path()).args(options).arg("--trace").arg(&path).run_json();
        let trace = read_json(&path);
        let events = trace["traceEvents"].as_array().expect("traceEvents");
        let tasks = events.iter().filter(|event| event["cat"] == "task");
        let mut counts: BTreeMap<(u64, u64), usize> = BTreeMap::new();
        for task in tasks {
            let key = |name: &Value| name.as_u64().expect("a number");
            *counts.entry((key(&task["pid"]), key(&task["args"]["iteration"]))).or_default() += 1;
        }
        counts
    };
    let all = iterations(&[]);
    let cut = iterations(&["--trace-iterations", "2"]);
    let last = all.keys().map(|key| key.1).max().expect("an iteration");
    let expected: BTreeMap<_, _> = all.into_iter().filter(|(key, _)| key.1 + 2 > last).collect();
    assert_eq!(expected.len(), 4, "two iterations of two ranks");
    assert_eq!(cut, expected);
    let alone = Job::alone().arg(model.path()).args(["--trace-iterations", "2"]).run().expect(2);
    assert!(alone.stderr.contains("--trace"), "{}", alone.stderr);
}

/// A reader may close the pipe early: the exit status is still that of the run. Without mpirun, which may itself crash
/// on such a pipe.
#[test]
fn pipes_without_a_reader_do_not_change_the_status() {
    let model = ModelFile::of_fixture("mistral");
    let job = Job::alone().arg(model.path()).args(["--prompt-tokens", "1", "--max-new-tokens", "2"]);
    job.clone().stderr_unread().run().expect(0).expect_nothing_left();
    job.clone().arg("--json").stdout_unread().run().expect(0).expect_nothing_left();
    job.arg("--no-such-option").stderr_unread().run().expect(2);
    Job::alone().arg(model.path()).arg("--check").stdout_unread().run().expect(0);
    Job::alone().arg("/no/such/model.json").arg("--check").stderr_unread().run().expect(2);
    Job::alone().arg("/no/such/model.json").stderr_unread().run().expect(2);
    Job::alone().args(["doctor", "/no/such/model.json"]).stderr_unread().run().expect(2);
    let tiny = ModelFile::of_fixture("tiny");
    for job in [Job::alone().of("examples/engine").arg(tiny.path()), Job::alone().of("examples/own_graph")] {
        let run = job.stdout_unread().run().expect(0).expect_nothing_left();
        assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
    }
}

/// `--help` and `--version` are no errors.
#[test]
fn help() {
    let finished = Job::alone().arg("--help").run().expect(0);
    for option in [
        "--prompt",
        "--prompt-tokens",
        "--max-new-tokens",
        "--ignore-eos",
        "--backend",
        "--placement",
        "--allreduce",
        "--logprobs",
        "--json",
        "--trace",
        "--trace-iterations",
        "--workers",
        "--deadline",
        "--ranks",
        "--device",
        "--emit-graph",
        "--check",
        "--compile-only",
    ] {
        assert!(finished.stdout.contains(option), "{option}");
    }
    assert!(Job::alone().arg("--version").run().expect(0).stdout.starts_with("mpk-run "));
}

/// Options override model.json, and both accept the same choices.
#[test]
fn options_and_fields_say_the_same() {
    let model = ModelFile::of_fixture("mistral").set("generate.prompt_tokens", json!([[4, 5]]));
    let by_option = Job::new(2)
        .arg(model.path())
        .args([
            "--placement",
            "dynamic",
            "--allreduce",
            "two-shot",
            "--workers",
            "2",
            "--max-new-tokens",
            "5",
        ])
        .args(["--ignore-eos", "--logprobs", "2", "--backend", "cpu"]);
    let model = ModelFile::of_fixture("mistral")
        .set("generate.prompt_tokens", json!([[4, 5]]))
        .set("runtime", json!({"placement": "dynamic", "allreduce": "two-shot", "workers": 2}))
        .set("generate.max_new_tokens", 5)
        .set("generate.ignore_eos", true);
    let by_field = Job::new(2).arg(model.path()).args(["--logprobs", "2", "--backend", "auto"]);
    assert_eq!(by_option.run_json().result(), by_field.run_json().result());
}

/// Processes that a launcher has started, but that know nothing of each other, would each run the whole model. Each says so: another one may be
/// ended before it can.
#[test]
fn processes_that_are_not_one_job_say_so() {
    let job = |variables: &str| {
        let model = ModelFile::of_fixture("mistral");
        let job = Job::alone().arg(model.path()).args(["--prompt-tokens", "1,2", "--max-new-tokens", "2"]);
        let words = variables.split(' ').filter_map(|word| word.split_once('='));
        let job = words.fold(job, |job, (name, value)| job.env(name, value));
        let finished = job.run().expect(3).expect_nothing_left();
        assert_eq!(finished.stderr.matches("error:").count(), 1, "{}", finished.stderr);
        assert_eq!(finished.stdout, "");
        finished.stderr
    };
    // Without an MPI plug-in, srun sets variables of its own only.
    let slurm =
        "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2";
    for task in 0..2 {
        let said = job(&format!("{slurm} SLURM_PROCID={task} SLURM_LOCALID={task}"));
        assert!(
            said.contains("srun has started 2 tasks without MPI") && said.contains("srun --mpi=pmix"),
            "{said}"
        );
    }
    // The launcher of MPICH sets these, and Open MPI does not know them; and the other way round.
    let rank = |variables: [&str; 4], rank: u32| {
        let values = [rank, 2, rank, 2];
        let words = variables.iter().zip(values).map(|(name, value)| format!("{name}={value}"));
        words.collect::<Vec<_>>().join(" ")
    };
    let hydra = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
    let said = job(&rank(hydra, 0));
    assert!(said.contains("has started 2 processes, but they are not one MPI job"), "{said}");
}
