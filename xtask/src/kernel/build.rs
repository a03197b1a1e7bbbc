//! `cargo xtask kernel build`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::make::{is_object, lock_trees, make};
use super::series::Series;
use super::source::{self, Base};
use super::tree::Tree;
use super::{Arch, BuildArgs, Variant, config, selftests};
use crate::command::Run;
use crate::paths::{Paths, hex};
use crate::progress::Progress;
use crate::setup;

/// Changes when the way a kernel is built changes, so that everyone builds again.
const RECIPE: &str = "1";

/// Runs the verb.
pub(crate) fn run(args: &BuildArgs, paths: &Paths) -> Result<()> {
    ensure_from(args.variant, args.from_tree, paths)
}

/// Builds a kernel unless it is there and current.
pub(crate) fn ensure(variant: Variant, paths: &Paths) -> Result<()> {
    ensure_from(variant, false, paths)
}

fn ensure_from(variant: Variant, from_tree: bool, paths: &Paths) -> Result<()> {
    setup::require(&setup::kernel_tools(variant.arch))?;
    let source = source::ensure(paths)?;
    let _lock = lock_trees(paths)?;
    let series = if variant.stock {
        Series::default()
    } else {
        Series::read(paths)?
    };
    let tree = Tree::open(
        paths,
        &source,
        if variant.stock { "stock" } else { "patched" },
    )?;
    if from_tree {
        eprintln!("building {} as it is", tree.path().display());
    } else {
        tree.apply(&series)?;
    }

    let out = variant.out(paths);
    std::fs::create_dir_all(&out).with_context(|| format!("create {}", out.display()))?;
    let stamp = out.join("fingerprint");
    let fingerprint = fingerprint(variant, &series, &source.version, paths)?;
    let current = std::fs::read_to_string(&stamp).is_ok_and(|text| text == fingerprint);
    if current && !from_tree && complete(variant, paths) {
        return Ok(());
    }
    // From here on the results are not what the stamp says.
    remove(&stamp)?;
    let build = Build {
        variant,
        paths,
        tree: &tree,
        out: &out,
    };
    build.configure()?;
    build.kernel()?;
    build.install()?;
    selftests::build(variant, paths, &tree, &build.directory())?;
    source::describe(&source, &out.join("source"))?;
    if !from_tree {
        std::fs::write(&stamp, &fingerprint)
            .with_context(|| format!("write {}", stamp.display()))?;
    }
    Ok(())
}

/// Whether every result is there, for a checkout whose target directory lost some.
fn complete(variant: Variant, paths: &Paths) -> bool {
    let out = variant.out(paths);
    variant.image(paths).exists()
        && out.join("vmlinux").exists()
        && out.join("usr/include").exists()
}

/// Everything that the results depend on, as one digest.
fn fingerprint(variant: Variant, series: &Series, version: &str, paths: &Paths) -> Result<String> {
    let list = selftests::list_file(paths);
    let parts = [
        RECIPE.to_owned(),
        Base::read(paths)?.package().to_owned(),
        version.to_owned(),
        series.digest(),
        config::merged(&config::fragments(variant, paths))?,
        std::fs::read_to_string(&list).with_context(|| format!("read {}", list.display()))?,
        toolchain(variant.arch)?,
    ];
    Ok(digest(&parts))
}

/// The compiler and the linker.
pub(super) fn toolchain(arch: Arch) -> Result<String> {
    let prefix = arch.cross_compile();
    let gcc = Run::new(format!("{prefix}gcc"))
        .args(["-dumpfullversion", "-dumpmachine"])
        .text()?;
    let ld = Run::new(format!("{prefix}ld")).arg("--version").text()?;
    Ok(format!("{gcc}\n{ld}"))
}

/// One digest for several texts.
pub(super) fn digest(parts: &[String]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize())
}

fn remove(file: &Path) -> Result<()> {
    match std::fs::remove_file(file) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("remove {}", file.display())),
    }
}

/// Configures a build directory from the fragments, unless it has that configuration already.
pub(super) fn configure(
    variant: Variant,
    paths: &Paths,
    tree: &Path,
    output: &str,
    log: &Path,
) -> Result<()> {
    let directory = tree.join(output);
    std::fs::create_dir_all(&directory)
        .with_context(|| format!("create {}", directory.display()))?;
    let fragments = config::fragments(variant, paths);
    let merged = config::merged(&fragments)?;
    let (asked, config_file) = (directory.join("asked.config"), directory.join(".config"));
    let progress = Progress::spinner(&format!("configuring {}", variant.name()));
    let unchanged = std::fs::read_to_string(&asked).is_ok_and(|text| text == merged);
    let make = |target: &str| make(paths, variant.arch, tree, output).arg(target);
    if !(unchanged && config_file.exists()) {
        make("tinyconfig").logged(log, &progress)?;
        let tiny = std::fs::read_to_string(&config_file)
            .with_context(|| format!("read {}", config_file.display()))?;
        std::fs::write(&config_file, format!("{tiny}\n{merged}"))
            .with_context(|| format!("write {}", config_file.display()))?;
    }
    make("olddefconfig").logged(log, &progress)?;
    progress.done();
    config::check(&merged, &config_file)?;
    std::fs::write(&asked, &merged).with_context(|| format!("write {}", asked.display()))
}

struct Build<'a> {
    variant: Variant,
    paths: &'a Paths,
    tree: &'a Tree,
    out: &'a Path,
}

impl Build<'_> {
    fn output(&self) -> String {
        format!("build-{}", self.variant.name())
    }

    fn directory(&self) -> PathBuf {
        self.tree.path().join(self.output())
    }

    fn log(&self) -> PathBuf {
        self.out.join("build.log")
    }

    fn configure(&self) -> Result<()> {
        remove(&self.log())?;
        configure(
            self.variant,
            self.paths,
            self.tree.path(),
            &self.output(),
            &self.log(),
        )
    }

    fn kernel(&self) -> Result<()> {
        // How many objects the last build of this directory made, if it began from nothing.
        let count_file = self.directory().join("objects");
        let cold = !self.directory().join("vmlinux").exists();
        let expected = std::fs::read_to_string(&count_file)
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .filter(|_| cold);
        let what = format!("building the {} kernel", self.variant.name());
        let progress = Progress::start(&what, expected, is_object);
        let image = self.variant.arch.image_name();
        make(
            self.paths,
            self.variant.arch,
            self.tree.path(),
            &self.output(),
        )
        .args([image, "headers"])
        .logged(&self.log(), &progress)?;
        if cold {
            std::fs::write(&count_file, progress.objects().to_string())
                .with_context(|| format!("write {}", count_file.display()))?;
        }
        progress.done();
        Ok(())
    }

    /// Copies the results to `target/kernel`.
    fn install(&self) -> Result<()> {
        let directory = self.directory();
        let files = [
            (
                self.variant.arch.image_path(),
                self.variant.arch.image_name(),
            ),
            ("vmlinux", "vmlinux"),
            (".config", "config"),
        ];
        for (from, to) in files {
            let (from, to) = (directory.join(from), self.out.join(to));
            std::fs::copy(&from, &to)
                .with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
        }
        let headers = self.out.join("usr/include");
        std::fs::create_dir_all(&headers)
            .with_context(|| format!("create {}", headers.display()))?;
        Run::new("rsync")
            .args([
                "-a",
                "--delete",
                "--exclude=.*",
                "--include=*/",
                "--include=*.h",
                "--exclude=*",
            ])
            .arg(directory.join("usr/include/"))
            .arg(&headers)
            .output()?;
        Ok(())
    }
}
