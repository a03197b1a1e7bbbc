//! What the definition of the command line generates: `pagetide completions` and `pagetide man`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::args::{Arguments, CompletionsArguments, ManArguments};
use crate::failure::Failure;
use crate::print;

pub(crate) const EXAMPLES: &str = "\
Examples:
  For bash, in this shell and in every later one:
    source <(pagetide completions bash)
    pagetide completions bash > ~/.local/share/bash-completion/completions/pagetide

  For zsh, where ~/.zfunc is a directory of fpath, and for fish:
    pagetide completions zsh > ~/.zfunc/_pagetide
    pagetide completions fish > ~/.config/fish/completions/pagetide.fish";

/// The name of the program.
const NAME: &str = "pagetide";

/// Prints the completion script.
pub(crate) fn completions(arguments: &CompletionsArguments) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(
        arguments.shell,
        &mut Arguments::command(),
        NAME,
        &mut script,
    );
    print(&String::from_utf8(script).map_err(Failure::failed)?)
}

/// A manual page that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
struct Unwritten {
    path: PathBuf,
    source: io::Error,
}

/// Writes a manual page for the command and for each of its verbs.
pub(crate) fn manual(arguments: &ManArguments) -> Result<(), Failure> {
    let directory = &arguments.directory;
    let failed = |path: &Path, source| {
        let path = path.to_owned();
        Failure::failed(Unwritten { path, source })
    };
    fs::create_dir_all(directory).map_err(|error| failed(directory, error))?;
    for page in pages() {
        let path = directory.join(&page.file);
        fs::write(&path, &page.text).map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

/// A manual page.
struct Page {
    /// Its file name.
    file: String,
    /// Its source, for groff's macro package `man`.
    text: Vec<u8>,
}

/// The pages of the command and, recursively, of its verbs.
fn pages() -> Vec<Page> {
    let mut command = Arguments::command().disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    add_pages(&command, None, &mut pages);
    pages
}

fn add_pages(command: &Command, parent: Option<&Command>, pages: &mut Vec<Page>) {
    pages.push(page(command, parent));
    for verb in verbs(command) {
        add_pages(verb, Some(command), pages);
    }
}

/// The verbs that `--help` lists.
fn verbs(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|verb| !verb.is_hide_set())
}

/// The name of a command's page: its words, joined by hyphens.
fn title(command: &Command) -> &str {
    command
        .get_display_name()
        .unwrap_or_else(|| command.get_name())
}

fn page(command: &Command, parent: Option<&Command>) -> Page {
    let words = command
        .clone()
        .subcommand_value_name("COMMAND")
        .subcommand_help_heading("COMMANDS");
    let man = Man::new(words)
        .source(concat!("Pagetide ", env!("CARGO_PKG_VERSION")))
        .manual("Pagetide");
    let mut text = Vec::new();
    // A vector takes all that is written to it.
    let _ = man.render_title(&mut text);
    let _ = man.render_name_section(&mut text);
    let _ = man.render_synopsis_section(&mut text);
    let _ = man.render_description_section(&mut text);
    let _ = man.render_options_section(&mut text);
    if verbs(command).next().is_some() {
        let _ = man.render_subcommands_section(&mut text);
    }
    let mut roff = Roff::new();
    if let Some(help) = command.get_after_long_help() {
        render_after_help(&mut roff, &help.to_string());
    }
    render_see_also(&mut roff, command, parent);
    let _ = roff.to_writer(&mut text);
    Page {
        file: man.get_filename(),
        text,
    }
}

/// How a paragraph that follows the options in `--help` begins, and the section of a page that it is.
const SECTIONS: [(&str, &str); 2] = [("Examples", "EXAMPLES"), ("Exit status", "EXIT STATUS")];

/// Renders what follows the options in `--help`: sections, in which indented lines stay as they are.
fn render_after_help(roff: &mut Roff, help: &str) {
    for paragraph in help.split("\n\n") {
        let section = SECTIONS
            .iter()
            .find_map(|&(words, name)| Some((paragraph.strip_prefix(words)?, name)));
        let text = match section {
            Some((rest, name)) => {
                roff.control("SH", [name]);
                let rest = rest.trim_start_matches([':', ',']);
                rest.strip_prefix(['\n', ' ']).unwrap_or(rest)
            }
            None if paragraph.starts_with(' ') => {
                roff.control("PP", []);
                paragraph
            }
            None => {
                roff.control("SH", ["NOTES"]);
                paragraph
            }
        };
        let mut literal = false;
        for line in text.lines() {
            if line.starts_with(' ') != literal {
                literal = !literal;
                roff.control(if literal { "nf" } else { "fi" }, []);
            }
            roff.text([roman(line)]);
        }
        if literal {
            roff.control("fi", []);
        }
    }
}

/// Renders the names of the pages above and below.
fn render_see_also(roff: &mut Roff, command: &Command, parent: Option<&Command>) {
    let names: Vec<_> = parent.into_iter().chain(verbs(command)).collect();
    if names.is_empty() {
        return;
    }
    roff.control("SH", ["SEE ALSO"]);
    let mut words = Vec::new();
    for (number, name) in names.into_iter().enumerate() {
        if number > 0 {
            words.push(roman(", "));
        }
        words.extend([bold(title(name)), roman("(1)")]);
    }
    roff.text(words);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(help: &str) -> String {
        let mut roff = Roff::new();
        render_after_help(&mut roff, help);
        roff.to_roff()
    }

    #[test]
    fn paragraphs_after_the_options_become_sections() {
        let text =
            rendered("Examples:\n  First:\n    do this\n\n  Then:\n    that\n\nExit status: 0");
        let wanted = ".SH EXAMPLES\n.nf\n  First:\n    do this\n.fi\n.PP\n.nf\n  Then:\n    that\n\
                      .fi\n.SH \"EXIT STATUS\"\n0\n";
        assert!(text.ends_with(wanted), "{text}");
    }

    /// clap wraps a line at the terminal's width, and leaves a line break where it is: a paragraph with line breaks of
    /// its own is ragged in every terminal that is narrower.
    #[test]
    fn paragraphs_after_the_options_have_no_line_breaks_of_their_own() {
        fn look(command: &Command) {
            let help = command.get_after_long_help().map(ToString::to_string);
            let help = help.unwrap_or_default();
            let lines: Vec<&str> = help.lines().collect();
            let is_text = |line: &str| !line.is_empty() && !line.starts_with(' ');
            for pair in lines.windows(2) {
                assert!(!pair.iter().all(|line| is_text(line)), "{pair:?}");
            }
            command.get_subcommands().for_each(look);
        }
        look(&Arguments::command());
    }

    /// Of what this program was built with.
    #[test]
    fn the_tour_has_every_verb() {
        // Options may stand between a verb's words.
        fn calls(line: &str, verb: &[&str]) -> bool {
            let mut words = line.split_whitespace();
            verb.iter().all(|wanted| words.any(|word| word == *wanted))
        }
        fn look<'a>(command: &'a Command, before: &[&'a str], tour: &str) {
            let name = [before, &[command.get_name()]].concat();
            let mut below = verbs(command).peekable();
            if below.peek().is_none() {
                assert!(tour.lines().any(|line| calls(line, &name)), "{name:?}");
            }
            below.for_each(|verb| look(verb, &name, tour));
        }
        let place = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/tour.md");
        let tour = fs::read_to_string(place).unwrap();
        let lines = tour.lines().filter(|line| line.starts_with("pagetide "));
        look(
            &Arguments::command(),
            &[],
            &lines.collect::<Vec<_>>().join("\n"),
        );
    }

    #[test]
    fn a_paragraph_without_a_heading_is_a_note() {
        let text = rendered("Examples, after something:\n  do\n\nEnds when it ends.");
        assert!(
            text.contains(".SH EXAMPLES\nafter something:\n.nf\n  do\n.fi\n"),
            "{text}"
        );
        assert!(text.ends_with(".SH NOTES\nEnds when it ends.\n"), "{text}");
    }

    #[test]
    fn no_page_mentions_hidden_verbs() {
        let pages = pages();
        assert!(pages.iter().all(|page| page.file != "pagetide-man.1"));
        let top = String::from_utf8_lossy(&pages[0].text).replace('\\', "");
        assert!(top.contains("pagetide-bench(1)"), "{top}");
        assert!(!top.contains("pagetide-man"), "{top}");
    }
}
