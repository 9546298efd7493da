//! The devices of the hardware table, as options name them.

use crate::model::app_error::AppError;
use taskgraph::target::{DEVICES, Device, device};

/// The row named `name`. `place` is where the name was given, for messages.
///
/// # Errors
/// The hardware table has no such row.
pub fn named(place: &str, name: &str) -> Result<&'static Device, AppError> {
    device(name).ok_or_else(|| {
        AppError::input(format!("{place}: unknown device `{name}`; the hardware table has {}", names()))
    })
}

/// The names of all rows: "a100, h100 and h200".
pub fn names() -> String {
    let names: Vec<&str> = DEVICES.iter().map(|row| row.name).collect();
    match &names[..] {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        names => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_device_is_refused_with_those_that_are_known() {
        assert_eq!(named("--device", "H200").unwrap().name, "h200");
        let message = named("--device", "abacus").unwrap_err().message;
        assert!(message.starts_with("--device: unknown device `abacus`"), "{message}");
        assert!(message.ends_with("a100, h100, h200 and b200"), "{message}");
    }
}
