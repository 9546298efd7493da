use super::*;

#[test]
fn the_table_is_aligned_and_names_the_fix() {
    let mut table = Table::default();
    table.good("MPI", "Open MPI 4.1.6");
    table.missing(NVCC, "not found", "scripts/setup.sh --cuda");
    let text = table.text();
    assert!(text.contains("MPI           ok      Open MPI 4.1.6\n"), "{text}");
    assert!(text.contains("CUDA toolkit  MISSING not found\n"), "{text}");
    assert!(text.contains("-> scripts/setup.sh --cuda\n"), "{text}");
    assert!(table.has("MPI") && !table.has(NVCC));
}

/// The last line says what the exit status says.
#[test]
fn the_last_line_agrees_with_the_exit_status() {
    for (backend, ranks, cuda, status, line) in [
        (
            Backend::Cuda,
            2,
            false,
            3,
            "not possible: `--backend cuda` lacks what is marked MISSING; `--backend cpu` works",
        ),
        (Backend::Cuda, 1, true, 0, "possible: `mpk-run --backend cuda`"),
        (Backend::Auto, 2, false, 0, "possible: `mpirun -n 2 mpk-run`, on the CPU"),
        (Backend::Cpu, 1, false, 0, "possible: `mpk-run --backend cpu`"),
    ] {
        let mut table = Table::default();
        let args = DoctorArgs { model: None, ranks, backend };
        say_ranks(&mut table, &args, &[], cuda);
        let (found, verdict) = verdict(&args, &[], cuda);
        table.verdict = Some(verdict);
        assert_eq!((found, table.text().lines().last()), (status, Some(line)));
    }
}

#[test]
fn the_fix_is_the_errors_help() {
    let mut table = Table::default();
    table.error("x", distributed::Error::Driver { reason: "no memory; really".into() });
    let check = &table.checks[0];
    assert!(check.found.ends_with("no memory; really"), "{}", check.found);
    assert!(check.fix.as_deref().is_some_and(|fix| fix.contains("nvidia-smi")), "{:?}", check.fix);
    table.error("y", AppError::input("nothing to be done; really"));
    assert_eq!(table.checks[1].fix, None);
}

#[test]
fn the_cache_is_judged_as_a_run_judges_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    std::os::unix::fs::symlink("/no/such/folder", folder.path().join("nowhere")).unwrap();
    for (name, good) in [("new/folder", true), ("file", false), ("file/below", false), ("nowhere", false)] {
        let mut table = Table::default();
        check_cache(&mut table, Ok(Cache::new(folder.path().join(name))));
        assert_eq!(table.has(CACHE), good, "{name}: {}", table.text());
        assert_eq!(table.text().contains("MPK_CACHE_DIR"), !good, "{name}: {}", table.text());
    }
    assert!(Cache::new("below/this/folder").folder().is_absolute());
}

#[test]
fn the_compiler_that_nvcc_calls_is_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let table_for = |named: &Path| {
        let mut table = Table::default();
        check_host_compiler(&mut table, Some(named.into()));
        table
    };
    for named in [folder.path(), Path::new("/no/such/compiler")] {
        assert!(table_for(named).text().contains("sudo apt-get install g++"));
    }
    std::os::unix::fs::symlink("/bin/true", folder.path().join("gcc")).unwrap();
    assert_eq!(table_for(folder.path()).checks[0].state, State::Good);
}

#[test]
fn a_gpu_run_of_several_ranks_needs_nvshmem() {
    let mut table = Table::default();
    for what in [DRIVER, "GPU 0", NVCC, CACHE] {
        table.good(what, "there");
    }
    assert!(cuda_possible(&table, 1) && !cuda_possible(&table, 2));
    table.good(NVSHMEM_HOST, "there");
    table.good("MPI", "there");
    assert!(cuda_possible(&table, 2));
    table.missing(MEMORY, "too little", "more GPUs");
    assert!(!cuda_possible(&table, 1));
}
