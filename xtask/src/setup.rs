//! `cargo xtask setup`: the programs that the lab needs.

use std::path::Path;

use anyhow::{Result, bail};

use crate::command::{Run, on_path};
use crate::cross;
use crate::kernel::Arch;
use crate::outside::Service;
use crate::progress::Progress;

/// Something that must be there, and the Debian package that has it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    what: What,
    package: &'static str,
}

#[derive(Debug, Clone, Copy)]
enum What {
    Program(&'static str),
    File(&'static str),
    Libclang,
    /// A Rust compiler that has arm64's standard library, Debian's or another.
    CrossRust,
    /// The parts of Python that make virtual environments, which Debian has in a package of their own.
    PythonVenv,
}

const fn program(name: &'static str, package: &'static str) -> Need {
    Need {
        what: What::Program(name),
        package,
    }
}

const fn file(path: &'static str, package: &'static str) -> Need {
    Need {
        what: What::File(path),
        package,
    }
}

const KERNEL: [Need; 19] = [
    program("git", "git"),
    program("make", "make"),
    program("gcc", "gcc"),
    program("ld", "binutils"),
    file("/usr/include/stdlib.h", "libc6-dev"),
    program("perl", "perl"),
    program("python3", "python3"),
    program("flex", "flex"),
    program("bison", "bison"),
    program("bc", "bc"),
    file("/usr/include/libelf.h", "libelf-dev"),
    file("/usr/include/openssl/ssl.h", "libssl-dev"),
    program("ccache", "ccache"),
    program("cpio", "cpio"),
    program("depmod", "kmod"),
    program("rsync", "rsync"),
    program("xz", "xz-utils"),
    program("gzip", "gzip"),
    program("setpriv", "util-linux"),
];

const CROSS: [Need; 2] = [
    program("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
    file("/usr/aarch64-linux-gnu/lib/libc.a", "libc6-dev-arm64-cross"),
];

/// The compiler, and its standard library for arm64.
const CROSS_RUST: [Need; 2] = [
    Need {
        what: What::CrossRust,
        package: "rustc-web",
    },
    Need {
        what: What::CrossRust,
        package: "libstd-rust-web-dev:arm64",
    },
];

const QEMU_X86: Need = program("qemu-system-x86_64", "qemu-system-x86");
const QEMU_ARM: Need = program("qemu-system-aarch64", "qemu-system-arm");
const LIBCLANG: Need = Need {
    what: What::Libclang,
    package: "libclang1",
};

/// What building a kernel takes.
pub(crate) fn kernel_tools(arch: Arch) -> Vec<Need> {
    let cross: &[Need] = if arch == Arch::Arm64 { &CROSS } else { &[] };
    KERNEL.iter().chain(cross).copied().collect()
}

/// What packing a kernel takes.
pub(crate) fn kernel_package_tools() -> Vec<Need> {
    let mut needs = kernel_tools(Arch::X86_64);
    needs.extend([
        program("dpkg-buildpackage", "dpkg-dev"),
        program("dh_listpackages", "debhelper"),
    ]);
    needs
}

const PACKAGE: [Need; 4] = [
    program("dpkg-shlibdeps", "dpkg-dev"),
    program("strip", "binutils"),
    program("xz", "xz-utils"),
    program("mmdebstrap", "mmdebstrap"),
];

/// What making and testing the Debian package takes.
pub(crate) fn package_tools() -> [Need; 4] {
    PACKAGE
}

/// What compiling the fuzzer takes.
pub(crate) fn fuzz_tools() -> [Need; 1] {
    [program("g++", "g++")]
}

/// What compiling a program of guest/ takes.
pub(crate) fn compiler() -> [Need; 2] {
    [
        program("gcc", "gcc"),
        file("/usr/include/stdlib.h", "libc6-dev"),
    ]
}

const UPSTREAM: [Need; 3] = [
    file("/usr/include/numa.h", "libnuma-dev"),
    file("/usr/include/sys/capability.h", "libcap-dev"),
    file("/usr/include/liburing.h", "liburing-dev"),
];

/// What compiling the kernel's own tests takes. Debian has the libraries for arm64 only with a C library that exchanges
/// packages of this machine: tests that need them are left out there.
pub(crate) fn upstream_tools(arch: Arch) -> &'static [Need] {
    match arch {
        Arch::X86_64 => &UPSTREAM,
        Arch::Arm64 => &[],
    }
}

/// What booting a VM takes, beside the kernel.
pub(crate) fn vm_tools(arch: Arch) -> Vec<Need> {
    match arch {
        Arch::X86_64 => vec![QEMU_X86],
        Arch::Arm64 => vec![QEMU_ARM],
    }
}

const QEMU_BUILD: [Need; 12] = [
    program("gcc", "gcc"),
    program("python3", "python3"),
    program("patch", "patch"),
    program("dpkg-source", "dpkg-dev"),
    program("ninja", "ninja-build"),
    program("meson", "meson"),
    program("pkg-config", "pkg-config"),
    file("/usr/include/glib-2.0/glib.h", "libglib2.0-dev"),
    file("/usr/include/pixman-1/pixman.h", "libpixman-1-dev"),
    file("/usr/include/attr/libattr.h", "libattr1-dev"),
    file("/usr/include/cap-ng.h", "libcap-ng-dev"),
    file("/usr/include/libfdt.h", "libfdt-dev"),
];

/// What building the x86_64 lab's QEMU takes.
pub(crate) fn qemu_tools() -> [Need; 12] {
    QEMU_BUILD
}

/// What compiling the workspace for arm64 takes.
pub(crate) fn cross_tools() -> Vec<Need> {
    CROSS.into_iter().chain(CROSS_RUST).collect()
}

/// What bindgen takes.
pub(crate) fn bindgen_tools() -> Vec<Need> {
    vec![LIBCLANG]
}

/// What the S3 server of the tests takes.
const MOTO: [Need; 2] = [
    program("python3", "python3"),
    Need {
        what: What::PythonVenv,
        package: "python3-venv",
    },
];

/// Every Debian package's need.
fn everything() -> Vec<Need> {
    let mut needs = kernel_tools(Arch::Arm64);
    needs.extend(cross_tools());
    needs.extend(vm_tools(Arch::X86_64));
    needs.extend(vm_tools(Arch::Arm64));
    needs.extend(qemu_tools());
    needs.extend(bindgen_tools());
    needs.extend(package_tools());
    needs.extend(MOTO);
    needs.extend(fuzz_tools());
    needs.extend(upstream_tools(Arch::X86_64));
    needs
}

impl Need {
    fn met(self) -> bool {
        match self.what {
            What::Program(name) => on_path(name),
            What::File(path) => Path::new(path).exists(),
            What::Libclang => has_libclang(),
            What::CrossRust => cross::rustc().is_some(),
            What::PythonVenv => has_python_venv(),
        }
    }
}

/// libclang.so, libclang-14.so.1 and the like; not libclang-cpp, which bindgen cannot use.
fn is_libclang(file_name: &str) -> bool {
    file_name.starts_with("libclang") && !file_name.starts_with("libclang-cpp")
}

fn has_python_venv() -> bool {
    let python = Run::new("python3").args(["-c", "import ensurepip, venv"]);
    python.succeeds().unwrap_or(false)
}

/// Any version does: bindgen finds it where Debian puts it.
fn has_libclang() -> bool {
    let Ok(dir) = std::fs::read_dir("/usr/lib") else {
        return false;
    };
    let llvm = dir
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with("llvm-"));
    llvm.filter_map(|entry| std::fs::read_dir(entry.path().join("lib")).ok())
        .any(|lib| {
            lib.flatten()
                .any(|entry| is_libclang(&entry.file_name().to_string_lossy()))
        })
}

/// The packages of the needs that are not met.
fn missing(needs: &[Need]) -> Vec<&'static str> {
    let mut packages: Vec<_> = needs
        .iter()
        .filter(|n| !n.met())
        .map(|n| n.package)
        .collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

/// One clear error if a need is not met.
pub(crate) fn require(needs: &[Need]) -> Result<()> {
    let missing = missing(needs);
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "missing Debian packages: {}; `cargo xtask setup` installs them",
        missing.join(" ")
    )
}

/// Installs whatever is missing.
pub(crate) fn run() -> Result<()> {
    ensure(&everything())
}

/// Installs what is missing of these: few need it.
pub(crate) fn ensure(needs: &[Need]) -> Result<()> {
    let missing = missing(needs);
    if missing.is_empty() {
        return Ok(());
    }
    install(&missing)
}

/// The architectures that packages are named with, which dpkg has to know before apt finds them.
fn foreign<'a>(packages: &[&'a str]) -> Vec<&'a str> {
    let named = packages
        .iter()
        .filter_map(|package| package.split_once(':'));
    let mut architectures: Vec<_> = named.map(|(_, architecture)| architecture).collect();
    architectures.dedup();
    architectures
}

/// Installs packages with apt, as root or through sudo.
fn install(packages: &[&str]) -> Result<()> {
    let list = packages.join(" ");
    if !on_path("apt-get") {
        bail!("this needs Debian's packages {list}, and there is no apt-get here");
    }
    let root = rustix::process::geteuid().is_root();
    let sudo = !root && on_path("sudo") && Run::new("sudo").args(["-n", "true"]).succeeds()?;
    if !root && !sudo {
        bail!("not root, and no sudo without a password: run `apt-get install {list}` as root");
    }
    let as_root = || {
        if root {
            Run::new("env")
        } else {
            Run::new("sudo").args(["-n", "env"])
        }
    };
    let apt = || as_root().args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y"]);
    eprintln!("installing {list}");
    let progress = Progress::spinner("apt-get");
    let log = std::env::temp_dir().join(format!("pagetide-apt-{}.log", std::process::id()));
    for architecture in foreign(packages) {
        as_root()
            .args(["dpkg", "--add-architecture", architecture])
            .logged(&log, &progress)?;
    }
    // A package that a list names and the mirror no longer has is found again with new lists.
    Service::Debian.again("installing Debian's packages", || {
        apt().arg("update").logged(&log, &progress)?;
        apt()
            .args(["install", "--no-install-recommends"])
            .args(packages)
            .logged(&log, &progress)
    })?;
    progress.done();
    // A log that nobody needs any more; a leftover does no harm.
    let _ = std::fs::remove_file(&log);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_another_architecture_are_seen() {
        assert_eq!(foreign(&["git", "a:arm64", "b:arm64"]), ["arm64"]);
        assert!(foreign(&["git", "make"]).is_empty());
    }
}
