//! Repeated measurements of one thing.

use serde::Serialize;

/// Median, least and most, with all of them in order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Samples {
    /// The middle one; of an even number the larger of the two.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The most.
    pub most: f64,
    /// All, as they came.
    pub samples: Vec<f64>,
}

impl Samples {
    /// `None` of none.
    pub fn of(samples: Vec<f64>) -> Option<Samples> {
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        Some(Samples {
            median: *sorted.get(sorted.len() / 2)?,
            least: *sorted.first()?,
            most: *sorted.last()?,
            samples,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_and_the_ends() {
        let found = Samples::of(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!((found.median, found.least, found.most), (2.0, 1.0, 3.0));
        assert_eq!(found.samples, [3.0, 1.0, 2.0]);
        assert_eq!(Samples::of(Vec::new()), None);
    }
}
