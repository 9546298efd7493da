//! Errors with their exit status.

use crate::model::error::InputError;

/// What ends the program.
#[derive(Debug, Clone)]
pub struct AppError {
    /// 2 bad input or usage, 3 the environment lacks something, 4 the run failed.
    pub status: i32,
    /// For the user: the place and the fix.
    pub message: String,
}

impl AppError {
    /// Bad input or usage.
    pub fn input(message: impl Into<String>) -> Self {
        AppError { status: 2, message: message.into() }
    }
    /// The environment lacks something.
    pub fn environment(message: impl Into<String>) -> Self {
        AppError { status: 3, message: message.into() }
    }
    /// The run failed.
    pub fn failed(message: impl Into<String>) -> Self {
        AppError { status: 4, message: message.into() }
    }
}

impl From<InputError> for AppError {
    fn from(error: InputError) -> Self {
        AppError { status: error.exit_status(), message: error.to_string() }
    }
}

impl From<distributed::Error> for AppError {
    fn from(error: distributed::Error) -> Self {
        AppError { status: error.exit_status(), message: error.to_string() }
    }
}

impl From<taskgraph::builder::BuildError> for AppError {
    fn from(error: taskgraph::builder::BuildError) -> Self {
        AppError::input(error.to_string())
    }
}
