//! Repeated measurements of the same thing.

use serde::Serialize;

/// Median, minimum and maximum, and all samples in order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Samples {
    /// The median; for an even number of samples, the larger of the two in the middle.
    pub median: f64,
    /// The minimum.
    pub least: f64,
    /// The maximum.
    pub most: f64,
    /// All samples in the order in which they were measured.
    pub samples: Vec<f64>,
}

impl Samples {
    /// `None` if there are no samples.
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
