//! Removes files of Open MPI that would otherwise stay: those of a call in which a process ends, and those of a job
//! whose launcher has died.
//!
//! All errors are ignored: a file may be gone already, and there is no other way to remove it.

use rustix::process::geteuid;
use std::fs;
use std::path::{Path, PathBuf};

/// `MPI_Win_allocate_shared` (component `osc/sm` of Open MPI 4) gives the memory of a window this name until all ranks of the node have
/// opened it. A job that ends before that leaves the file behind: the launcher does not know about it.
const WINDOW: &str = "/dev/shm/osc_sm.";
/// The shared memory through which the ranks of a node send messages to each other. The launcher removes it.
const SEGMENT: &str = "/dev/shm/vader_segment.";

/// Removes the files of unfinished windows that this process has mapped. Called when the process is about to end, so its peers
/// cannot open them any more.
pub(crate) fn remove_half_made_windows() {
    remove_mapped(WINDOW);
}

/// Removes what the job's launcher on this node would have removed at its end. For a launcher, once process `launcher`, that was killed.
pub(crate) fn remove_after_launcher(launcher: u32) {
    remove_mapped(SEGMENT);
    let variable = |name| std::env::var(name).ok();
    let Some(folder) = variable("PMIX_SERVER_TMPDIR").map(PathBuf::from) else { return };
    let job = variable("PMIX_NAMESPACE").and_then(|name| name.parse().ok());
    if is_session(&folder, geteuid().as_raw(), launcher, job) {
        let _ = fs::remove_dir_all(&folder);
        // The folder above may contain other jobs. Then it stays.
        let _ = folder.parent().map(fs::remove_dir);
    }
}

/// True if Open MPI 4 gives its launcher's folder this name: on mpirun's node after mpirun's process, on other nodes after the job.
fn is_session(folder: &Path, user: u32, launcher: u32, job: Option<u32>) -> bool {
    let name = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let (Some(own), Some(above)) = (name(folder), folder.parent().and_then(name)) else { return false };
    above.starts_with("ompi.")
        && above.ends_with(&format!(".{user}"))
        && (own == format!("pid.{launcher}") || job.is_some_and(|job| own == format!("jf.{}", job >> 16)))
}

fn remove_mapped(prefix: &'static str) {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else { return };
    for path in named(&maps, prefix) {
        let _ = fs::remove_file(path);
    }
}

/// The files with this prefix among the mappings of a process (proc_pid_maps(5)) that still have their name.
fn named(maps: &str, prefix: &'static str) -> impl Iterator<Item = PathBuf> {
    maps.lines().filter_map(move |line| {
        let path = &line[line.find(prefix)?..];
        // A mapping whose file was unlinked ends in " (deleted)".
        (!path.contains(' ')).then(|| Path::new(path).to_path_buf())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_windows_with_a_name_are_found() {
        let maps = "\
7f0000000000-7f0000001000 rw-s 00000000 00:18 7 /dev/shm/osc_sm.node.4ccc0001.0.4
7f0000001000-7f0000002000 rw-s 00000000 00:18 8 /dev/shm/osc_sm.node.4ccc0001.0.5 (deleted)
7f0000002000-7f0000003000 rw-s 00000000 00:18 9 /dev/shm/vader_segment.node.0.4ccc0001.0
7f0000003000-7f0000004000 rw-p 00000000 00:00 0
";
        let found: Vec<_> = named(maps, WINDOW).collect();
        assert_eq!(found, [Path::new("/dev/shm/osc_sm.node.4ccc0001.0.4")]);
    }

    #[test]
    fn only_the_folder_of_the_own_launcher_is_its_session() {
        let is = |folder: &str| is_session(Path::new(folder), 1000, 51, Some(0x4af1_0001));
        assert!(is("/tmp/ompi.node1.1000/pid.51"));
        assert!(is("/tmp/ompi.node2.1000/jf.19185"));
        for other in [
            "/tmp/ompi.node1.1000/pid.52",
            "/tmp/ompi.node1.1000/jf.19186",
            "/tmp/ompi.node1.1001/pid.51",
            "/tmp/ompi.node1.1000",
            "/home/user/pid.51",
            "/tmp/ompi.node1.1000/pid.51/..",
            "/",
            "",
        ] {
            assert!(!is(other), "{other}");
        }
        assert!(!is_session(Path::new("/tmp/ompi.node1.1000/.."), 1000, 51, None));
    }
}
