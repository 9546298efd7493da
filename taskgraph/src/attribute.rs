//! Attributes that operators declare.

use crate::dtype::DType;
use crate::error::OpError;
use crate::op_graph::Attrs;
use serde_json::Value;
use std::fmt;

/// The values that an attribute accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttributeKind {
    /// Any number.
    Number,
    /// A whole number, 0 or more.
    Whole,
    /// `true` or `false`.
    Bool,
    /// The name of an element type.
    DType,
    /// One of these names.
    Name(&'static [&'static str]),
    /// Anything. The contract itself checks it.
    Any,
}

/// An attribute of an operator. Undeclared attributes are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribute {
    /// Its name.
    pub name: &'static str,
    /// The values that it accepts.
    pub kind: AttributeKind,
}

impl Attribute {
    /// An attribute of this name and kind.
    pub const fn new(name: &'static str, kind: AttributeKind) -> Self {
        Attribute { name, kind }
    }

    fn takes(&self, value: &Value) -> bool {
        match self.kind {
            AttributeKind::Number => value.is_number(),
            AttributeKind::Whole => value.is_u64(),
            AttributeKind::Bool => value.is_boolean(),
            AttributeKind::DType => serde_json::from_value::<DType>(value.clone()).is_ok(),
            AttributeKind::Name(names) => value.as_str().is_some_and(|v| names.contains(&v)),
            AttributeKind::Any => true,
        }
    }
}

impl fmt::Display for Attribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            AttributeKind::Number => write!(f, "`{}` (number)", self.name),
            AttributeKind::Whole => write!(f, "`{}` (whole number)", self.name),
            AttributeKind::Bool => write!(f, "`{}` (true or false)", self.name),
            AttributeKind::DType => write!(f, "`{}` (element type such as \"bf16\")", self.name),
            AttributeKind::Name(names) => write!(f, "`{}` ({})", self.name, names.join(", ")),
            AttributeKind::Any => write!(f, "`{}`", self.name),
        }
    }
}

/// Checks the attributes of an operator of type `op_type` against its declared ones.
///
/// # Errors
/// An attribute is not declared (the message lists those that are), or its value is of another kind.
pub fn check_attributes(op_type: &str, declared: &[Attribute], attrs: &Attrs) -> Result<(), OpError> {
    for (name, value) in attrs {
        let Some(attribute) = declared.iter().find(|a| a.name == name) else {
            let list: Vec<String> = declared.iter().map(Attribute::to_string).collect();
            let takes = match list.is_empty() {
                true => "takes no attributes".to_string(),
                false => format!("takes {}", list.join(", ")),
            };
            return Err(OpError(format!("unknown attribute `{name}`; `{op_type}` {takes}")));
        };
        if !attribute.takes(value) {
            return Err(OpError(format!("attribute {attribute} cannot be {value}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unknown_names_and_wrong_kinds_are_refused_with_the_list() {
        let declared = [
            Attribute::new("eps", AttributeKind::Number),
            Attribute::new("gate", AttributeKind::Name(&["silu", "gelu"])),
        ];
        let check = |value: Value| {
            let attrs = value.as_object().cloned().unwrap_or_default();
            check_attributes("norm", &declared, &attrs).map_err(|e| e.0)
        };
        assert_eq!(check(json!({"eps": 1e-5, "gate": "gelu"})), Ok(()));
        assert_eq!(
            check(json!({"epsilon": 0.5})).unwrap_err(),
            "unknown attribute `epsilon`; `norm` takes `eps` (number), `gate` (silu, gelu)"
        );
        assert_eq!(check(json!({"eps": "x"})).unwrap_err(), "attribute `eps` (number) cannot be \"x\"");
        assert!(check(json!({"gate": "relu"})).is_err());
        assert!(check_attributes("add", &[], &Attrs::new()).is_ok());
    }
}
