//! Compiles the CPU target (task kernels and protocol) and reads the ABI headers through bindgen.
//!
//! - `src/cpu/*.cpp`, `src/tasks/*/cpu*.cpp` and `protocol/cpu/*.cpp` are found by name. A file whose stem ends
//!   in `_scalar`, `_avx2`, `_avx512` or `_avx512_bf16` is compiled for that level, with `MPK_ISA` set to its
//!   name; all others are compiled for the architecture's baseline.
//! - Every `pub mod NAME;` of `src/tasks/mod.rs` is one registered task type: that line is all that a new task
//!   touches outside its folder.
//! - The GPU's sources (`*.cuh` and the headers that they share with the CPU target) become part of the crate:
//!   nvcc gets them from there when a model is compiled.
//!
//! C++ is compiled again only where its own sources or flags have changed.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Name (suffix of the file's stem and value of `MPK_ISA`) and flags, longest suffix first.
const LEVELS: &[(&str, &[&str])] = &[
    (
        "avx512_bf16",
        &["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"],
    ),
    ("avx512", &["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]),
    ("avx2", &["-mavx2", "-mfma", "-mf16c"]),
    ("scalar", &[]),
];

fn main() {
    if let Err(error) = run() {
        eprintln!("error: kernels-cu could not be built: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for path in ["build.rs", "include", "protocol", "src/cpu", "src/gpu", "src/tasks"] {
        println!("cargo:rerun-if-changed={path}");
    }
    let registered = registered_tasks(Path::new("src/tasks/mod.rs"))?;
    fs::write(out.join("registrations.rs"), registrations(&registered))?;
    bind(&registered, &out)?;
    gpu_sources(&out)?;
    // Clippy links nothing, and its build scripts share no output with those of a build.
    let checker = env::var_os("RUSTC_WORKSPACE_WRAPPER");
    if checker.is_some_and(|path| Path::new(&path).file_stem().is_some_and(|name| name == "clippy-driver")) {
        return Ok(());
    }
    compile(&out)
}

/// Names of the modules that `src/tasks/mod.rs` declares, in order.
fn registered_tasks(path: &Path) -> Result<Vec<String>, Box<dyn Error>> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(text
        .lines()
        .filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'))
        .map(str::to_string)
        .collect())
}

fn registrations(names: &[String]) -> String {
    let entries: String = names.iter().map(|n| format!("&crate::tasks::{n}::REGISTRATION, ")).collect();
    format!("static REGISTRATIONS: &[&Registration] = &[{entries}];\n")
}

/// Adds the derives by which structs are turned into bytes, and read from those that a device has written.
#[derive(Debug)]
struct PlainDerives;

impl bindgen::callbacks::ParseCallbacks for PlainDerives {
    fn add_derives(&self, info: &bindgen::callbacks::DeriveInfo<'_>) -> Vec<String> {
        let read = ["mpk_trace_record", "mpk_status"];
        if info.name.ends_with("_params") || read.contains(&info.name) {
            vec!["bytemuck::Pod".to_string(), "bytemuck::Zeroable".to_string()]
        } else {
            Vec::new()
        }
    }
}

fn bind(registered: &[String], out: &Path) -> Result<(), Box<dyn Error>> {
    let mut header = String::from("#include \"mpk/abi.h\"\n");
    for name in registered {
        let params = format!("tasks/{name}/params.h");
        if Path::new("src").join(&params).exists() {
            header += &format!("#include \"{params}\"\n");
        }
    }
    for name in registered {
        header += &format!("int mpk_task_{name}(const mpk_kernel_args* args);\n");
        header += &format!("int mpk_task_{name}_ready(const mpk_kernel_args* args);\n");
    }
    let bindings = bindgen::Builder::default()
        .header_contents("mpk_all.h", &header)
        .clang_args(["-Iinclude", "-Isrc", "-std=c11"])
        .allowlist_item("(mpk|MPK)_.*")
        .blocklist_item("MPK_EVENT_INVALID") // bindgen reads it as -1
        .prepend_enum_name(false)
        .derive_default(true)
        .generate_comments(false)
        // Sizes and offsets as bindgen's clang sees them, asserted by rustc; `assert_layout` holds g++ and nvcc to them.
        .layout_tests(true)
        .merge_extern_blocks(true)
        .parse_callbacks(Box::new(PlainDerives))
        .generate()
        .map_err(|e| format!("bindgen over include/mpk/abi.h and src/tasks/*/params.h: {e}"))?;
    let text = bindings.to_string();
    fs::write(out.join("abi.rs"), &text)?;
    assert_layout(&header, &text, out)
}

/// Writes the layout of every struct that Rust gets from the headers as assertions for the C++ compilers. The
/// assertions for `mpk/abi.h` are a header, which the GPU's sources include too. All assertions together are a source
/// of the CPU target.
fn assert_layout(header: &str, bindings: &str, out: &Path) -> Result<(), Box<dyn Error>> {
    let abi = fs::read_to_string("include/mpk/abi.h")?;
    let (mut of_abi, mut of_all, mut structs) = (String::new(), String::new(), 0);
    for (what, number) in layout_facts(bindings) {
        let (fact, name) = match what.split_once(' ') {
            Some(("Size", rest)) => (format!("sizeof({})", rest.trim_start_matches("of ")), rest),
            Some(("Offset", rest)) => {
                let Some((name, field)) = rest.trim_start_matches("of field: ").split_once("::") else {
                    continue;
                };
                (format!("offsetof({name}, {field})"), name)
            }
            _ => continue,
        };
        let name = name.trim_start_matches("of ");
        // Unnamed members have names in Rust only.
        if what.contains("__bindgen") {
            continue;
        }
        structs += u32::from(fact.starts_with("sizeof"));
        let assertion = format!("static_assert({fact} == {number}, \"Rust has another layout\");\n");
        of_all += &assertion;
        if abi.contains(&format!("}} {name};")) {
            of_abi += &assertion;
        }
    }
    if structs < 10 || of_abi.is_empty() {
        return Err(format!("bindgen gives the layout of {structs} structs: has its output changed?").into());
    }
    let includes = "#include <cstddef>\n";
    fs::write(out.join("abi_layout.h"), format!("{includes}#include \"mpk/abi.h\"\n{of_abi}"))?;
    let types: String =
        header.lines().filter(|line| line.starts_with("#include")).map(|l| format!("{l}\n")).collect();
    fs::write(out.join("abi_layout.cpp"), format!("{includes}{types}{of_all}"))?;
    Ok(())
}

/// What bindgen asserts: each text in quotation marks with the number that is subtracted after it.
fn layout_facts(bindings: &str) -> impl Iterator<Item = (&str, &str)> {
    bindings.split('"').skip(1).step_by(2).zip(bindings.split('"').skip(2).step_by(2)).filter_map(
        |(what, after)| {
            let number = after.split_once("- ")?.1.split_once("usize")?.0;
            number.bytes().all(|byte| byte.is_ascii_digit()).then_some((what, number))
        },
    )
}

/// Writes the table of the sources that nvcc gets: path below this folder, and content.
fn gpu_sources(out: &Path) -> Result<(), Box<dyn Error>> {
    let headers = |path: &Path| has_extension(path, &["h", "cuh"]);
    let mut files = files_below(Path::new("include"), &headers)?;
    files.extend(
        files_below(Path::new("protocol"), &headers)?
            .into_iter()
            .filter(|path| !path.starts_with("protocol/test") && !path.starts_with("protocol/cpu")),
    );
    files.extend(files_below(Path::new("src/gpu"), &headers)?);
    files.extend(files_below(Path::new("src/tasks"), &|path| {
        has_extension(path, &["cuh"])
            || ["params.h", "units.h", "noise.h", "logprob.h"].iter().any(|name| path.ends_with(name))
    })?);
    files.push("include/mpk/abi_layout.h".into());
    files.sort();
    let mut table = String::from("static FILES: &[(&str, &[u8])] = &[\n");
    for path in files {
        let path = path.to_str().ok_or("a source's name is not UTF-8")?;
        // Written by `assert_layout`.
        let (root, place) = match path {
            "include/mpk/abi_layout.h" => ("OUT_DIR", "/abi_layout.h".to_string()),
            _ => ("CARGO_MANIFEST_DIR", format!("/{path}")),
        };
        table += &format!("    ({path:?}, include_bytes!(concat!(env!({root:?}), {place:?}))),\n");
    }
    table += "];\n";
    fs::write(out.join("gpu_sources.rs"), table)?;
    Ok(())
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension().is_some_and(|found| extensions.iter().any(|extension| found == *extension))
}

fn files_below(folder: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files_below(&path, wanted)?);
        } else if wanted(&path) {
            found.push(path);
        }
    }
    Ok(found)
}

/// All that decides what the C++ compiler makes: names and contents of the sources, this file, the environment.
fn cpp_inputs(x86: bool) -> Result<Vec<u8>, Box<dyn Error>> {
    let others = ["protocol/test", "protocol/gpu", "protocol/platform/gpu.h", "protocol/platform/gpu_puts.h"];
    let cpp = |path: &Path| {
        !has_extension(path, &["rs", "cuh"]) && !others.iter().any(|other| path.starts_with(other))
    };
    let mut files = vec![PathBuf::from("build.rs")];
    for folder in ["include", "protocol", "src/cpu", "src/tasks"] {
        files.extend(files_below(Path::new(folder), &cpp)?);
    }
    files.sort();
    let mut inputs = vec![u8::from(x86)];
    for path in files {
        inputs.extend(path.to_string_lossy().as_bytes());
        inputs.extend(fs::read(&path)?);
    }
    for name in ["CXX", "CXXFLAGS", "TARGET", "OPT_LEVEL", "DEBUG"] {
        println!("cargo:rerun-if-env-changed={name}");
        inputs.extend(format!("{name}={:?}", env::var_os(name)).bytes());
    }
    Ok(inputs)
}

fn compile(out: &Path) -> Result<(), Box<dyn Error>> {
    let x86 = env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64");
    let mut groups: Vec<(String, Vec<PathBuf>)> = vec![("baseline".to_string(), Vec::new())];
    for source in sources()? {
        let stem = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let level = LEVELS.iter().map(|l| l.0).find(|l| stem == *l || stem.ends_with(&format!("_{l}")));
        if level.is_some_and(|l| l.starts_with("avx")) && !x86 {
            continue;
        }
        let name = level.unwrap_or("baseline");
        match groups.iter_mut().find(|g| g.0 == name) {
            Some(group) => group.1.push(source),
            None => groups.push((name.to_string(), vec![source])),
        }
    }
    groups[0].1.push(out.join("abi_layout.cpp"));
    groups.retain(|group| !group.1.is_empty());
    println!("cargo:rustc-link-search=native={}", out.display());
    for (name, _) in &groups {
        println!("cargo:rustc-link-lib=static=mpk_cpu_{name}");
    }
    println!("cargo:rustc-link-lib=stdc++");
    let (inputs, stamp) = (cpp_inputs(x86)?, out.join("cpp_inputs"));
    if fs::read(&stamp).is_ok_and(|last| last == inputs) {
        return Ok(());
    }
    let _ = fs::remove_file(&stamp);
    for (name, files) in groups {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++20")
            .opt_level(3)
            .include("include")
            .include("protocol")
            .include("src")
            .flag("-fno-math-errno")
            .flag("-ffp-contract=off")
            .flag("-fvisibility=hidden")
            .flag_if_supported("-Wno-psabi")
            // g++ 12 finds them in its own intrinsics
            .flag_if_supported("-Wno-maybe-uninitialized")
            .flag_if_supported("-Wno-uninitialized")
            .warnings(true)
            .cargo_metadata(false)
            .files(files);
        if let Some((level, flags)) = LEVELS.iter().find(|l| l.0 == name) {
            build.define("MPK_ISA", *level).define(&format!("MPK_ISA_{}", level.to_uppercase()), "1");
            for flag in *flags {
                build.flag(flag);
            }
        }
        if x86 {
            build.define("MPK_X86", "1");
        }
        build.try_compile(&format!("mpk_cpu_{name}")).map_err(|e| {
            // The compiler's own messages stand above; without one there are none.
            match e.to_string() {
                text if text.contains("ToolNotFound") || text.contains("not found") => format!(
                    "C++ ({name}): {e}\nA C++20 compiler is needed (g++ 12 or clang 15, or newer); CXX names it."
                ),
                _ => format!(
                    "C++ ({name}): the compiler found errors in the sources; its messages are above (\"cargo:warning\" \
                     lines). A compiler older than g++ 12 or clang 15 does not know C++20; CXX names another."
                ),
            }
        })?;
    }
    fs::write(&stamp, inputs)?;
    Ok(())
}

/// The C++ sources of the CPU target, sorted; folders that are not there are skipped.
fn sources() -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut found = Vec::new();
    let mut cpp_in = |folder: &Path, prefix: &str| -> Result<(), Box<dyn Error>> {
        let Ok(entries) = fs::read_dir(folder) else { return Ok(()) };
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with(prefix) && name.ends_with(".cpp") {
                found.push(path);
            }
        }
        Ok(())
    };
    cpp_in(Path::new("src/cpu"), "")?;
    cpp_in(Path::new("protocol/cpu"), "")?;
    for entry in fs::read_dir("src/tasks")? {
        cpp_in(&entry?.path(), "cpu")?;
    }
    found.sort();
    Ok(found)
}
