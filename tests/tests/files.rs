//! Proves that outputs go where they are asked to go and destroy nothing, that inputs which are not files are
//! refused without reading them, and that what the machine lacks gives status 3, never an abort.

use mpk_tests::{Finished, Job, ModelFile};
use std::ffi::CString;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::Path;
use std::time::Duration;

fn fifo(path: &Path) {
    let name = CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    // SAFETY: the name is a C string.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0, "{}", path.display());
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder").flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// One rank that makes two tokens.
fn short(model: &ModelFile) -> Job {
    Job::alone().arg(model.path()).args([
        "--prompt-tokens",
        "1,2",
        "--max-new-tokens",
        "2",
        "--backend",
        "cpu",
    ])
}

/// Expects one error line with all of `words`, this status, and no signal.
fn refused(finished: Finished, status: i32, words: &[&str]) -> Finished {
    let finished = finished.expect(status);
    let errors = finished.error_lines();
    assert_eq!(errors.len(), 1, "{}", finished.stderr);
    assert!(words.iter().all(|word| finished.stderr.contains(word)), "{words:?}: {}", finished.stderr);
    finished.expect_nothing_left()
}

#[test]
fn a_trace_replaces_files_and_nothing_else() {
    let model = ModelFile::of_fixture("mistral");
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("old.json"), "old").expect("a file");
    fs::write(at("old.json.part"), "somebody else's").expect("a file");
    symlink("old.json", at("link")).expect("a link");
    symlink("new.json", at("dangling")).expect("a link");
    for name in ["link", "dangling"] {
        short(&model).arg("--trace").arg(at(name)).run().expect(0).expect_nothing_left();
        assert!(fs::symlink_metadata(at(name)).expect("the link").is_symlink(), "{name}");
    }
    for name in ["old.json", "new.json"] {
        let text = fs::read_to_string(at(name)).expect("the trace");
        assert!(text.ends_with("]}\n"), "{name}");
    }
    assert_eq!(fs::read_to_string(at("old.json.part")).expect("the file"), "somebody else's");
    assert_eq!(names(folder.path()), ["dangling", "link", "new.json", "old.json", "old.json.part"]);

    fifo(&at("fifo"));
    let path = at("fifo");
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        fs::File::open(path).and_then(|mut file| file.read_to_string(&mut text)).map(|_| text)
    });
    short(&model).arg("--trace").arg(at("fifo")).run().expect(0);
    let text = reader.join().expect("the reader").expect("what it reads");
    assert!(text.starts_with('{') && text.ends_with("]}\n"), "{text}");
    assert!(fs::metadata(at("fifo")).expect("the FIFO").file_type().is_fifo());
}

/// A full disk is status 3 for every output, and a device stays a device.
#[test]
fn a_full_disk_has_one_status() {
    let model = ModelFile::of_fixture("mistral");
    let full = ["/dev/full", "No space left", "free disk space"];
    refused(short(&model).args(["--trace", "/dev/full"]).run(), 3, &full);
    let words = ["standard output", "No space left", "free disk space"];
    refused(short(&model).stdout_to("/dev/full").run(), 3, &words);
    refused(short(&model).arg("--json").stdout_to("/dev/full").run(), 3, &words);
    refused(Job::alone().arg(model.path()).arg("--check").stdout_to("/dev/full").run(), 3, &words);
    let full = ["standard output", "No space left", "free disk space"];
    for program in ["mpk-run", "mpk-serve", "mpk-graph", "mpk-bench"] {
        for words in [&["--help"][..], &["--version"], &["completions", "bash"], &["man"]] {
            refused(Job::alone().of(program).args(words).stdout_to("/dev/full").run(), 3, &full);
        }
    }
    refused(Job::alone().args(["doctor", "--help"]).stdout_to("/dev/full").run(), 3, &full);
    let folder = tempfile::tempdir().expect("a folder");
    symlink("/dev/full", folder.path().join("rank-0.task_graph.json")).expect("a link");
    let emit = Job::alone().arg(model.path()).arg("--emit-graph").arg(folder.path());
    refused(emit.run(), 3, &["rank-0.task_graph.json", "No space left"]);
    assert!(fs::metadata("/dev/full").expect("the device").file_type().is_char_device());
}

/// A file cut off by a limit of the file size is removed, an existing file stays, and no signal ends the process.
#[test]
fn a_limit_of_the_file_size_leaves_nothing_half_written() {
    let model = ModelFile::of_fixture("mistral");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.json");
    let words = ["File too large", "ulimit -f"];
    refused(short(&model).arg("--trace").arg(&path).limit(libc::RLIMIT_FSIZE, 4096).run(), 3, &words);
    assert!(names(folder.path()).is_empty());
    fs::write(&path, "old").expect("a file");
    refused(short(&model).arg("--trace").arg(&path).limit(libc::RLIMIT_FSIZE, 4096).run(), 3, &words);
    assert_eq!(fs::read_to_string(&path).expect("the file"), "old");
    let graphs = folder.path().join("graphs");
    let emit = Job::alone().arg(model.path()).arg("--emit-graph").arg(&graphs);
    refused(emit.limit(libc::RLIMIT_FSIZE, 4096).run(), 3, &words);
    assert!(!graphs.exists(), "{:?}", names(&graphs));
}

/// The files of a folder appear together or not at all: an error at a later file leaves no earlier one.
#[test]
fn an_emit_that_fails_leaves_the_folder_as_it_was() {
    let model = ModelFile::of_fixture("mistral");
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let emit =
        |target: &Path| Job::alone().arg(model.path()).args(["--ranks", "2", "--emit-graph"]).arg(target);
    emit(&at("graphs")).run().expect(0);
    let all = names(&at("graphs"));
    let last = all.last().expect("several files").clone();
    let passes = |target: &Path| {
        Job::alone().of("mpk-graph").arg("passes").arg(model.path()).arg("--dump").arg(target)
    };
    passes(&at("passes")).run().expect(0);
    let last_pass = names(&at("passes")).last().expect("several files").clone();
    // A folder has the name of the last file. An old file of an earlier build and somebody else's file stay.
    for (job, last) in [(emit(&at("taken")), &last), (passes(&at("taken")), &last_pass)] {
        fs::create_dir_all(at("taken").join(last)).expect("a folder");
        fs::write(at("taken").join(&all[0]), "old").expect("a file");
        fs::write(at("taken/other"), "theirs").expect("a file");
        let before = names(&at("taken"));
        refused(job.run(), 2, &[last.as_str(), "Is a directory"]);
        assert_eq!(names(&at("taken")), before);
        assert_eq!(fs::read_to_string(at("taken").join(&all[0])).expect("the file"), "old");
        fs::remove_dir_all(at("taken")).expect("the folder");
    }
    // A full disk is noticed before the first file is replaced.
    fs::create_dir(at("full")).expect("a folder");
    fs::write(at("full").join(&all[0]), "old").expect("a file");
    symlink("/dev/full", at("full").join(&last)).expect("a link");
    refused(emit(&at("full")).run(), 3, &[last.as_str(), "No space left"]);
    assert_eq!(names(&at("full")), [all[0].clone(), last]);
    assert_eq!(fs::read_to_string(at("full").join(&all[0])).expect("the file"), "old");
    // New folders are removed again.
    refused(emit(&at("new/graphs")).limit(libc::RLIMIT_FSIZE, 4096).run(), 3, &["File too large"]);
    assert!(!at("new").exists());
    // The same build again replaces its own files.
    fs::write(at("graphs").join(&all[0]), "old").expect("a file");
    emit(&at("graphs")).run().expect(0);
    assert_eq!(names(&at("graphs")), all);
    assert_ne!(fs::read_to_string(at("graphs").join(&all[0])).expect("the file"), "old");
}

#[test]
fn inputs_that_are_not_files_are_refused_without_reading() {
    let words = ["a FIFO, not a regular file"];
    let soon = |job: Job| job.timeout(Duration::from_secs(20)).run();
    let folder = tempfile::tempdir().expect("a folder");
    fifo(&folder.path().join("model.json"));
    refused(soon(Job::alone().arg(folder.path().join("model.json"))), 2, &words);
    refused(soon(Job::alone().arg("/dev/zero")), 2, &["a device, not a regular file"]);
    for (fixture, name) in [
        ("mistral", "config.json"),
        ("mistral", "generation_config.json"),
        ("mistral", "model.safetensors"),
        ("llama", "tokenizer.json"),
        ("qwen3", "model.safetensors.index.json"),
        ("qwen3", "model-00002-of-00003.safetensors"),
    ] {
        let model = ModelFile::copy_of_fixture(fixture);
        let path = model.checkpoint().join(name);
        let _ = fs::remove_file(&path);
        fifo(&path);
        let finished = refused(soon(short(&model)), 2, &words);
        assert!(finished.stderr.contains(name), "{}", finished.stderr);
    }
}

/// Too few open files or too little address space: it says what is lacking and the fix, and never aborts or panics.
#[test]
fn lacking_resources_are_named() {
    let model = ModelFile::of_fixture("mistral");
    for files in [4, 8] {
        refused(short(&model).limit(libc::RLIMIT_NOFILE, files).run(), 3, &["ulimit -n"]);
    }
    for mebibytes in [26, 28, 30, 32, 36, 40, 44] {
        let job = short(&model).limit(libc::RLIMIT_AS, mebibytes << 20);
        let finished = job.run();
        let what =
            format!("{mebibytes} MiB: {:?} {:?}\n{}", finished.status, finished.signal, finished.stderr);
        // 127: the loader had no room for the libraries.
        assert!(matches!(finished.status, Some(0 | 3 | 127)), "{what}");
        assert!(!finished.stderr.contains("panicked"), "{what}");
    }
}

/// An option has the same limits as the field that it replaces.
#[test]
fn options_and_fields_have_the_same_limits() {
    let model = || ModelFile::of_fixture("mistral");
    let soon = |job: Job| job.timeout(Duration::from_secs(20)).run();
    for batch in ["4097", "65536"] {
        refused(soon(short(&model()).args(["--max-batch", batch])), 2, &["--max-batch", "4096"]);
        let number: u32 = batch.parse().expect("a number");
        refused(soon(short(&model().set("max_batch", number))), 2, &["max_batch", "4096"]);
    }
    refused(soon(short(&model().set("runtime.workers", 4097))), 2, &["runtime.workers", "4096"]);
    refused(soon(short(&model()).args(["--workers", "4097"])), 2, &["--workers", "4096"]);
    // Together with a field that only model.json can set.
    let model = model().set("runtime.prefill_chunk", 16);
    let words = ["runtime.prefill_chunk", "16", "max_batch = 17"];
    refused(soon(short(&model).args(["--max-batch", "17"])), 2, &words);
}

#[test]
fn more_workers_than_cores_give_a_warning() {
    let model = ModelFile::of_fixture("mistral");
    let cores = std::thread::available_parallelism().expect("the number of cores").get();
    let warning = "share";
    let finished = short(&model).args(["--workers", &(3 * cores).to_string()]).run().expect(0);
    assert!(
        finished.stderr.contains(warning) && finished.stderr.contains("--workers"),
        "{}",
        finished.stderr
    );
    let finished = short(&model).args(["--workers", &cores.to_string()]).run().expect(0);
    assert!(!finished.stderr.contains(warning), "{}", finished.stderr);
}

/// A thousand threads on few cores leave the cores to the thread that has work. Iterations with more than a hundred steps reach their end
/// long before the deadline of a wait, and give the same tokens as with a few workers.
#[test]
fn a_thousand_workers_reach_the_end() {
    let model = ModelFile::of_fixture("tiny");
    let run = |workers: &str| {
        short(&model).args(["--deadline", "20", "--workers", workers]).run_json().requests.remove(0).tokens
    };
    assert_eq!(run("1000"), run("2"));
}

/// A warning names the tensor of NaN and infinity in a checkpoint, whichever rank finds them.
#[test]
fn weights_that_are_not_numbers_give_a_warning() {
    let damaged = |tensor: &str, from_end: bool, value: f32| {
        ModelFile::copy_of_fixture("mistral").edit_bytes("model.safetensors", |bytes| {
            let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
            let json: serde_json::Value = serde_json::from_slice(&bytes[8..header]).expect("a header");
            assert_eq!(json[tensor]["dtype"], "F32");
            let offset =
                |index: usize| json[tensor]["data_offsets"][index].as_u64().expect("an offset") as usize;
            let at = header + if from_end { offset(1) - 4 } else { offset(0) };
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        })
    };
    let whole = ModelFile::of_fixture("mistral");
    for (tensor, from_end, value, ranks) in [
        ("model.norm.weight", false, f32::NAN, 1),
        ("model.layers.1.mlp.down_proj.weight", true, f32::INFINITY, 1),
        // The last row belongs to rank 1.
        ("model.layers.0.self_attn.q_proj.weight", true, f32::NAN, 2),
    ] {
        let run = |model: &ModelFile| {
            let arguments = ["--prompt-tokens", "1,2", "--max-new-tokens", "2", "--backend", "cpu"];
            Job::new(ranks).arg(model.path()).args(arguments).run()
        };
        let finished = run(&damaged(tensor, from_end, value));
        let warned = finished.stderr.lines().filter(|line| line.contains("not numbers")).collect::<Vec<_>>();
        assert!(warned.len() == 1 && warned[0].contains(tensor), "{tensor}: {}", finished.stderr);
        assert!(!run(&whole).stderr.contains("not numbers"));
    }
}
