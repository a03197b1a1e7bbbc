//! `cargo xtask kernel`: the patched kernel, from Debian's source package to an image.

mod ahead;
pub(crate) mod build;
pub(crate) mod check;
pub(crate) mod config;
pub(crate) mod distribution;
pub(crate) mod export;
mod git;
mod letters;
pub(crate) mod lock;
pub(crate) mod make;
mod mutate;
pub(crate) mod package;
mod prune;
pub(crate) mod selftests;
pub(crate) mod series;
pub(crate) mod source;
pub(crate) mod tree;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};

use crate::paths::Paths;

/// What to do with the kernel.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Fetch the source, apply the series, build; does nothing when nothing changed
    Build(BuildArgs),
    /// Write the work tree's commits back to kernel/patches and kernel/series, and the lists of patches and
    /// files in the topics' cover letters
    Export,
    /// Check that each patch applies, builds alone, passes checkpatch and survives a round trip, and that
    /// each topic has a cover letter that names its patches
    Check(check::CheckArgs),
    /// Undo parts of the series, one by one, and show that a test fails each time
    ///
    /// kernel/mutations.list names the parts and their tests. Results are written to kernel/mutations.json and
    /// kernel/README.md. A mutation takes a build and a VM, one to three minutes; all of them take hours.
    Mutate(mutate::MutateArgs),
    /// Build Debian packages of the series' kernel, for hosts: Debian's configuration for clouds, with the usual drivers
    /// of bare metal (between one and two hours on two processors)
    Package,
    /// Print the work tree in which the series can be edited (made if it is not there yet)
    Path,
}

/// Which kernel to build.
#[derive(Debug, Clone, Args)]
pub(crate) struct BuildArgs {
    #[command(flatten)]
    pub(crate) variant: Variant,
    /// Build the work tree as it is, with commits and edits that the series does not have
    #[arg(long, conflicts_with = "stock")]
    pub(crate) from_tree: bool,
}

/// One of the kernels that the lab knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Args)]
pub(crate) struct Variant {
    /// The architecture
    #[arg(long, value_enum, default_value_t = Arch::X86_64)]
    pub(crate) arch: Arch,
    /// Debian's source without our patches
    #[arg(long)]
    pub(crate) stock: bool,
    /// With lockdep, KASAN and the other checks of kernel/config/debug.config (slow)
    #[arg(long)]
    pub(crate) debug: bool,
    /// With what the kernel's own tests, and tests of NUMA nodes and swap need (kernel/config/upstream.config)
    #[arg(long)]
    pub(crate) upstream: bool,
    /// With KVM as modules, as distributions have it (kernel/config/modules.config, x86_64 only)
    #[arg(long)]
    pub(crate) modules: bool,
    /// As `cargo xtask kernel package` packs it (kernel/config/package.config, x86_64 only)
    #[arg(long, conflicts_with_all = ["stock", "debug", "upstream", "modules"])]
    pub(crate) package: bool,
}

impl Variant {
    /// The patched kernel without debug checks.
    pub(crate) fn patched(arch: Arch) -> Self {
        Self {
            arch,
            stock: false,
            debug: false,
            upstream: false,
            modules: false,
            package: false,
        }
    }

    /// Its name under `target/kernel` and in messages.
    pub(crate) fn name(self) -> String {
        let stock = if self.stock { "-stock" } else { "" };
        let debug = if self.debug { "-debug" } else { "" };
        let upstream = if self.upstream { "-upstream" } else { "" };
        let modules = if self.modules { "-modules" } else { "" };
        let package = if self.package { "-package" } else { "" };
        let arch = self.arch.name();
        format!("{arch}{stock}{debug}{upstream}{modules}{package}")
    }

    /// Whether its KVM has to be loaded.
    pub(crate) fn has_modules(self) -> bool {
        self.modules || self.package
    }

    /// Where its image, headers and selftests are put.
    pub(crate) fn out(self, paths: &Paths) -> PathBuf {
        paths.target().join("kernel").join(self.name())
    }

    /// Where its modules are put, as modprobe's `--dirname` takes it.
    pub(crate) fn module_directory(self, paths: &Paths) -> PathBuf {
        self.out(paths).join("modules")
    }

    /// The bootable image, once built.
    pub(crate) fn image(self, paths: &Paths) -> PathBuf {
        self.out(paths).join(self.arch.image_name())
    }
}

/// An architecture that the series supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    /// 64-bit x86, run on AMD's virtualisation extensions
    #[value(name = "x86_64")]
    X86_64,
    /// 64-bit ARM, cross-compiled
    #[value(name = "arm64")]
    Arm64,
}

impl Arch {
    /// The name that kbuild and our directories use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Arm64 => "arm64",
        }
    }

    /// The name of its directory below arch/.
    pub(crate) fn source(self) -> &'static str {
        match self {
            Self::X86_64 => "x86",
            Self::Arm64 => "arm64",
        }
    }

    /// The prefix of the compiler's name; the lab itself runs on x86_64.
    pub(crate) fn cross_compile(self) -> &'static str {
        match self {
            Self::X86_64 => "",
            Self::Arm64 => "aarch64-linux-gnu-",
        }
    }

    /// The image's file name.
    pub(crate) fn image_name(self) -> &'static str {
        match self {
            Self::X86_64 => "bzImage",
            Self::Arm64 => "Image",
        }
    }

    /// The image's path in a build directory.
    pub(crate) fn image_path(self) -> &'static str {
        match self {
            Self::X86_64 => "arch/x86/boot/bzImage",
            Self::Arm64 => "arch/arm64/boot/Image",
        }
    }
}

/// Runs a `kernel` verb.
pub(crate) fn run(verb: &Verb, paths: &Paths) -> Result<()> {
    match verb {
        Verb::Build(args) => build::run(args, paths),
        Verb::Export => export::run(paths),
        Verb::Check(args) => check::run(args, paths),
        Verb::Mutate(args) => mutate::run(args, paths),
        Verb::Package => package::run(paths),
        Verb::Path => {
            println!("{}", tree::developers(paths)?.path().display());
            Ok(())
        }
    }
}
