//! Typed values from JSON, with errors for users: the path of the value, and no names of Rust's types.

use super::error::GraphFileError;
use super::names::clean;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads `value`. `place` is its path; the path of an error leads from there to the wrong part.
pub(super) fn parse<T: DeserializeOwned>(value: Value, place: &str) -> Result<T, GraphFileError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        GraphFileError::at(under(place, &error.path().to_string()), plain(&error.inner().to_string()))
    })
}

/// The place to which `path` leads from `place`.
pub(super) fn under(place: &str, path: &str) -> String {
    match path {
        "." => place.to_string(),
        index if index.starts_with('[') => format!("{place}{index}"),
        field => format!("{place}.{field}"),
    }
}

/// Reads an object. serde would also take a list of a struct's fields in order.
pub(super) fn parse_object<T: DeserializeOwned>(value: Value, place: &str) -> Result<T, GraphFileError> {
    match value {
        Value::Array(_) => Err(GraphFileError::at(place, "invalid type: list, expected an object")),
        value => parse(value, place),
    }
}

/// serde's message in the words of JSON, without the names of Rust's types, as [`clean`] shows it.
pub fn plain(message: &str) -> String {
    const WORDS: [(&str, &str); 14] = [
        ("expected u32", "expected a whole number from 0 to 4294967295"),
        ("expected u64", "expected a whole number, 0 or more"),
        ("expected usize", "expected a whole number, 0 or more"),
        ("expected f64", "expected a number"),
        ("expected path string", "expected a string"),
        ("expected string or map", "expected a string"),
        ("expected map with a single key", "expected a string"),
        ("expected variant identifier", "expected a string"),
        ("expected a sequence", "expected a list"),
        ("expected a map", "expected an object"),
        ("invalid type: sequence", "invalid type: list"),
        ("invalid type: map", "invalid type: object"),
        ("invalid value: map", "invalid type: object"),
        ("unknown variant", "unknown value"),
    ];
    // What serde_json says instead of a name, if text is parsed directly.
    if message == "expected value" {
        return "expected a string".into();
    }
    let words = WORDS.iter().fold(clean(message), |words, (rust, plain)| words.replace(rust, plain));
    for rust in ["expected struct ", "expected internally tagged enum "] {
        if let Some((before, after)) = words.split_once(rust) {
            let name = after.find(|c: char| !c.is_alphanumeric()).unwrap_or(after.len());
            return format!("{before}expected an object{}", &after[name..]);
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use crate::json::op_graph_from_value;
    use serde_json::{Value, json};

    /// The error for a graph that would be right without `value` at `pointer`.
    fn error(pointer: &str, value: Value) -> String {
        let mut graph = json!({
            "rows": 2,
            "tensors": [
                {"name": "x", "dtype": "f32", "dims": [2, 4], "kind": "input", "data": {"random": {"seed": 1}}},
                {"name": "w", "dtype": "f32", "dims": [3, 4], "kind": "weight", "shard": {"dim": 0, "kind": "even"}},
            ],
            "ops": [{"op": "linear", "inputs": ["x", "w"], "outputs": ["y"]}],
            "outputs": ["y"],
        });
        op_graph_from_value(&graph, "graph").expect("this graph is right");
        *graph.pointer_mut(pointer).unwrap() = value;
        op_graph_from_value(&graph, "graph").unwrap_err().to_string()
    }

    #[test]
    fn an_error_has_the_path_of_the_value_and_plain_words() {
        for (pointer, value, expected) in [
            (
                "/rows",
                json!(-1),
                "graph.rows: invalid value: integer `-1`, expected a whole number from 0 to 4294967295",
            ),
            ("/outputs/0", json!(1), "graph.outputs[0]: invalid type: integer `1`, expected a string"),
            (
                "/tensors/0/dims/1",
                json!(1.5),
                "graph.tensors[0].dims[1]: invalid type: floating point `1.5`, expected a whole number, 0 or more",
            ),
            (
                "/tensors/0/dtype",
                json!({}),
                "graph.tensors[0].dtype: invalid type: object, expected a string",
            ),
            (
                "/tensors/0/kind",
                json!(1),
                "graph.tensors[0].kind: invalid type: integer `1`, expected a string",
            ),
            ("/tensors/1", json!(1), "graph.tensors[1]: invalid type: integer `1`, expected an object"),
            (
                "/tensors/1",
                json!(["w", "f32", [3, 4], "weight"]),
                "graph.tensors[1]: invalid type: list, expected an object",
            ),
            (
                "/tensors/0/data/random",
                json!([1]),
                "graph.tensors[0].data.random: invalid type: list, expected an object",
            ),
            (
                "/tensors/1/shard/dim",
                json!("0"),
                "graph.tensors[1].shard.dim: invalid type: string \"0\", expected a whole number, 0 or more",
            ),
            ("/ops/0/inputs/1", Value::Null, "graph.ops[0].inputs[1]: invalid type: null, expected a string"),
            ("/ops/0/inputs", json!({}), "graph.ops[0].inputs: invalid type: object, expected a list"),
            ("/ops/0", json!({"op": "linear", "inputs": []}), "graph.ops[0]: missing field `outputs`"),
        ] {
            assert_eq!(error(pointer, value), expected);
        }
        let unknown = error("/tensors/1/shard/kind", json!("odd"));
        assert!(
            unknown.starts_with("graph.tensors[1].shard.kind: unknown value `odd`, expected one of"),
            "{unknown}"
        );
    }
}
