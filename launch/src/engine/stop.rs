//! Stop strings. Text that may still become a stop string is held back.

/// Looks for stop strings in text that arrives in pieces.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopStrings {
    stops: Vec<String>,
    /// The end of the text so far, which may be the beginning of a stop string.
    held: String,
    /// Stop strings that end within this many bytes of `held` do not count.
    passed: usize,
}

/// The result of adding a piece of text.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct Released {
    /// Text that is final.
    pub text: String,
    /// A stop string follows, so the answer ends here.
    pub stopped: bool,
}

impl StopStrings {
    /// Empty stop strings are ignored.
    pub fn new(stops: &[String]) -> StopStrings {
        StopStrings {
            stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            held: String::new(),
            passed: 0,
        }
    }

    /// Adds the next piece.
    pub fn push(&mut self, piece: &str) -> Released {
        if self.stops.is_empty() {
            return Released { text: piece.to_string(), stopped: false };
        }
        self.held.push_str(piece);
        if let Some(place) = self.stops.iter().filter_map(|stop| self.find(stop)).min() {
            self.held.truncate(place);
            return Released { text: std::mem::take(&mut self.held), stopped: true };
        }
        Released { text: self.release(), stopped: false }
    }

    /// Adds the next piece, at whose end no stop string counts yet. Text is still held back if a stop string that ends later may have
    /// begun. Returns the text that is final.
    pub fn pass(&mut self, piece: &str) -> String {
        self.held.push_str(piece);
        self.passed = self.held.len();
        self.release()
    }

    /// The place of `stop` in the text that is held back.
    fn find(&self, stop: &str) -> Option<usize> {
        // A match that begins before this ends too early.
        let earliest = (self.passed + 1).saturating_sub(stop.len());
        let begin = (earliest..=self.held.len()).find(|&place| self.held.is_char_boundary(place))?;
        self.held[begin..].find(stop).map(|place| begin + place)
    }

    /// Takes the text that cannot be the beginning of a stop string.
    fn release(&mut self) -> String {
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        self.passed = self.passed.saturating_sub(self.held.len());
        std::mem::replace(&mut self.held, rest)
    }

    /// The text has ended, so the text that was held back is no stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length in bytes of the longest suffix of `text` that is a proper prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest)
        .rev()
        .find(|&length| {
            stop.is_char_boundary(length) && text.as_bytes().ends_with(&stop.as_bytes()[..length])
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut watch = StopStrings::new(&stops);
        let mut texts = Vec::new();
        for piece in pieces {
            let released = watch.push(piece);
            texts.push(released.text);
            if released.stopped {
                return (texts, true);
            }
        }
        texts.push(watch.finish());
        (texts, false)
    }

    #[test]
    fn text_that_may_become_a_stop_string_is_held_back() {
        assert_eq!(run(&["END"], &["a E", "N", "x"]).0, ["a ", "", "ENx", ""]);
        assert_eq!(run(&["END"], &["a E", "N", "D b"]), (vec!["a ".into(), "".into(), "".into()], true));
        // The rest is released at the end of the text.
        assert_eq!(run(&["END"], &["a EN"]).0, ["a ", "EN"]);
        // The earliest stop string counts. If a shorter and a longer one match, the one that is complete first
        // counts.
        assert_eq!(run(&["cd", "b"], &["abcd"]), (vec!["a".into()], true));
        assert_eq!(run(&["aab"], &["aa", "ab"]), (vec!["".into(), "a".into()], true));
        assert_eq!(run(&["é!"], &["é", "è"]).0, ["", "éè", ""]);
        assert_eq!(run(&["", "x"], &["ab"]).0, ["ab", ""]);
    }

    #[test]
    fn stop_strings_count_only_if_they_end_late_enough() {
        let run = |stops: &[&str], passed: &[&str], pieces: &[&str]| {
            let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
            let mut watch = StopStrings::new(&stops);
            let mut texts: Vec<String> = passed.iter().map(|piece| watch.pass(piece)).collect();
            for piece in pieces {
                let released = watch.push(piece);
                texts.push(released.text);
                if released.stopped {
                    return (texts.join("|"), true);
                }
            }
            texts.push(watch.finish());
            (texts.join("|"), false)
        };
        let stopped = |text: &str| (text.to_string(), true);
        let ended = |text: &str| (text.to_string(), false);
        assert_eq!(run(&["END"], &["a END"], &["b"]), ended("a END|b|"));
        assert_eq!(run(&["END"], &["a END", " E"], &["ND"]), stopped("a END| |"));
        assert_eq!(run(&["END"], &["a EN"], &["x"]), ended("a |ENx|"));
        // The short one has ended too early, although its text is still held back.
        assert_eq!(run(&["ab", "xabz"], &["xab"], &["q"]), ended("|xabq|"));
        assert_eq!(run(&["ab", "xabz"], &["xab"], &["z"]), stopped("|"));
        assert_eq!(run(&["ab", "xabz"], &["xab"], &["qab"]), stopped("|xabq"));
        assert_eq!(run(&["aa"], &["aa"], &["a"]), stopped("a|"));
        assert_eq!(run(&["é", "éé!"], &["é"], &["è"]), ended("|éè|"));
        assert_eq!(run(&[], &["a"], &["b"]), ended("a|b|"));
    }

    proptest! {
        /// However the text is cut into pieces, the output is the text before the first stop string.
        #[test]
        fn pieces_do_not_matter(text in "[ab]{0,12}", stops in prop::collection::vec("[ab]{1,3}", 0..3), cuts in prop::collection::vec(0usize..4, 0..12)) {
            let mut pieces = Vec::new();
            let mut rest = text.as_str();
            for cut in cuts {
                let (piece, more) = rest.split_at(cut.min(rest.len()));
                pieces.push(piece);
                rest = more;
            }
            pieces.push(rest);
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (texts, stopped) = run(&stops, &pieces);
            // The first stop string that is complete ends the text. The text is cut at the first place where such a
            // stop string begins.
            let end = (0..=text.len()).find(|&end| stops.iter().any(|stop| text[..end].ends_with(stop)));
            prop_assert_eq!(stopped, end.is_some());
            let expected = match end {
                None => text.clone(),
                Some(_) if pieces.len() == 1 => {
                    text[..stops.iter().filter_map(|s| text.find(s)).min().unwrap()].to_string()
                }
                Some(_) => texts.concat(),
            };
            prop_assert_eq!(&texts.concat(), &expected);
            prop_assert!(text.starts_with(&texts.concat()));
            prop_assert!(stops.iter().all(|stop| !texts.concat().contains(stop)));
        }
    }
}
