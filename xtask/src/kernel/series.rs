//! kernel/series and kernel/patches: which patches there are, in which order.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fs_err as fs;
use sha2::{Digest, Sha256};

use super::letters;
use crate::files::{self, hex};
use crate::paths::Paths;

/// The series as the checkout has it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Series {
    /// In the order in which they apply.
    pub(crate) patches: Vec<Patch>,
}

/// One patch of the series.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Patch {
    /// `NN-topic/NNNN-subject.patch`, below kernel/patches.
    pub(crate) name: String,
    pub(crate) content: Vec<u8>,
}

impl Series {
    /// Reads kernel/series and every patch that it names.
    pub(crate) fn read(paths: &Paths) -> Result<Self> {
        let file = paths.in_root("kernel/series");
        let names = parse(&files::text_if_any(&file)?);
        let dir = patches_dir(paths);
        let mut patches = Vec::new();
        for name in names.with_context(|| format!("in {}", file.display()))? {
            let content =
                fs::read(dir.join(&name)).with_context(|| format!("kernel/series names {name}"))?;
            patches.push(Patch { name, content });
        }
        Ok(Self { patches })
    }

    /// The topics, in their order.
    pub(crate) fn topics(&self) -> Vec<&str> {
        let mut topics: Vec<_> = self.patches.iter().map(Patch::topic).collect();
        topics.dedup();
        topics
    }

    /// A digest of everything in the patches that a build depends on: equal for two series that
    /// differ only in messages, names and documents.
    pub(crate) fn code_digest(&self) -> String {
        let mut hash = Sha256::new();
        for patch in &self.patches {
            for diff in patch.code() {
                hash.update(diff.len().to_le_bytes());
                hash.update(diff);
            }
        }
        hex(&hash.finalize())
    }
}

impl Patch {
    /// A digest of name and content.
    pub(crate) fn digest(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.name.len().to_le_bytes());
        hash.update(&self.name);
        hash.update(&self.content);
        hex(&hash.finalize())
    }

    /// The diffs of the files that a build reads, without the message and without documents.
    fn code(&self) -> Vec<String> {
        String::from_utf8_lossy(&self.content)
            .split("\ndiff --git ")
            .skip(1)
            .filter(|diff| !diff.starts_with("a/Documentation/"))
            .map(str::to_owned)
            .collect()
    }

    /// The diffs of what runs in a kernel: without documents, tools and their likes.
    pub(crate) fn running_code(&self) -> Vec<String> {
        const INERT: [&str; 3] = ["a/Documentation/", "a/tools/", "a/MAINTAINERS"];
        let mut diffs = self.code();
        diffs.retain(|diff| !INERT.iter().any(|start| diff.starts_with(start)));
        diffs
    }

    /// Whether it changes what runs in a kernel.
    pub(crate) fn is_functional(&self) -> bool {
        !self.running_code().is_empty()
    }

    /// `NN-topic`.
    pub(crate) fn topic(&self) -> &str {
        self.name.split_once('/').map_or("", |(topic, _)| topic)
    }

    /// The commit's subject, unfolded and without `[PATCH]`.
    pub(crate) fn subject(&self) -> String {
        subject(&String::from_utf8_lossy(&self.content))
    }
}

/// Where the patches are.
pub(crate) fn patches_dir(paths: &Paths) -> PathBuf {
    paths.in_root("kernel/patches")
}

/// The names in a series file. Each is `NN-topic/NNNN-subject.patch`.
fn parse(text: &str) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for line in files::lines(text) {
        if !well_formed(line) {
            bail!("{line:?} is not of the form NN-topic/NNNN-subject.patch");
        }
        if line.ends_with(&format!("/{}", letters::FILE)) {
            bail!("{line:?} is a cover letter, which is not applied");
        }
        if names.iter().any(|name| name == line) {
            bail!("{line:?} is named twice");
        }
        names.push(line.to_owned());
    }
    Ok(names)
}

fn well_formed(line: &str) -> bool {
    let Some((topic, file)) = line.split_once('/') else {
        return false;
    };
    let numbered = |text: &str, digits: usize| {
        text.split_once('-').is_some_and(|(number, rest)| {
            number.len() == digits && number.bytes().all(|b| b.is_ascii_digit()) && !rest.is_empty()
        })
    };
    numbered(topic, 2)
        && numbered(file, 4)
        && !file.contains('/')
        && Path::new(file).extension().is_some_and(|e| e == "patch")
}

/// The unfolded Subject header of a patch, without the leading `[PATCH]`.
fn subject(text: &str) -> String {
    let mut subject = String::new();
    for line in text.lines().take_while(|line| !line.is_empty()) {
        if let Some(start) = line.strip_prefix("Subject: ") {
            start.clone_into(&mut subject);
        } else if !subject.is_empty() {
            match line.strip_prefix(' ') {
                Some(rest) => subject = format!("{subject} {rest}"),
                None => break,
            }
        }
    }
    let tagged = subject.strip_prefix("[PATCH");
    match tagged.and_then(|rest| rest.split_once("] ")) {
        Some((_, rest)) => rest.to_owned(),
        None => subject,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_is_names_and_comments() {
        let text = "# topic\n01-a/0001-b.patch\n\n01-a/0002-c.patch\n";
        assert_eq!(
            parse(text).unwrap(),
            ["01-a/0001-b.patch", "01-a/0002-c.patch"]
        );
    }

    #[test]
    fn a_series_refuses_odd_names() {
        for bad in [
            "0001-b.patch",
            "1-a/0001-b.patch",
            "01-a/../0001-b.patch",
            "01-a/0001-b.diff",
            "01-a/0000-cover-letter.patch",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse("01-a/0001-b.patch\n01-a/0001-b.patch\n").is_err());
    }

    #[test]
    fn builds_depend_on_code_alone() {
        let series = |name: &str, message: &str, document: &str, code: &str| Series {
            patches: vec![Patch {
                name: name.to_owned(),
                content: format!(
                    "Subject: {message}\n\ndiff --git a/Documentation/a.rst b/Documentation/a.rst\n\
                     +{document}\ndiff --git a/mm/a.c b/mm/a.c\n+{code}\n"
                )
                .into_bytes(),
            }],
        };
        let digest = series("01-a/0001-b.patch", "b", "text", "code").code_digest();
        let reworded = series("01-a/0001-c.patch", "c", "other text", "code");
        assert_eq!(reworded.code_digest(), digest);
        let changed = series("01-a/0001-b.patch", "b", "text", "other code");
        assert_ne!(changed.code_digest(), digest);
    }

    #[test]
    fn subjects_are_unfolded() {
        let text =
            "From 0 Mon\nSubject: [PATCH 1/2] KVM: x86: Say\n where it hurts\nDate: x\n\nbody";
        assert_eq!(subject(text), "KVM: x86: Say where it hurts");
    }
}
