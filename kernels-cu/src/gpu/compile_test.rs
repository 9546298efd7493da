//! Compilation and cache with a fake nvcc (`testdata/nvcc`).

use super::compile::compile_with;
use super::*;
use crate::signals::Held;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

struct Setting {
    root: tempfile::TempDir,
}

impl Setting {
    fn new() -> Self {
        Setting { root: tempfile::tempdir().unwrap() }
    }

    fn cache(&self) -> Cache {
        Cache::new(self.root.path().join("cache"))
    }

    fn log(&self) -> PathBuf {
        self.root.path().join("log")
    }

    /// Number of times that the fake has run.
    fn runs(&self) -> usize {
        fs::read_to_string(self.log()).map_or(0, |log| log.lines().count())
    }

    fn options(&self, behaviour: &[(&str, &str)]) -> CompileOptions {
        let mut options = CompileOptions::new(Architecture::Sm90a, false);
        let log = self.log().display().to_string();
        for (name, value) in behaviour.iter().chain([&("LOG", log.as_str())]) {
            options.defines.push((format!("STAND_IN_{name}"), value.to_string()));
        }
        options
    }

    fn compile(
        &self,
        options: &CompileOptions,
        toolchain: Result<Toolchain, GpuError>,
    ) -> Result<Cubin, GpuError> {
        let codes = [Expression { task_type: "linear".to_string(), code: "Linear<1>".to_string() }];
        compile_with(&codes, options, &self.cache(), toolchain)
    }

    fn files(&self) -> Vec<String> {
        let names = fs::read_dir(self.cache().folder()).unwrap();
        names.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }
}

fn toolchain(build: &str) -> Result<Toolchain, GpuError> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gpu/testdata/nvcc");
    Ok(Toolchain { nvcc: Nvcc { path, release: (12, 9), build: build.to_string() }, nvshmem: None })
}

fn no_toolchain() -> Result<Toolchain, GpuError> {
    Err(GpuError::NotFound { what: "nvcc".to_string(), probes: "  nowhere".to_string(), variable: None })
}

#[test]
fn the_second_time_nothing_is_compiled_with_or_without_a_toolchain() {
    let setting = Setting::new();
    let options = setting.options(&[]);
    let error = setting.compile(&options, no_toolchain()).unwrap_err();
    assert!(error.help().is_some_and(|help| help.contains("scripts/setup.sh --cuda")), "{error}");
    assert_eq!(error.exit_status(), 3);
    let made = setting.compile(&options, toolchain("a")).unwrap();
    assert!(!made.from_cache);
    assert!(String::from_utf8_lossy(&made.bytes).contains("using Code0 = Linear<1>;"));
    for toolchain in [toolchain("a"), no_toolchain()] {
        let again = setting.compile(&options, toolchain).unwrap();
        assert!(again.from_cache);
        assert_eq!((&again.bytes, &again.path, &again.key), (&made.bytes, &made.path, &made.key));
        assert_eq!(again.toolchain, made.toolchain);
    }
    assert_eq!(setting.runs(), 1);
    assert_eq!(setting.files().len(), 1);
    assert!(fs::read(&made.path).unwrap().starts_with(&made.bytes), "the file is a cubin for other tools");
    let mode = fs::metadata(setting.cache().folder()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn a_file_depends_on_everything_that_affects_the_code() {
    let setting = Setting::new();
    let options = setting.options(&[]);
    let mut others = vec![options.clone(); 4];
    others[0].config.stages_in_flight += 1;
    others[1].architecture = Architecture::Sm80;
    others[2].defines.push(("MPK_DEBUG".to_string(), "1".to_string()));
    others[3].nvshmem = true;
    let first = setting.compile(&options, toolchain("a")).unwrap();
    for other in &others {
        let made = setting.compile(other, toolchain("a")).unwrap();
        assert!(!made.from_cache && made.key != first.key, "{other:?}");
    }
    let newer = setting.compile(&options, toolchain("b")).unwrap();
    assert!(!newer.from_cache && newer.key == first.key && newer.path != first.path);
    // Without a toolchain, the newest file is used.
    let time = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    fs::File::options().write(true).open(&first.path).unwrap().set_modified(time).unwrap();
    let found = setting.compile(&options, no_toolchain()).unwrap();
    assert_eq!(found.toolchain.nvcc, "a");
}

#[test]
fn a_damaged_entry_is_made_again() {
    let setting = Setting::new();
    let options = setting.options(&[]);
    let made = setting.compile(&options, toolchain("a")).unwrap();
    let whole = fs::read(&made.path).unwrap();
    let mut flipped = whole.clone();
    flipped[made.bytes.len() / 2] ^= 1;
    let mut longer = whole.clone();
    longer.push(0);
    let damaged = [&[][..], &whole[..1], &whole[..whole.len() - 1], &flipped, &longer];
    for (number, bytes) in damaged.into_iter().enumerate() {
        fs::write(&made.path, bytes).unwrap();
        assert!(setting.compile(&options, no_toolchain()).is_err(), "damaged, case {number}");
        let again = setting.compile(&options, toolchain("a")).unwrap();
        assert!(!again.from_cache && again.bytes == made.bytes);
        assert_eq!(fs::read(&made.path).unwrap(), whole);
        assert_eq!(setting.runs(), number + 2);
    }
}

#[test]
fn unreadable_files_are_made_again() {
    let setting = Setting::new();
    let options = setting.options(&[]);
    let made = setting.compile(&options, toolchain("a")).unwrap();
    fs::remove_file(&made.path).unwrap();
    fs::create_dir_all(made.path.join("a/folder")).unwrap();
    assert!(!setting.compile(&options, toolchain("a")).unwrap().from_cache);
    assert!(setting.compile(&options, toolchain("a")).unwrap().from_cache);
}

#[test]
fn no_other_user_may_write_where_the_code_comes_from() {
    let setting = Setting::new();
    let options = setting.options(&[]);
    let made = setting.compile(&options, toolchain("a")).unwrap();
    let folder = setting.cache().folder().to_path_buf();
    let change = |mode| fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
    let mode = || fs::metadata(&folder).unwrap().permissions().mode() & 0o777;
    for toolchain in [toolchain("a"), no_toolchain()] {
        change(0o777);
        assert!(setting.compile(&options, toolchain).unwrap().from_cache);
        assert_eq!(mode(), 0o700);
    }
    // Only root can change the owner of a file.
    const NOBODY: Option<u32> = Some(65534);
    if chown(&made.path, NOBODY, None).is_err() {
        return;
    }
    change(0o777);
    assert!(!setting.compile(&options, toolchain("a")).unwrap().from_cache, "another user's file was used");
    chown(&folder, NOBODY, None).unwrap();
    for mode in [0o700, 0o770] {
        change(mode);
        let error = setting.compile(&options, toolchain("a")).unwrap_err();
        assert_eq!(error.exit_status(), 3);
        assert!(error.to_string().contains("user 65534"), "{error}");
    }
}

#[test]
fn one_compiles_and_the_others_wait() {
    let setting = Setting::new();
    let options = setting.options(&[("SLEEPS", "0.3")]);
    let together = Barrier::new(8);
    let made: Vec<Cubin> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    together.wait();
                    setting.compile(&options, toolchain("a")).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(setting.runs(), 1);
    assert_eq!(made.iter().filter(|cubin| !cubin.from_cache).count(), 1);
    assert!(made.iter().all(|cubin| cubin.bytes == made[0].bytes));
    assert_eq!(setting.files().len(), 1, "{:?}", setting.files());
}

#[test]
fn a_failure_leaves_no_file_and_names_the_command() {
    let setting = Setting::new();
    let error = setting.compile(&setting.options(&[("FAILS", "1")]), toolchain("a")).unwrap_err();
    let text = error.to_string();
    for wanted in ["testdata/nvcc", "-gencode=arch=compute_90a,code=sm_90a", "error: this is what is wrong"] {
        assert!(text.contains(wanted), "{text}");
    }
    assert_eq!(error.exit_status(), 4);
    assert!(setting.compile(&setting.options(&[("FORGETS", "1")]), toolchain("a")).is_err());
    let error = setting.compile(&setting.options(&[("MAKES", "nothing")]), toolchain("a")).unwrap_err();
    assert!(error.to_string().contains("cubin file of 0 bytes is not an ELF file"), "{error}");
    assert_eq!(setting.files(), Vec::<String>::new());
    let mut absent = toolchain("a");
    absent.as_mut().unwrap().nvcc.path = "/no/such/nvcc".into();
    let error = setting.compile(&setting.options(&[]), absent).unwrap_err();
    assert!(error.to_string().contains("/no/such/nvcc"), "{error}");
    assert!(error.help().is_some_and(|help| help.contains("CUDA_HOME")), "{:?}", error.help());
    assert_eq!(error.exit_status(), 3);
}

#[test]
fn a_missing_host_compiler_is_the_environments_fault() {
    let setting = Setting::new();
    let error = setting.compile(&setting.options(&[("LACKS_GCC", "1")]), toolchain("a")).unwrap_err();
    assert!(error.help().is_some_and(|help| help.contains("sudo apt-get install g++")), "{error}");
    assert_eq!(error.exit_status(), 3);
}

#[test]
fn folders_of_any_name_reach_nvcc() {
    let setting = Setting::new();
    let folder = setting.root.path().join(OsStr::from_bytes(b"\xff\xfe name"));
    fs::create_dir(&folder).unwrap();
    let mut found = toolchain("a").unwrap();
    found.nvshmem = Some(NvshmemFiles {
        include: folder.clone(),
        lib: folder,
        version: NvshmemVersion { major: 3, minor: 4, patch: 5 },
        device_bytes: 1,
    });
    let mut options = setting.options(&[]);
    options.nvshmem = true;
    setting.compile(&options, Ok(found)).unwrap();
    assert_eq!(setting.runs(), 2);
}

/// The processes of a group that have not ended.
fn running_in_group(group: &str) -> Vec<String> {
    let stats = fs::read_dir("/proc").unwrap().flatten();
    let stats = stats.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    // After the name in parentheses: state, parent, process group (proc_pid_stat(5)).
    let in_group = |stat: &String| {
        let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        let fields: Vec<&str> = rest.split(' ').collect();
        fields[0] != "Z" && fields.get(2) == Some(&group)
    };
    stats.filter(in_group).collect()
}

/// A signal ends the process as if nothing were being compiled, and neither nvcc nor its folder remain. The same holds if a failed run
/// ends it. After SIGKILL the folder stays, for the next compilation to remove. The process is this program again, because a signal
/// affects the whole process.
#[test]
fn a_signal_ends_nvcc_and_leaves_nothing() {
    const CHILD: &str = "MPK_TEST_COMPILES_IN";
    const MODE: &str = "MPK_TEST_MODE";
    if let Some(root) = std::env::var_os(CHILD) {
        for signal in [libc::SIGINT, libc::SIGTERM] {
            // SAFETY: the default action runs no code of this program. The tests' parent may have set these signals to
            // be ignored.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        crate::signals::install().unwrap();
        let codes = [Expression { task_type: "linear".to_string(), code: "Linear<1>".to_string() }];
        let mut options = CompileOptions::new(Architecture::Sm90a, false);
        let log = Path::new(&root).join("log").display().to_string();
        for (name, value) in [("STAND_IN_LOG", log.as_str()), ("STAND_IN_SLEEPS", "30")] {
            options.defines.push((name.to_string(), value.to_string()));
        }
        // What the watch over a job's ranks does.
        let held = Held::new();
        match std::env::var(MODE).unwrap().as_str() {
            "alone" => drop(held),
            "watched" => drop(std::thread::spawn(move || {
                while !crate::signals::is_kept() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                std::thread::sleep(Duration::from_millis(300));
                drop(held);
            })),
            _ => drop(std::thread::spawn(move || {
                while !fs::read_to_string(&log).is_ok_and(|log| log.ends_with('\n')) {
                    std::thread::sleep(Duration::from_millis(10));
                }
                crate::signals::end_on_signal();
                crate::signals::await_holders(1);
                std::process::exit(4);
            })),
        }
        let _ = compile_with(&codes, &options, &Cache::new(Path::new(&root).join("cache")), toolchain("a"));
        // The process has ended before the error of the interrupted compilation can be reported.
        std::process::exit(9);
    }
    for (signal, mode) in [
        (Some(libc::SIGINT), "alone"),
        (Some(libc::SIGTERM), "alone"),
        (Some(libc::SIGTERM), "watched"),
        (Some(libc::SIGKILL), "alone"),
        (None, "failed"),
    ] {
        let setting = Setting::new();
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "gpu::compile_test::a_signal_ends_nvcc_and_leaves_nothing"])
            .env(CHILD, setting.root.path())
            .env(MODE, mode)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while !fs::read_to_string(setting.log()).is_ok_and(|log| log.ends_with('\n')) {
            assert!(process.try_wait().unwrap().is_none(), "it ended early");
            std::thread::sleep(Duration::from_millis(10));
        }
        let log = fs::read_to_string(setting.log()).unwrap();
        let nvcc = Path::new("/proc").join(log.trim().strip_prefix("run ").unwrap());
        if let Some(signal) = signal {
            assert!(nvcc.exists());
            // SAFETY: the process is our child and has not been waited for.
            unsafe { libc::kill(process.id() as libc::pid_t, signal) };
        }
        let ended = process.wait().unwrap();
        assert_eq!((ended.signal(), ended.code()), (signal, signal.is_none().then_some(4)), "{mode}");
        if signal != Some(libc::SIGKILL) {
            assert!(!nvcc.exists());
            assert_eq!(setting.files(), Vec::<String>::new());
        }
        // nvcc, the processes that it has started and the process that watches over them must all end.
        let group = nvcc.file_name().unwrap().to_str().unwrap();
        let begin = Instant::now();
        while !running_in_group(group).is_empty() {
            let left = running_in_group(group);
            assert!(begin.elapsed() < Duration::from_secs(10), "{signal:?}, {mode}: still running: {left:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn leftovers_of_a_killed_process_are_removed_and_an_unusable_folder_is_named() {
    let setting = Setting::new();
    let folder = setting.cache().folder().to_path_buf();
    fs::create_dir_all(folder.join("0123.build/src")).unwrap();
    fs::write(folder.join("0123.build/src/file"), "half").unwrap();
    setting.compile(&setting.options(&[]), toolchain("a")).unwrap();
    assert_eq!(setting.files().len(), 1, "{:?}", setting.files());

    let setting = Setting::new();
    fs::write(setting.root.path().join("cache"), "a file").unwrap();
    let error = setting.compile(&setting.options(&[]), toolchain("a")).unwrap_err();
    assert!(error.help().is_some_and(|help| help.contains("MPK_CACHE_DIR")), "{error}");
    assert!(error.to_string().contains("cache/kernels"), "{error}");
}
