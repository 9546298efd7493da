//! The command-line programs: options, console, output, and what each program does from arguments to exit status.

pub mod args;
pub mod bench;
pub mod build_only;
pub mod choices;
pub mod console;
pub mod conversation;
pub mod devices;
pub mod doctor;
pub mod generated;
pub mod logging;
pub mod options;
pub mod output;
pub mod passes;
pub mod process_limits;
pub mod program;
pub mod run;
pub mod runtime_args;
pub mod sampling_args;
pub mod serve;
pub mod serve_args;
pub mod simulate;
pub mod tool;
pub mod typed;
