//! Errors with their exit status.

use crate::model::error::InputError;
use kernels_cu::gpu::GpuError;
use std::fmt::{self, Display};

/// An error that ends the program.
#[derive(Clone)]
pub struct AppError {
    /// 2 bad input or usage, 3 the environment lacks something, 4 the run failed.
    pub status: i32,
    /// For the user: where the error is and what is wrong.
    pub message: String,
    /// How to fix it, if known.
    pub help: Option<String>,
}

impl AppError {
    /// Bad input or usage.
    pub fn input(message: impl Into<String>) -> Self {
        AppError { status: 2, message: message.into(), help: None }
    }
    /// The environment lacks something.
    pub fn environment(message: impl Into<String>) -> Self {
        AppError { status: 3, message: message.into(), help: None }
    }
    /// The run failed.
    pub fn failed(message: impl Into<String>) -> Self {
        AppError { status: 4, message: message.into(), help: None }
    }

    /// Adds how to fix it.
    #[must_use]
    pub fn with_help(self, help: impl Into<String>) -> Self {
        AppError { help: Some(help.into()), ..self }
    }
}

impl Display for AppError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.help {
            Some(help) => write!(f, "; {help}"),
            None => Ok(()),
        }
    }
}

/// As text: this is what a program prints whose `main` returns the error.
impl fmt::Debug for AppError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl std::error::Error for AppError {}

impl From<InputError> for AppError {
    fn from(error: InputError) -> Self {
        AppError { status: error.exit_status(), message: error.to_string(), help: error.help() }
    }
}

impl From<distributed::Error> for AppError {
    fn from(error: distributed::Error) -> Self {
        AppError { status: error.exit_status(), message: error.to_string(), help: error.help() }
    }
}

impl From<&GpuError> for AppError {
    fn from(error: &GpuError) -> Self {
        let status = error.exit_status().into();
        AppError { status, message: error.to_string(), help: error.help() }
    }
}

impl From<GpuError> for AppError {
    fn from(error: GpuError) -> Self {
        AppError::from(&error)
    }
}

impl From<taskgraph::builder::BuildError> for AppError {
    fn from(error: taskgraph::builder::BuildError) -> Self {
        AppError::input(error.to_string())
    }
}
