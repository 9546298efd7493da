//! Time of a decode step at a context length, on any backend and number of ranks.

use crate::cli::args::Args;
use crate::cli::run::{Finished, run_and_report};
use crate::model::app_error::AppError;
use serde_json::json;

/// What is timed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Path of model.json.
    pub model: String,
    /// Tokens before the first step.
    pub context: u32,
    /// Requests at a time.
    pub batch: u32,
    /// Steps.
    pub steps: u32,
    /// More options of mpk-run.
    pub options: Vec<String>,
}

impl Case {
    /// The command line of mpk-run.
    fn words(&self) -> Vec<String> {
        let mut words = vec!["mpk-run".to_string(), self.model.clone(), "--ignore-eos".into()];
        let mut option = |name: &str, value: String| words.extend([format!("--{name}"), value]);
        option("max-batch", self.batch.to_string());
        option("max-seq-len", (self.context + self.steps + 1).to_string());
        option("max-new-tokens", (self.steps + 1).to_string());
        for request in 0..self.batch {
            // Any ids that every vocabulary has, not the same for all.
            let ids: Vec<String> = (0..self.context).map(|i| ((i * 7 + request) % 31).to_string()).collect();
            option("prompt-tokens", ids.join(","));
        }
        words.extend(self.options.iter().cloned());
        words
    }
}

/// Runs mpk-run in this process and prints one JSON object, on rank 0; gives the exit status.
///
/// # Errors
/// An option that mpk-run does not know.
pub fn run(case: &Case) -> Result<i32, AppError> {
    let args = Args::from_words(&case.words()).map_err(|e| AppError::input(e.to_string()))?;
    let report = |done: &Finished<'_>| {
        let timing = done.rank.timing();
        if timing.decode_steps == 0 {
            return Err(AppError::failed("no decode step was made"));
        }
        let ms = 1000.0 * timing.decode.as_secs_f64() / timing.decode_steps as f64;
        Ok(json!({
            "schema": "mpk-bench/1",
            "what": "decode",
            "model": case.model,
            "backend": done.rank.backend(),
            "tp": done.ranks,
            "batch": case.batch,
            "context": case.context,
            "steps": timing.decode_steps,
            "ms_per_step": ms,
            "tokens_per_s": 1000.0 * f64::from(case.batch) / ms,
            "prefill_s": timing.prefill.as_secs_f64(),
            "load_s": done.start.load.as_secs_f64(),
        })
        .to_string())
    };
    Ok(run_and_report(&args, Some(&report)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_one_of_mpk_runs() {
        let case = Case {
            model: "m.json".into(),
            context: 5,
            batch: 2,
            steps: 7,
            options: vec!["--backend".into(), "cpu".into()],
        };
        let args = Args::from_words(&case.words()).unwrap();
        assert_eq!((args.max_batch, args.max_seq_len, args.max_new_tokens), (Some(2), Some(13), Some(8)));
        assert_eq!(args.prompt_tokens, ["0,7,14,21,28", "1,8,15,22,29"]);
        assert!(args.ignore_eos);
    }
}
