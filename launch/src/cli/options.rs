//! The library's messages name fields of its configuration. A reader of the command line knows them as options.

use std::borrow::Cow;

/// Fields whose option has the field's name.
const FIELDS: [&str; 3] = ["RunConfig::", "Overrides::", "SamplingOptions::"];
/// Values of options that take one of several.
const CHOICES: [(&str, &str); 3] =
    [("BackendChoice::", "--backend "), ("Placement::", "--placement "), ("Transport::", "--transport ")];
/// Fields whose option has another name. They are replaced first.
const OTHERS: [(&str, &str); 6] = [
    ("Request::tokens", "--prompt-tokens 1,2,3 or generate.prompt_tokens"),
    ("RunConfig::use_tuning_table = false", "--tuning off"),
    ("RunConfig::tuning", "--tune"),
    ("RunConfig::stall", "--debug-stall"),
    ("RunConfig::unprotected", "--debug-unprotected"),
    ("RunConfig::fault", "--debug-fault"),
];

/// `text` with options in place of fields, such as `--max-batch` for `Overrides::max_batch`.
pub fn in_options(text: &str) -> Cow<'_, str> {
    if !text.contains("::") {
        return text.into();
    }
    let mut text = text.to_string();
    for (field, option) in OTHERS {
        text = text.replace(field, option);
    }
    for owner in FIELDS {
        text = replaced(&text, owner, "--", |name| name.replace('_', "-"));
    }
    for (owner, option) in CHOICES {
        text = replaced(&text, owner, option, str::to_lowercase);
    }
    text.into()
}

/// `text` with `option` and `spelt(name)` in place of each `owner` and the name after it.
fn replaced(text: &str, owner: &str, option: &str, spelt: impl Fn(&str) -> String) -> String {
    let mut parts = text.split(owner);
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let end = part.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(part.len());
        out.push_str(option);
        out.push_str(&spelt(&part[..end]));
        out.push_str(&part[end..]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Args;
    use clap::CommandFactory;

    #[test]
    fn fields_become_options_that_exist() {
        for (text, expected) in [
            ("Overrides::max_batch: must be 1 to 1024, found 0", "--max-batch: must be 1 to 1024, found 0"),
            ("within 3 s (RunConfig::deadline 3)", "within 3 s (--deadline 3)"),
            ("SamplingOptions::top_p: 2, SamplingOptions::min_p: 3", "--top-p: 2, --min-p: 3"),
            ("or run with BackendChoice::Cpu", "or run with --backend cpu"),
            ("`RunConfig::use_tuning_table = false` ignores it", "`--tuning off` ignores it"),
            ("leave out Transport::P2p if", "leave out --transport p2p if"),
            ("use Placement::Static", "use --placement static"),
            ("RunConfig::stall 1:2: expected", "--debug-stall 1:2: expected"),
            ("launch::serve, std::RunConfig, --deadline", "launch::serve, std::RunConfig, --deadline"),
        ] {
            assert_eq!(in_options(text), expected);
            for word in expected.split([' ', ',', ':', '`', '(']).filter_map(|word| word.strip_prefix("--")) {
                let known = Args::command().get_arguments().any(|option| option.get_long() == Some(word));
                assert!(known, "--{word}");
            }
        }
        for (_, option) in CHOICES.into_iter().chain(OTHERS) {
            let name = option.trim_start_matches("--").split(' ').next();
            assert!(Args::command().get_arguments().any(|option| option.get_long() == name), "{option}");
        }
    }
}
