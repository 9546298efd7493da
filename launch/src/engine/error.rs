//! The engine's errors: each has a kind, a text and, if a fix is known, a help line.

use crate::model::app_error::AppError;
use std::fmt::{self, Display};

/// The kind of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The model, an option or a request is invalid.
    Input,
    /// The request asks for something that the engine does not support.
    Unsupported,
    /// The machine lacks something.
    Environment,
    /// The run failed: a lost rank, the deadline, the device.
    Failed,
    /// The queue is full. Try again later.
    Full,
    /// The engine accepts no more requests.
    Stopped,
}

/// An error of the engine.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    help: Option<String>,
    rank: Option<u32>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), help: None, rank: None }
    }

    pub(crate) fn with_help(self, help: impl Into<String>) -> Error {
        Error { help: Some(help.into()), ..self }
    }

    /// An error that another rank reported.
    pub(crate) fn at_rank(rank: u32, status: i32, message: String) -> Error {
        Error { kind: kind_of(status), message, help: None, rank: Some(rank) }
    }

    /// The kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What is wrong, without the help line.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// How to fix it, if known.
    pub fn help(&self) -> Option<&str> {
        self.help.as_deref()
    }

    /// The rank that reported it, if it was another one.
    pub fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// The exit status of a program that ends with this error: 2 bad input or usage, 3 the environment lacks something, 4
    /// the run failed.
    pub fn exit_status(&self) -> i32 {
        match self.kind {
            ErrorKind::Input | ErrorKind::Unsupported => 2,
            ErrorKind::Environment => 3,
            ErrorKind::Failed | ErrorKind::Full | ErrorKind::Stopped => 4,
        }
    }
}

fn kind_of(status: i32) -> ErrorKind {
    match status {
        2 => ErrorKind::Input,
        3 => ErrorKind::Environment,
        _ => ErrorKind::Failed,
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rank) = self.rank {
            write!(f, "rank {rank}: ")?;
        }
        f.write_str(&self.message)?;
        match &self.help {
            Some(help) => write!(f, "; {help}"),
            None => Ok(()),
        }
    }
}

/// As text: this is what a program prints whose `main` returns the error.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

impl From<Error> for AppError {
    fn from(error: Error) -> AppError {
        let status = error.exit_status();
        let place = error.rank.map(|rank| format!("rank {rank}: ")).unwrap_or_default();
        AppError { status, message: format!("{place}{}", error.message), help: error.help }
    }
}

impl From<AppError> for Error {
    fn from(error: AppError) -> Error {
        Error { kind: kind_of(error.status), message: error.message, help: error.help, rank: None }
    }
}

impl From<crate::model::error::InputError> for Error {
    fn from(error: crate::model::error::InputError) -> Error {
        AppError::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_returns_the_error_prints_its_text() {
        let error = Error::new(ErrorKind::Input, "no prompt").with_help("give one");
        assert_eq!(format!("{error:?}"), "no prompt; give one");
        let error = AppError::from(Error { rank: Some(2), ..error });
        assert_eq!(format!("{error:?}"), "rank 2: no prompt; give one");
    }
}
