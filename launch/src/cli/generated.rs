//! Shell completions and manual pages, generated from a program's own command line.

use crate::cli::console::{print, tell};
use crate::model::app_error::AppError;
use clap::{Arg, Command, ValueEnum};
use clap_complete::Shell;
use clap_mangen::Man;
use std::ffi::OsString;

/// Serves `PROGRAM completions SHELL` and `PROGRAM man [COMMAND]`, and returns the exit status. Returns `None` for other
/// command lines. A model file with such a name can be given as ./completions or ./man.
pub fn serve(command: impl FnOnce() -> Command) -> Option<i32> {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let first = words.first()?.to_str()?;
    if first != "completions" && first != "man" {
        return None;
    }
    let mut command = command();
    let name = command.get_name().to_string();
    let text = generate(&mut command, first, &words[1..]);
    Some(match text.and_then(|text| print(&text)) {
        Ok(_) => 0,
        Err(error) => {
            tell(format_args!("{name}: error: {error}"));
            error.status
        }
    })
}

/// The requested text.
fn generate(command: &mut Command, what: &str, words: &[OsString]) -> Result<String, AppError> {
    let name = command.get_name().to_string();
    if words.len() > 1 {
        return Err(AppError::input(format!(
            "{what}: expected one word, such as `{name} {what} {}`",
            example(what)
        )));
    }
    let word = words.first().map(|word| word.to_string_lossy().into_owned());
    let mut text = Vec::new();
    if what == "completions" {
        let shells = || {
            let names: Vec<String> = Shell::value_variants().iter().map(Shell::to_string).collect();
            names.join(", ")
        };
        let shell = word.as_deref().and_then(|word| Shell::from_str(word, false).ok()).ok_or_else(|| {
            AppError::input(format!(
                "completions: name the shell, one of {}, such as `{name} completions bash`",
                shells()
            ))
        })?;
        // These two commands are not part of `command`, but should be completed too.
        let completions = Command::new("completions")
            .about("Print the completions of a shell")
            .arg(Arg::new("shell").required(true).value_parser(clap::value_parser!(Shell)));
        let man = Command::new("man").about("Print the manual page").arg(Arg::new("command"));
        let mut command = visible(command).subcommand(completions).subcommand(man);
        clap_complete::generate(shell, &mut command, name, &mut text);
    } else {
        command.build();
        let page = match &word {
            None => command.clone(),
            Some(word) => command.find_subcommand(word).cloned().ok_or_else(|| {
                let names: Vec<&str> =
                    command.get_subcommands().map(Command::get_name).filter(|&name| name != "help").collect();
                let known = if names.is_empty() { "none".to_string() } else { names.join(", ") };
                AppError::input(format!(
                    "man: no page for {word}; `{name} man` prints the program's own page, and there are: {known}"
                ))
            })?,
        };
        let page = page.disable_help_subcommand(true);
        Man::new(page).render(&mut text).map_err(|e| AppError::failed(format!("the manual page: {e}")))?;
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The command without its hidden options.
fn visible(command: &Command) -> Command {
    // clap needs a static name. The program ends soon, so the leak does not matter.
    let name: &'static str = Box::leak(command.get_name().to_string().into_boxed_str());
    let made = Command::new(name)
        .args(command.get_arguments().filter(|argument| !argument.is_hide_set()).cloned())
        .subcommands(command.get_subcommands().map(visible));
    match command.get_about() {
        Some(about) => made.about(about.clone()),
        None => made,
    }
}

fn example(what: &str) -> &'static str {
    if what == "completions" { "zsh" } else { "doctor" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Args;

    fn made(what: &str, words: &[&str]) -> Result<String, AppError> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        generate(&mut Args::with_commands(), what, &words)
    }

    #[test]
    fn completions_hold_options_and_commands() {
        for shell in Shell::value_variants() {
            let text = made("completions", &[&shell.to_string()]).unwrap();
            for word in ["prompt-tokens", "temperature", "doctor", "completions"] {
                assert!(text.contains(word), "{shell}: {word}");
            }
            assert!(!text.contains("debug-fault"), "{shell} shows what is hidden");
        }
    }

    #[test]
    fn the_manual_page_holds_groups_and_examples() {
        let text = made("man", &[]).unwrap();
        assert!(text.starts_with(".ie") || text.contains(".TH mpk-run 1"), "{text}");
        for word in ["max\\-new\\-tokens", "SAMPLING", "Examples:", "doctor"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert!(made("man", &["doctor"]).unwrap().contains("mpk\\-run\\-doctor"));
    }

    #[test]
    fn unknown_shells_and_pages_are_named() {
        let refused = |what, words: &[&str]| made(what, words).unwrap_err();
        for (error, part) in [
            (refused("completions", &[]), "one of bash, elvish, fish, powershell, zsh"),
            (refused("completions", &["tcsh"]), "one of bash"),
            (refused("man", &["nothing"]), "there are: doctor"),
            (refused("man", &["doctor", "x"]), "one word"),
        ] {
            assert!(error.status == 2 && error.message.contains(part), "{error}");
        }
    }
}
