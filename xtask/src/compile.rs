//! Small static C programs of guest/, compiled once.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::command::Run;
use crate::paths::{hex, unique};

/// Compiles `source` into a static program in `dir`, unless that was done before. `headers` are the
/// files of ours that it includes.
pub(crate) fn static_program(
    compiler: &str,
    source: &Path,
    headers: &[PathBuf],
    dir: &Path,
) -> Result<PathBuf> {
    let mut digest = Sha256::new();
    digest.update(compiler);
    for file in std::iter::once(source).chain(headers.iter().map(PathBuf::as_path)) {
        let text = std::fs::read(file).with_context(|| format!("read {}", file.display()))?;
        digest.update(text);
    }
    let digest = hex(&digest.finalize());
    let stem = source.file_stem().context("a source without a name")?;
    std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    let program = dir.join(format!("{}-{}", stem.to_string_lossy(), &digest[..12]));
    if program.exists() {
        return Ok(program);
    }
    // Two may do this at the same time: each writes a file of its own, the name comes last.
    let temporary = program.with_extension(unique());
    Run::new(compiler)
        .args([
            "-static", "-pthread", "-O2", "-Wall", "-Wextra", "-Werror", "-o",
        ])
        .arg(&temporary)
        .arg(source)
        .output()?;
    std::fs::rename(&temporary, &program)
        .with_context(|| format!("create {}", program.display()))?;
    Ok(program)
}
