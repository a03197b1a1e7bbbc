//! Small static C programs of guest/, compiled once.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fs_err as fs;

use crate::command::Run;
use crate::files;

/// Compiles `source` into a static program in `dir`, unless that was done before. `headers` are the
/// files of ours that it includes.
pub(crate) fn static_program(
    compiler: &str,
    source: &Path,
    headers: &[PathBuf],
    dir: &Path,
) -> Result<PathBuf> {
    let mut parts = vec![compiler.as_bytes().to_vec()];
    for file in std::iter::once(source).chain(headers.iter().map(PathBuf::as_path)) {
        parts.push(fs::read(file)?);
    }
    let digest = files::digest(parts);
    let stem = source.file_stem().context("a source without a name")?;
    fs::create_dir_all(dir)?;
    let program = dir.join(format!("{}-{}", stem.to_string_lossy(), &digest[..12]));
    if !program.exists() {
        files::replace(&program, |new| {
            let compile = Run::new(compiler).words("-static -pthread -O2 -Wall -Wextra -Werror -o");
            compile.arg(new).arg(source).output().map(drop)
        })?;
    }
    Ok(program)
}
