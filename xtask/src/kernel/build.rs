//! `cargo xtask kernel build`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use fs_err as fs;

use super::make::{is_object, lock_tree, make};
use super::series::Series;
use super::source::{self, Base, Source};
use super::tree::Tree;
use super::{Arch, BuildArgs, Variant, config, package, selftests};
use crate::command::Run;
use crate::files;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::setup;

/// Changes when the way a kernel is built changes, so that everyone builds again.
const RECIPE: &str = "3";

/// What the stamp says of a kernel that `--from-tree` built.
const FROM_TREE: &str = "from-tree";

/// Runs the verb.
pub(crate) fn run(args: &BuildArgs, paths: &Paths) -> Result<()> {
    setup::require(&setup::kernel_tools(args.variant.arch))?;
    build(args.variant, args.from_tree, paths)
}

/// Builds the series' kernel unless it is there and current.
pub(crate) fn ensure(variant: Variant, paths: &Paths) -> Result<()> {
    setup::require(&setup::kernel_tools(variant.arch))?;
    // Without a look at the work tree, so that nobody waits for another build.
    if is_current(variant, paths)? {
        Ok(())
    } else {
        build(variant, false, paths)
    }
}

/// Like [`ensure`], but while a developer is at work in the tree, the kernel that was built from it
/// as it was is good enough.
pub(crate) fn ensure_any(variant: Variant, paths: &Paths) -> Result<()> {
    let stamp = fs::read_to_string(stamp(variant, paths)).unwrap_or_default();
    if stamp == FROM_TREE && is_complete(variant, paths) {
        let tree = Tree::open(paths, &source::ensure(paths)?, "patched")?;
        if tree.refuse_unexported().is_err() {
            eprintln!("the kernel is the one that `kernel build --from-tree` built last");
            return Ok(());
        }
    }
    ensure(variant, paths)
}

fn build(variant: Variant, from_tree: bool, paths: &Paths) -> Result<()> {
    if variant.has_modules() && variant.arch != Arch::X86_64 {
        bail!("KVM cannot be a module on {}", variant.arch.name());
    }
    if variant.package {
        setup::ensure(&setup::kernel_package_tools())?;
    }
    let source = source::ensure(paths)?;
    let name = if variant.stock { "stock" } else { "patched" };
    let _lock = lock_tree(paths, name)?;
    let series = series(variant, paths)?;
    let tree = Tree::open(paths, &source, name)?;
    if from_tree {
        eprintln!("building {} as it is", tree.path().display());
    } else {
        tree.apply(&series)?;
        if is_current(variant, paths)? {
            return Ok(());
        }
    }

    let out = variant.out(paths);
    fs::create_dir_all(&out)?;
    let fingerprint = fingerprint(variant, &series, &source, paths)?;
    let stamp = stamp(variant, paths);
    // From here on the results are not what the stamp says.
    files::remove(&stamp)?;
    let build = Build {
        variant,
        paths,
        source: &source,
        tree: &tree,
        out: &out,
    };
    build.configure()?;
    build.kernel()?;
    build.install()?;
    selftests::build(variant, paths, &tree, &build.directory())?;
    source::describe(&source, &out.join("source"))?;
    Ok(fs::write(
        &stamp,
        if from_tree { FROM_TREE } else { &fingerprint },
    )?)
}

/// What is applied to the source.
fn series(variant: Variant, paths: &Paths) -> Result<Series> {
    if variant.stock {
        Ok(Series::default())
    } else {
        Series::read(paths)
    }
}

/// The file that says what the results were made from.
fn stamp(variant: Variant, paths: &Paths) -> PathBuf {
    variant.out(paths).join("fingerprint")
}

/// Whether the results are there and made from what is in the checkout now.
fn is_current(variant: Variant, paths: &Paths) -> Result<bool> {
    let found = files::text_if_any(&stamp(variant, paths))?;
    if found.is_empty() || !is_complete(variant, paths) {
        return Ok(false);
    }
    let (series, source) = (series(variant, paths)?, source::ensure(paths)?);
    Ok(found == fingerprint(variant, &series, &source, paths)?)
}

/// Whether every result is there, for a checkout whose target directory lost some.
fn is_complete(variant: Variant, paths: &Paths) -> bool {
    let out = variant.out(paths);
    variant.image(paths).exists()
        && out.join("vmlinux").exists()
        && out.join("usr/include").exists()
        && selftests::directory(variant, paths).exists()
        && (!variant.has_modules() || variant.module_directory(paths).exists())
        && (!variant.package || package::is_there(paths))
}

/// An error if the last build of a kernel and its selftests told of warnings.
pub(crate) fn no_warnings(variant: Variant, paths: &Paths) -> Result<()> {
    super::make::no_warnings(&log(variant, paths), 0)
}

/// What make printed in the last build.
pub(super) fn log(variant: Variant, paths: &Paths) -> PathBuf {
    variant.out(paths).join("build.log")
}

/// Everything that the results depend on, as one digest.
fn fingerprint(
    variant: Variant,
    series: &Series,
    source: &Source,
    paths: &Paths,
) -> Result<String> {
    let parts = [
        RECIPE.to_owned(),
        source.tree.clone(),
        series.code_digest(),
        whole_configuration(variant, source, paths)?,
        selftests::list_text(paths)?,
        toolchain(variant.arch)?,
    ];
    Ok(files::digest(parts))
}

/// What the fragments change.
fn under_fragments(variant: Variant, source: &Source, paths: &Paths) -> Result<Option<String>> {
    let debians = || package::configuration(paths, &Base::read(paths)?, source);
    variant.package.then(debians).transpose()
}

fn whole_configuration(variant: Variant, source: &Source, paths: &Paths) -> Result<String> {
    let under = under_fragments(variant, source, paths)?;
    let merged = config::merged(&config::fragments(variant, paths))?;
    Ok(under.unwrap_or_default() + &merged)
}

/// The compiler and the linker.
pub(super) fn toolchain(arch: Arch) -> Result<String> {
    let tool = |name: &str| Run::new(format!("{}{name}", arch.cross_compile()));
    let gcc = tool("gcc").words("-dumpfullversion -dumpmachine").text()?;
    Ok(format!("{gcc}\n{}", tool("ld").arg("--version").text()?))
}

/// Configures a build directory from the fragments, unless it has that configuration already.
pub(super) fn configure(
    variant: Variant,
    paths: &Paths,
    tree: &Path,
    output: &str,
    log: &Path,
) -> Result<()> {
    configure_over(None, variant, paths, (tree, output), log)
}

/// The same, on top of a configuration, or else of the smallest.
fn configure_over(
    under: Option<String>,
    variant: Variant,
    paths: &Paths,
    (tree, output): (&Path, &str),
    log: &Path,
) -> Result<()> {
    let directory = tree.join(output);
    fs::create_dir_all(&directory)?;
    let merged = config::merged(&config::fragments(variant, paths))?;
    let wanted = format!("{}{merged}", under.as_deref().unwrap_or_default());
    let (asked, config_file) = (directory.join("asked.config"), directory.join(".config"));
    let progress = Progress::spinner(&format!("configuring {}", variant.name()));
    let unchanged = fs::read_to_string(&asked).is_ok_and(|text| text == wanted);
    let make = |target: &str| make(paths, variant.arch, tree, output).arg(target);
    if !(unchanged && config_file.exists()) {
        let under = match under {
            Some(under) => under,
            None => {
                make("tinyconfig").logged(log, &progress)?;
                fs::read_to_string(&config_file)?
            }
        };
        fs::write(&config_file, format!("{under}\n{merged}"))?;
    }
    make("olddefconfig").logged(log, &progress)?;
    progress.done();
    config::check(&merged, &config_file)?;
    Ok(fs::write(&asked, &wanted)?)
}

struct Build<'a> {
    variant: Variant,
    paths: &'a Paths,
    source: &'a Source,
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

    fn configure(&self) -> Result<()> {
        let (output, log) = (self.output(), log(self.variant, self.paths));
        files::remove(&log)?;
        let under = under_fragments(self.variant, self.source, self.paths)?;
        let place = (self.tree.path(), output.as_str());
        configure_over(under, self.variant, self.paths, place, &log)
    }

    fn kernel(&self) -> Result<()> {
        // How many objects the last build of this directory made, if it began from nothing.
        let count_file = self.directory().join("objects");
        let cold = !self.directory().join("vmlinux").exists();
        let count = fs::read_to_string(&count_file).ok().filter(|_| cold);
        let expected = count.and_then(|text| text.trim().parse().ok());
        let what = format!("building the {} kernel", self.variant.name());
        let progress = Progress::start(&what, expected, is_object);
        let (arch, tree) = (self.variant.arch, self.tree.path());
        let (output, log) = (self.output(), log(self.variant, self.paths));
        match self.variant.package {
            true => package::build(self.paths, self.source, (tree, &output), &log, &progress)?,
            false => make(self.paths, arch, tree, &output)
                .args([arch.image_name(), "headers"])
                .args(self.variant.modules.then_some("modules"))
                .logged(&log, &progress)?,
        }
        if cold {
            fs::write(&count_file, progress.objects().to_string())?;
        }
        progress.done();
        Ok(())
    }

    /// Copies the results to `target/kernel`. Tests that run meanwhile find a whole file, old or new.
    fn install(&self) -> Result<()> {
        let (directory, arch) = (self.directory(), self.variant.arch);
        let image = match self.variant.package {
            true => self.install_package()?,
            false => arch.image_path().into(),
        };
        for (from, to) in [
            (image, arch.image_name()),
            ("vmlinux".into(), "vmlinux"),
            (".config".into(), "config"),
        ] {
            let copy = |new: &Path| Ok(fs::copy(directory.join(&from), new).map(drop)?);
            files::replace(&self.out.join(to), copy)?;
        }
        if self.variant.modules {
            self.install_modules()?;
        }
        let headers = self.out.join("usr/include");
        fs::create_dir_all(&headers)?;
        let copy = Run::new("rsync")
            .words("-a --delete --exclude=.* --include=*/ --include=*.h --exclude=*");
        let copy = copy.arg(directory.join("usr/include/")).arg(&headers);
        copy.output().map(drop)
    }

    /// Takes the packages, and returns the image that they have.
    fn install_package(&self) -> Result<PathBuf> {
        let modules = self.variant.module_directory(self.paths);
        package::install(self.paths, self.tree.path(), &modules)?;
        package::image(&modules)
    }

    /// Puts the modules where modprobe finds them, with their dependencies.
    fn install_modules(&self) -> Result<()> {
        let into = self.variant.module_directory(self.paths);
        files::fresh_dir(&into)?;
        let progress = Progress::spinner("installing the modules");
        make(
            self.paths,
            self.variant.arch,
            self.tree.path(),
            &self.output(),
        )
        .arg(format!("INSTALL_MOD_PATH={}", into.display()))
        .arg("modules_install")
        .logged(&log(self.variant, self.paths), &progress)?;
        progress.done();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_its_selftests_is_not_complete() {
        let top = tempfile::tempdir().unwrap();
        let (paths, variant) = (Paths::at(top.path()), Variant::patched(Arch::X86_64));
        let out = variant.out(&paths);
        for directory in ["usr/include", "selftests"] {
            std::fs::create_dir_all(out.join(directory)).unwrap();
        }
        for file in ["bzImage", "vmlinux"] {
            std::fs::write(out.join(file), "").unwrap();
        }
        assert!(is_complete(variant, &paths));
        std::fs::remove_dir(out.join("selftests")).unwrap();
        assert!(!is_complete(variant, &paths));
    }
}
