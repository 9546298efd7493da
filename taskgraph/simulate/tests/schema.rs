//! The schema in the repository matches the type, and the cluster files can be read.

use simulate::{Cluster, ClusterError};
use std::path::Path;

/// `UPDATE_SCHEMAS=1 cargo test -p mpk-simulate --test schema` rewrites it.
#[test]
fn the_published_schema_is_current() {
    let path = format!("{}/schema/cluster.schema.json", env!("CARGO_MANIFEST_DIR"));
    let wanted = serde_json::to_string_pretty(&Cluster::json_schema()).unwrap() + "\n";
    if std::env::var_os("UPDATE_SCHEMAS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), wanted, "{path} is out of date");
}

#[test]
fn all_clusters_of_the_repository_are_read_and_name_their_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/clusters");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let cluster = Cluster::parse(&std::fs::read_to_string(&path).unwrap())
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert!(!cluster.sources.is_empty(), "{}", path.display());
        count += 1;
    }
    assert!(count >= 2);
}

#[test]
fn a_bad_description_is_refused_with_its_place() {
    let plain = include_str!("plain.json");
    let refused = |from: &str, to: &str| {
        assert!(plain.contains(from), "{from}");
        Cluster::parse(&plain.replacen(from, to, 1)).unwrap_err()
    };
    for (from, to, told) in [
        ("\"hop_us\": 2", "\"hop_us\": -2", "protocol.hop_us"),
        ("\"gb_per_s\": 1000", "\"gb_per_s\": 0", "memory.gb_per_s"),
        ("mpk-cluster/1", "mpk-cluster/9", "mpk-cluster/1"),
        ("\"workers\": 2", "\"workers\": 0", "workers"),
        ("\"ranks_per_node\": 8", "\"ranks_per_node\": 0", "ranks_per_node"),
        ("\"workers\": 2,", "", "workers"),
        ("\"latency_us\": 1", "\"latency_us\": 1, \"flag_share\": 1.5", "memory.flag_share"),
        ("\"gflop_per_s\"", "\"page_gb_per_s\": 0, \"gflop_per_s\"", "worker.page_gb_per_s"),
    ] {
        let error = refused(from, to);
        assert!(matches!(error, ClusterError::Value { .. }), "{error}");
        assert!(error.to_string().contains(told), "{error}");
    }
    let error = refused("\"hop_us\": 2", "\"hop_us\": \"two\"");
    assert!(error.to_string().starts_with("protocol.hop_us: "), "{error}");
    let error = refused("\"hop_us\": 2", "\"hops\": 2");
    assert!(error.to_string().contains("hops"), "{error}");
}
