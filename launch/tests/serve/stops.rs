//! Text as an engine returns it: whole characters, and no part of a stop string.

/// Searches for stop strings in a text that arrives in pieces.
#[derive(Clone, Debug, Default)]
pub struct Stops {
    stops: Vec<String>,
    /// The end of the text, which may become a stop string.
    pub held: String,
}

impl Stops {
    pub fn new(stops: Vec<String>) -> Self {
        Stops { stops, held: String::new() }
    }

    /// Takes the next piece; returns the text that is now certain, and whether a stop string ends
    /// it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        if self.stops.is_empty() {
            return (piece.to_string(), false);
        }
        self.held.push_str(piece);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str()));
        if let Some(begin) = first.min() {
            let text = self.held[..begin].to_string();
            self.held.clear();
            return (text, true);
        }
        let kept = self.stops.iter().map(|stop| beginning(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - kept);
        (std::mem::replace(&mut self.held, rest), false)
    }
}

/// Number of bytes at the end of `text` that may be the beginning of `stop`.
fn beginning(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    (1..=longest).rev().find(|&n| text.as_bytes().ends_with(&stop.as_bytes()[..n])).unwrap_or(0)
}
