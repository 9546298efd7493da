//! Stop strings. Text that may still become a stop string is held back.

/// Looks for stop strings in text that arrives in pieces.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopStrings {
    stops: Vec<String>,
    /// The end of the text so far, which may be the beginning of a stop string.
    held: String,
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
        }
    }

    /// Adds the next piece.
    pub fn push(&mut self, piece: &str) -> Released {
        if self.stops.is_empty() {
            return Released { text: piece.to_string(), stopped: false };
        }
        self.held.push_str(piece);
        if let Some(place) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(place);
            return Released { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Released { text: std::mem::replace(&mut self.held, rest), stopped: false }
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
