//! Tuning values that come with the program. Each was measured on the machine and the shape that it is for. A table of
//! `mpk-bench tune` replaces all of them.

use crate::engine::place::Place;
use taskgraph::Tuning;

struct Measured {
    device: &'static str,
    shape: &'static str,
    ranks: u32,
    values: &'static [(&'static str, u64)],
}

const MEASURED: &[Measured] = &[
    // Its products are short, so copies that begin earlier are worth more than the memory bandwidth that they take from others: a step
    // takes 0.832 instead of 0.847 ms at batch 1, 0.996 instead of 1.013 ms at batch 8. Larger models lose 1 to 3 %.
    Measured {
        device: "h200",
        shape: "28 layers, hidden 1024, intermediate 3072, 16 + 8 heads of 128, vocabulary 151936, Bf16",
        ranks: 1,
        values: &[("ring.stages_ahead", 4), ("ring.stages_waiting", 1)],
    },
];

/// The values for `place`, if there are any.
pub fn values(place: &Place) -> Option<Tuning> {
    let found = MEASURED.iter().find(|measured| {
        (measured.device, measured.shape, measured.ranks) == (&place.device, &place.shape, place.ranks)
    })?;
    let mut tuning = Tuning::default();
    found.values.iter().for_each(|&(name, value)| tuning.set(name, value));
    Some(tuning)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tuning::knobs;
    use crate::model::families::parse_config;
    use crate::model::hf_config::WeightDtype;
    use crate::model::shapes;
    use taskgraph::Backend;

    #[test]
    fn each_is_for_a_named_shape_and_allowed_by_its_knob() {
        let names = shapes::NAMES.map(|name| {
            let config = shapes::config(name).unwrap();
            let config =
                parse_config(name, "", config.as_object().unwrap(), || Ok(WeightDtype::Bf16)).unwrap();
            Place::new(&config, Some("h200"), 132, 1).shape
        });
        for measured in MEASURED {
            assert!(names.iter().any(|name| name == measured.shape), "{}", measured.shape);
            let (device, shape) = (measured.device.to_string(), measured.shape.to_string());
            let found = values(&Place { device, shape, ranks: measured.ranks }).unwrap();
            assert!(!found.is_empty());
            found.check(knobs(Backend::Cuda)).unwrap();
        }
        assert_eq!(values(&Place { device: "h200".into(), shape: names[0].clone(), ranks: 2 }), None);
    }
}
