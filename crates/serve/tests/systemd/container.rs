//! A Debian system with the package installed and systemd as its first process, in namespaces of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use pagetide_test_support::{equals, eventually};

/// Enters a control group of its own, and then namespaces of which that is the root. The control groups are those of version 2,
/// which the kernel mounts beside version 1.
const ENTER: &str = r#"
set -e
mount --make-rprivate /
mount -t cgroup2 cgroup2 "$1/sys"
mkdir "$1/sys/$2"
echo $$ > "$1/sys/$2/cgroup.procs"
umount "$1/sys"
exec unshare --cgroup sh -c "$3" sh "$1"
"#;

/// Mounts what systemd expects, and becomes it. /dev has what the package's programs and these tests open.
const BOOT: &str = r#"
set -e
cd "$1"
mount --bind . .
cd "$1"
mount -t proc proc proc
# These are not this system's own: what they have is the kernel's, and so another system's, too.
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for directory in run tmp dev; do mount -t tmpfs tmpfs $directory; done
for node in null zero full random urandom tty userfaultfd; do
    if test -e /dev/$node; then
        : > dev/$node
        mount --bind /dev/$node dev/$node
    fi
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
pivot_root . mnt
umount -l /mnt
exec /usr/bin/env -i container=pagetide-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --show-status=no
"#;

/// Removes a control group, whose processes have ended, with all below it.
const LEAVE: &str = r#"
mount --make-rprivate /
mount -t cgroup2 cgroup2 /mnt
find "/mnt/$1" -depth -type d -exec rmdir {} +
"#;

/// Where this test program is in the system.
const PROGRAM: &str = "/systemd-test";

/// A running system.
pub(crate) struct Container {
    root: PathBuf,
    group: String,
    unshare: Child,
    /// systemd, as this system numbers it.
    init: u32,
}

impl Container {
    /// Boots the system in a directory that the step `systemd` has made; None where there is none.
    pub(crate) fn boot() -> Option<Self> {
        let Some(root) = std::env::var_os("PAGETIDE_SYSTEMD_ROOT").map(PathBuf::from) else {
            println!(
                "SKIP: `cargo xtask test --only systemd` makes the system that this test boots"
            );
            return None;
        };
        fs::copy(std::env::current_exe().unwrap(), inside(&root, PROGRAM)).unwrap();
        let group = format!("pagetide-test-{}", std::process::id());
        let log = fs::File::create(root.with_extension("console")).unwrap();
        let unshare = Command::new("setpriv")
            // If this program is killed, the system ends with it.
            .args(["--pdeathsig", "KILL", "unshare"])
            .args(["--mount", "--pid", "--uts", "--ipc"])
            .args(["--fork", "--kill-child", "sh", "-c", ENTER, "sh"])
            .arg(&root)
            .args([&group, BOOT])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let pid = unshare.id();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let init = eventually("unshare's child", || {
            let text = fs::read_to_string(&children).unwrap_or_default();
            text.trim().parse().ok()
        });
        let container = Self {
            root,
            group,
            unshare,
            init,
        };
        // Until then the process is a shell whose root is this machine's, and so would be that of a command.
        eventually("systemd has begun", || {
            let name = fs::read_to_string(format!("/proc/{init}/comm")).unwrap_or_default();
            equals(name.trim().to_owned(), &"systemd".to_owned())
        });
        eventually("systemd has booted", || {
            let state = container
                .command(&["systemctl", "is-system-running"])
                .output();
            let state = String::from_utf8(state.unwrap().stdout).unwrap();
            match state.trim() {
                "running" | "degraded" => Ok(()),
                other => Err(other.to_owned()),
            }
        });
        Some(container)
    }

    /// A file of the system, from here. What systemd mounts in it is not seen from here.
    pub(crate) fn file(&self, path: &str) -> PathBuf {
        inside(&self.root, path)
    }

    /// A command in the system.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.init.to_string()])
            .args(["--mount", "--pid", "--uts", "--ipc", "--root", "--wd=/"])
            .args([
                "--",
                "/usr/bin/env",
                "LC_ALL=C.UTF-8",
                "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
            ])
            .args(words);
        command
    }

    /// Runs a command in the system, which must succeed, and returns what it prints.
    pub(crate) fn run(&self, words: &[&str]) -> String {
        let output = self.result(words);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let log = self
                .command(&["journalctl", "--no-pager", "--lines=40"])
                .output();
            let log = log.map(|log| String::from_utf8_lossy(&log.stdout).into_owned());
            panic!(
                "{words:?}: {}: {text}{said}\n{}",
                output.status,
                log.unwrap()
            );
        }
        text
    }

    fn result(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    pub(crate) fn systemctl(&self, words: &str) -> String {
        let words: Vec<&str> = std::iter::once("systemctl")
            .chain(words.split(' '))
            .collect();
        self.run(&words)
    }

    /// A property of the service.
    pub(crate) fn property(&self, name: &str) -> String {
        let text = self.systemctl(&format!("show --value --property={name} pagetide"));
        text.trim().to_owned()
    }

    /// All that the service has logged in this system.
    pub(crate) fn log(&self) -> String {
        self.run(&[
            "journalctl",
            "--no-pager",
            "--output=cat",
            "--unit=pagetide",
        ])
    }

    /// This test program, in the system.
    pub(crate) fn this_program(&self) -> Command {
        self.command(&[PROGRAM])
    }

    /// systemd's open files that the kernel calls by this name.
    pub(crate) fn files_of_init(&self, name: &str) -> Vec<PathBuf> {
        let directory = PathBuf::from(format!("/proc/{}/fd", self.init));
        let all = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let is_one = |file: &PathBuf| {
            let target = fs::read_link(file).unwrap_or_default();
            target.to_string_lossy().contains(name)
        };
        all.filter(is_one).collect()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
        // A leftover takes some memory of the kernel, and does no other harm.
        let _ = Command::new("unshare")
            .args(["--mount", "sh", "-c", LEAVE, "sh", &self.group])
            .stderr(Stdio::null())
            .status();
    }
}

fn inside(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}
