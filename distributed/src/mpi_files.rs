//! Files of Open MPI that a process must remove itself if it ends in the middle of a call.
//!
//! `MPI_Win_allocate_shared` (component `osc/sm` of Open MPI 4) gives the memory of a window a name in /dev/shm until all ranks of
//! the node have opened it. A job that ends before that leaves the file behind: the launcher does not know about it.

use std::path::{Path, PathBuf};

/// Prefix of the names of such files.
const PREFIX: &str = "/dev/shm/osc_sm.";

/// Removes the files of unfinished windows that this process has mapped. Called when the process is about to end, so its peers
/// cannot open them any more. Errors are ignored: the file may be gone already, and otherwise nothing else can be done.
pub(crate) fn remove_half_made_windows() {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return };
    for path in named_windows(&maps) {
        let _ = std::fs::remove_file(path);
    }
}

/// The files of windows among the mappings of a process (proc_pid_maps(5)) that still have their name.
fn named_windows(maps: &str) -> impl Iterator<Item = PathBuf> {
    maps.lines().filter_map(|line| {
        let path = &line[line.find(PREFIX)?..];
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
        let found: Vec<_> = named_windows(maps).collect();
        assert_eq!(found, [Path::new("/dev/shm/osc_sm.node.4ccc0001.0.4")]);
    }
}
