//! Steps in which all requests of a batch decode.
//!
//! Prompts enter over several iterations. A request whose prompt is complete generates while the other prompts still enter. So a
//! request that is early gets a shorter prompt and more tokens to generate, by as many tokens as it is early. Then all requests have
//! the same number of tokens when the last prompt is complete, and all end in the same iteration.

/// The number of tokens that each request generates before the iteration from which all requests decode, not counting its first.
/// `chunk` is the number of rows in an iteration with prompts. `beside` is how many of them prompts may use while other requests
/// generate. `None` if a prompt would have no token left.
pub fn early_tokens(batch: u32, context: u32, chunk: u32, beside: u32) -> Option<Vec<u32>> {
    /// Shorter prompts enter in fewer iterations, which makes them longer again. This settles within a few rounds.
    const ROUNDS: usize = 64;
    let mut early = vec![0; batch as usize];
    for _ in 0..ROUNDS {
        let prompts: Option<Vec<u32>> =
            early.iter().map(|early| context.checked_sub(*early).filter(|left| *left > 0)).collect();
        let first = first_tokens(&prompts?, chunk, beside);
        let last = first.last().copied().unwrap_or(0);
        let found: Vec<u32> = first.iter().map(|first| last - first).collect();
        if found == early {
            break;
        }
        early = found;
    }
    early.iter().all(|early| *early < context).then_some(early)
}

/// The iteration in which each request gets its first token. Follows the batch step: one row for each request that generates, the rest
/// for prompts in their order.
fn first_tokens(prompts: &[u32], chunk: u32, beside: u32) -> Vec<u32> {
    let chunk = chunk.max(prompts.len() as u32);
    let mut first = Vec::new();
    let mut entered = 0; // tokens of the current prompt
    for iteration in 0.. {
        let generating = first.len() as u32;
        let mut rows = chunk - generating;
        if generating > 0 {
            rows = rows.min(beside.max(1));
        }
        while let Some(prompt) = prompts.get(first.len()) {
            let taken = rows.min(prompt - entered);
            rows -= taken;
            entered += taken;
            if entered < *prompt {
                break;
            }
            first.push(iteration);
            entered = 0;
        }
        if first.len() == prompts.len() {
            break;
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_that_enter_together_are_not_early() {
        assert_eq!(early_tokens(4, 20, 256, 256), Some(vec![0; 4]));
        assert_eq!(early_tokens(1, 5000, 256, 256), Some(vec![0]));
    }

    #[test]
    fn rows_are_dealt_as_the_batch_step_does() {
        // 8 rows, then 8 minus the generating requests; prompts of 12 tokens.
        assert_eq!(first_tokens(&[12, 12, 12], 8, 8), [1, 3, 4]);
        assert_eq!(first_tokens(&[12, 12, 12], 8, 2), [1, 5, 11]);
    }

    #[test]
    fn all_have_the_context_when_the_last_prompt_is_complete() {
        for (batch, context, chunk) in [(128, 512, 2048), (32, 512, 2048), (4, 20, 8), (5, 90, 12)] {
            let early = early_tokens(batch, context, chunk, chunk).unwrap();
            let prompts: Vec<u32> = early.iter().map(|early| context - early).collect();
            let first = first_tokens(&prompts, chunk, chunk);
            let last = first.last().copied().unwrap();
            for (request, early) in early.iter().enumerate() {
                assert!(
                    (last - first[request]).abs_diff(*early) <= 1,
                    "{batch} x {context}, {request}: {early}"
                );
            }
        }
    }

    #[test]
    fn no_prompt_is_left_where_iterations_are_too_small() {
        assert_eq!(early_tokens(8, 4, 9, 1), None);
    }
}
