//! Proves that jobs over several nodes compute what one node computes, and that all ranks end, with a word about the node that is
//! gone, when one is lost: the short form of `scripts/multinode_test.sh`, which makes nodes of network namespaces. It takes minutes,
//! so it runs only with MPK_MULTINODE=1.

use mpk_tests::job::binary;
use std::path::Path;
use std::process::Command;

/// Where namespaces are not allowed, the script says what is left out, and fails only if `MPK_REQUIRE_NAMESPACES` is 1.
fn passes(parts: &[&str]) {
    if std::env::var_os("MPK_MULTINODE").is_none_or(|wanted| wanted != "1") {
        eprintln!("skipped: set MPK_MULTINODE=1 for jobs over several nodes");
        return;
    }
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

#[test]
fn a_lost_node_ends_the_job_in_seconds() {
    passes(&["faults"]);
}
