//! Proves that jobs over several nodes compute what one node computes, and that if a node is lost all ranks end with an error that names
//! it. It runs the short form of `scripts/multinode_test.sh`, which makes nodes from network namespaces.
//!
//! It takes more than a minute; `MPK_MULTINODE=0` leaves it out. If the kernel does not allow namespaces, the script says what it has
//! left out and succeeds, or fails with `MPK_REQUIRE_NAMESPACES=1`. For any other reason it fails.

use mpk_tests::job::binary;
use std::path::Path;
use std::process::Command;

fn passes(parts: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/multinode_test.sh");
    let output = Command::new(script).arg("--program").arg(binary()).args(parts).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    assert!(output.status.success(), "{parts:?}: {text}\n{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn several_nodes_compute_what_one_does() {
    passes(&["cases"]);
}

#[test]
fn a_slow_network_and_a_lossy_one_change_nothing() {
    passes(&["slow"]);
}

/// Runs a part in shares side by side, because a job that has lost a node mostly waits. Each share has namespaces of its own.
fn passes_in_shares(part: &str) {
    std::thread::scope(|scope| {
        for share in ["1/3", "2/3", "3/3"] {
            scope.spawn(move || passes(&[part, "--share", share]));
        }
    });
}

#[test]
fn a_lost_node_ends_the_job_in_seconds() {
    passes_in_shares("faults");
}

#[test]
fn signals_end_the_ranks_of_every_node() {
    passes_in_shares("signals");
}
