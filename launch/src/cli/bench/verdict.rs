//! Checks whether the timed results were right. Without this check no figure is printed.
//!
//! The engine itself ends a run whose ranks do not compute the same bits. Here every repetition must give the same tokens, as many as
//! requested, and equal to the reference if one is given.

use crate::cli::program::Failure;
use crate::engine::{Engine, Request};
use crate::model::app_error::AppError;
use crate::model::files;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use taskgraph::words::counted;
use xxhash_rust::xxh3::xxh3_64;

/// The expected tokens.
#[derive(Debug)]
pub struct Reference {
    path: PathBuf,
    requests: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct File {
    requests: Vec<Tokens>,
}

#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
}

impl Reference {
    /// Reads a JSON object with `requests`, each with `tokens`.
    ///
    /// # Errors
    /// The file cannot be read, or has another format.
    pub fn read(path: &Path) -> Result<Reference, AppError> {
        let bytes = files::read(path)?;
        let file: File = serde_json::from_slice(&bytes).map_err(|error| {
            AppError::input(format!("{}: {error}; expected what `mpk-run --json` writes", path.display()))
        })?;
        let requests = file.requests.into_iter().map(|request| request.tokens).collect();
        Ok(Reference { path: path.to_path_buf(), requests })
    }
}

/// The tokens of the first repetition. All later repetitions must give the same.
#[derive(Debug, Default)]
pub struct Answers {
    repetitions: u32,
    tokens: Vec<Vec<u32>>,
}

impl Answers {
    /// Runs the requests and checks their tokens.
    ///
    /// # Errors
    /// A request fails, has the wrong number of tokens, or has other tokens than in an earlier repetition.
    pub fn take(&mut self, engine: &Engine, requests: Vec<Request>) -> Result<(), Failure> {
        let wanted: Vec<u32> = requests.iter().map(|request| request.max_new_tokens).collect();
        let mut tokens = Vec::new();
        for handle in engine.submit_all(requests)? {
            let answer = handle.wait();
            if let Some(error) = answer.error {
                return Err(error.into());
            }
            tokens.push(answer.tokens);
        }
        engine.wait_idle();
        // The kernel publishes its figures after the last token, one word at a time.
        std::thread::sleep(Duration::from_millis(5));
        Ok(self.add(tokens, &wanted)?)
    }

    fn add(&mut self, tokens: Vec<Vec<u32>>, wanted: &[u32]) -> Result<(), AppError> {
        for (number, (tokens, &wanted)) in tokens.iter().zip(wanted).enumerate() {
            if tokens.len() != wanted as usize {
                let count = counted(tokens.len(), "token");
                return Err(AppError::failed(format!("request {number} has {count} instead of {wanted}")));
            }
        }
        if self.repetitions > 0 {
            differ(&tokens, &self.tokens, "an earlier repetition of the same requests")?;
        }
        self.repetitions += 1;
        self.tokens = tokens;
        Ok(())
    }

    /// The checks that passed, for the JSON object.
    ///
    /// # Errors
    /// The tokens differ from the reference.
    pub fn verdict(&self, reference: Option<&Reference>) -> Result<Value, AppError> {
        if let Some(reference) = reference {
            differ(&self.tokens, &reference.requests, &reference.path.display().to_string())?;
        }
        let bytes: Vec<u8> = self.tokens.iter().flatten().flat_map(|token| token.to_le_bytes()).collect();
        Ok(json!({
            "right": true,
            "ranks": "the same bits",
            "repetitions_with_the_same_tokens": self.repetitions,
            "tokens": self.tokens.iter().map(Vec::len).sum::<usize>(),
            "tokens_hash": format!("{:016x}", xxh3_64(&bytes)),
            "reference": reference.map(|reference| reference.path.clone()),
        }))
    }

    /// The requests with their tokens, which another run can read as [`Reference`].
    pub fn requests(&self) -> Value {
        self.tokens.iter().map(|tokens| json!({"tokens": tokens})).collect()
    }
}

/// The first difference, as an error.
///
/// # Errors
/// There is one.
pub(super) fn differ(found: &[Vec<u32>], expected: &[Vec<u32>], from: &str) -> Result<(), AppError> {
    match first_difference(found, expected) {
        None => Ok(()),
        Some(difference) => Err(AppError::failed(format!("no figures: {difference} in {from}"))),
    }
}

/// The first difference between two lists of requests' tokens, if there is one.
fn first_difference(found: &[Vec<u32>], expected: &[Vec<u32>]) -> Option<String> {
    if found.len() != expected.len() {
        return Some(format!("{}, but {}", counted(found.len(), "request"), expected.len()));
    }
    found.iter().zip(expected).enumerate().find_map(|(request, (found, expected))| {
        let at = place_of_difference(found, expected)?;
        let shown = |token: Option<&u32>| token.map_or("none".to_string(), u32::to_string);
        let (found, expected) = (shown(found.get(at)), shown(expected.get(at)));
        Some(format!("token {at} of request {request} is {found}, but {expected}"))
    })
}

/// The place of the first token that differs, if there is one.
pub(super) fn place_of_difference(found: &[u32], expected: &[u32]) -> Option<usize> {
    (0..found.len().max(expected.len())).find(|&at| found.get(at) != expected.get(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(requests: &[&[u32]]) -> Reference {
        Reference { path: "r.json".into(), requests: requests.iter().map(|r| r.to_vec()).collect() }
    }

    #[test]
    fn wrong_results_have_no_figures() {
        let mut answers = Answers::default();
        answers.add(vec![vec![1, 2], vec![3, 4]], &[2, 2]).unwrap();
        answers.add(vec![vec![1, 2], vec![3, 4]], &[2, 2]).unwrap();
        let error = answers.add(vec![vec![1, 2], vec![3, 5]], &[2, 2]).unwrap_err();
        assert!(error.message.contains("token 1 of request 1 is 5, but 4"), "{error}");
        assert!(answers.add(vec![vec![1], vec![3, 4]], &[2, 2]).is_err());
        assert!(answers.verdict(Some(&reference(&[&[1, 2], &[3, 4]]))).is_ok());
        for wrong in [&[&[1, 2][..]][..], &[&[1, 2], &[3]], &[&[1, 2], &[3, 4, 5]], &[&[1, 2], &[4, 4]]] {
            let error = answers.verdict(Some(&reference(wrong))).unwrap_err();
            assert!(error.message.contains("r.json"), "{error}");
        }
    }
}
