//! Errors in the input. Each names the place and, if known, the fix.

use crate::model::lack::fix;
use std::path::PathBuf;

/// Bad input, with its exit status; see [`InputError::exit_status`].
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// A file or folder that is missing or cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file that is not JSON.
    #[error("{file}:{line}:{column}: not valid JSON: {problem}")]
    Syntax {
        /// The file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What the parser expected.
        problem: String,
    },
    /// A value that a program gave in place of one of a file, or a field of a file, that is out of range.
    #[error("{place}: {problem}")]
    Option {
        /// The value or field.
        place: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// A field of a JSON file that is unknown, missing, of the wrong type or out of range.
    #[error("{file}: {}{problem}", if place == "." { String::new() } else { format!("`{place}`: ") })]
    Field {
        /// The file.
        file: String,
        /// The path to the field, such as `runtime.placement`; `.` for the whole file.
        place: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// Something that a Hugging Face configuration asks for but that is not implemented.
    #[error("{file}: `{place}`: {what} is not supported")]
    Unsupported {
        /// The file.
        file: String,
        /// The path to the field.
        place: String,
        /// The unsupported thing.
        what: String,
        /// What is supported.
        fix: String,
    },
    /// A checkpoint file that is missing, truncated or inconsistent.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
        /// What to do.
        fix: String,
    },
    /// A tensor that is missing, or whose shape or dtype does not fit config.json.
    #[error("{}: tensor `{tensor}`: {problem}", path.display())]
    Tensor {
        /// The file that holds, or should hold, the tensor.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// A tokenizer that cannot be loaded, or that fails on a text.
    #[error("{}: {problem}", path.display())]
    Tokenizer {
        /// tokenizer.json.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A chat template that cannot be read, or that refuses the messages.
    #[error("{}: {problem}", path.display())]
    ChatTemplate {
        /// The file that holds the template.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A prompt that cannot run.
    #[error("{place}: {problem}")]
    Prompt {
        /// Where the prompt was given, such as `generate.prompts[2]`.
        place: String,
        /// What is wrong.
        problem: String,
        /// What to do.
        fix: String,
    },
    /// Sizes whose product overflows its integer type.
    #[error("{file}: {what}: the number is too large: {computation}")]
    Overflow {
        /// The file that the sizes come from.
        file: String,
        /// What was computed.
        what: String,
        /// The factors by name and value.
        computation: String,
    },
}

impl InputError {
    /// The exit status of a program that ends with this error: 2 for bad input or usage, 3 if the system lacks what is
    /// needed to read the input.
    pub fn exit_status(&self) -> i32 {
        match self {
            Self::Unreadable { source, .. } if fix(source).is_some() => 3,
            _ => 2,
        }
    }

    /// How to fix it, if known. The message does not include it.
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Unreadable { source, .. } => fix(source).map(str::to_string),
            Self::Unsupported { fix, .. } | Self::Checkpoint { fix, .. } | Self::Prompt { fix, .. } => {
                Some(fix.clone())
            }
            Self::Overflow { .. } => Some("make one of them smaller".into()),
            _ => None,
        }
    }

    /// What is wrong and, if known, how to fix it, on one line.
    pub fn whole(&self) -> String {
        match self.help() {
            Some(help) => format!("{self}; {help}"),
            None => self.to_string(),
        }
    }

    pub(crate) fn unreadable(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Unreadable { path: path.into(), source }
    }

    pub(crate) fn chat_template(path: impl Into<PathBuf>, problem: String) -> Self {
        Self::ChatTemplate { path: path.into(), problem }
    }

    pub(crate) fn field(file: &str, place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Field { file: file.into(), place: place.into(), problem: problem.into() }
    }
}
