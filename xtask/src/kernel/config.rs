//! Kernel configuration: fragments in, and a check that the final `.config` has what they ask for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use fs_err as fs;

use super::Variant;
use crate::paths::Paths;

/// What a fragment says of an option: its value, or that it is off.
type Options = BTreeMap<String, Option<String>>;

/// The fragments of a kernel, in the order in which they are applied.
pub(crate) fn fragments(variant: Variant, paths: &Paths) -> Vec<PathBuf> {
    if variant.package {
        return vec![paths.in_root("kernel/config/package.config")];
    }
    let arch = variant.arch.name();
    let mut names = vec!["common".to_owned(), arch.to_owned()];
    if variant.debug {
        names.push("debug".to_owned());
    }
    if variant.upstream {
        names.push("upstream".to_owned());
        names.push(format!("upstream-{arch}"));
    }
    if variant.modules {
        names.push("modules".to_owned());
    }
    let file = |name: String| paths.in_root(&format!("kernel/config/{name}.config"));
    let files = names.into_iter().map(file);
    // An architecture may have nothing of its own.
    files.filter(|file| file.exists()).collect()
}

/// The fragments' text, one after the other.
pub(crate) fn merged(fragments: &[PathBuf]) -> Result<String> {
    let mut text = String::new();
    for file in fragments {
        text += &(fs::read_to_string(file)? + "\n");
    }
    Ok(text)
}

/// An error that lists every option that the fragments ask for and `config` lacks.
pub(crate) fn check(merged: &str, config: &Path) -> Result<()> {
    let missing = missing(&parse(merged)?, &parse(&fs::read_to_string(config)?)?);
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "{} lacks what kernel/config asks for (a dependency is missing, or the option is gone):\n{}",
        config.display(),
        missing.join("\n")
    )
}

/// Reads `CONFIG_X=value` and `# CONFIG_X is not set` lines; later lines win, as in kconfig.
fn parse(text: &str) -> Result<Options> {
    let mut options = Options::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let off = line
            .strip_prefix("# ")
            .and_then(|l| l.strip_suffix(" is not set"));
        if let Some(name) = off.filter(|name| name.starts_with("CONFIG_")) {
            options.insert(name.to_owned(), None);
        } else if line.starts_with('#') {
        } else if let Some((name, value)) = line.split_once('=') {
            let value = (value != "n").then(|| value.to_owned());
            options.insert(name.to_owned(), value);
        } else {
            bail!("{line:?} is neither CONFIG_X=value nor \"# CONFIG_X is not set\"");
        }
    }
    Ok(options)
}

fn missing(asked: &Options, found: &Options) -> Vec<String> {
    let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "not set".into());
    asked
        .iter()
        .filter_map(|(name, value)| {
            let found = found.get(name).unwrap_or(&None);
            (found != value)
                .then(|| format!("  {name}: asked for {}, got {}", shown(value), shown(found)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lacking(fragment: &str, config: &str) -> Vec<String> {
        missing(&parse(fragment).unwrap(), &parse(config).unwrap())
    }

    #[test]
    fn options_that_are_there_pass() {
        let fragment = "# why\nCONFIG_A=y\nCONFIG_B=64\n# CONFIG_C is not set\nCONFIG_D=n\n";
        assert!(lacking(fragment, "CONFIG_A=y\nCONFIG_B=64\n# CONFIG_D is not set\n").is_empty());
    }

    #[test]
    fn every_missing_option_is_listed() {
        let fragment = "CONFIG_A=y\nCONFIG_B=64\n# CONFIG_C is not set\n";
        let lacking = lacking(fragment, "# CONFIG_A is not set\nCONFIG_B=8\nCONFIG_C=y\n");
        assert_eq!(
            lacking,
            [
                "  CONFIG_A: asked for y, got not set",
                "  CONFIG_B: asked for 64, got 8",
                "  CONFIG_C: asked for not set, got y",
            ]
        );
    }

    #[test]
    fn a_later_fragment_wins() {
        assert!(lacking("CONFIG_A=y\n# CONFIG_A is not set\n", "").is_empty());
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(parse("CONFIG_A\n").is_err());
    }
}
