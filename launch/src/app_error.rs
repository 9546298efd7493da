//! Errors of the whole program with their exit status, and how ranks agree on them.

use crate::console::tell;
use crate::error::InputError;
use distributed::World;

/// What ends the program.
#[derive(Debug, Clone)]
pub struct AppError {
    /// 2 bad input or usage, 3 the environment lacks something, 4 the run failed.
    pub status: i32,
    /// For the user: the place and the mend.
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

/// The exit status that all ranks agreed on; the message has been printed by one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit(pub i32);

/// Collective: goes on where every rank's step went well; otherwise the first rank that failed prints its error
/// and all get its status.
pub fn together<T>(world: &World, result: Result<T, AppError>) -> Result<T, Exit> {
    let status = result.as_ref().err().map_or(0, |e| e.status);
    match world.agree(status) {
        None => result.map_err(|e| Exit(e.status)),
        Some((rank, status)) => {
            if let Err(error) = &result
                && rank == world.rank()
            {
                tell(format_args!("mpk-run: error: {}", error.message));
            }
            Err(Exit(status))
        }
    }
}
