//! What the package's scripts do at a removal, with a `systemctl` that says how many descriptors are stored.

use std::path::Path;
use std::process::{Command, Output};

use fs_err as fs;

/// Whether systemd runs is seen by this directory.
const RUNS: &str = "/run/systemd/system";

/// A system with the script, in a directory.
struct System(tempfile::TempDir);

impl System {
    /// `None`, and a word on it, where the sources are not on this machine.
    fn new(runs_systemd: bool, systemctl: &str) -> Option<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/cli/debian/prerm");
        let Ok(script) = fs::read_to_string(script) else {
            println!("SKIP: the package's scripts are not on this machine");
            return None;
        };
        assert!(script.contains(RUNS), "{script}");
        let system = Self(tempfile::tempdir().unwrap());
        let directory = system.0.path();
        let runs = directory.join("run");
        if runs_systemd {
            fs::create_dir(&runs).unwrap();
        }
        // No program: one that was just written cannot be called as long as a child of another test has it open.
        let log = system.log();
        let function = format!("systemctl() {{\necho \"$@\" >> '{log}'\n{systemctl}\n}}\n");
        let script = function + &script.replace(RUNS, runs.to_str().unwrap());
        fs::write(directory.join("prerm"), script).unwrap();
        Some(system)
    }

    fn log(&self) -> String {
        self.0.path().join("calls").to_str().unwrap().to_owned()
    }

    /// As dpkg calls the script before it removes or replaces the package's files.
    fn prerm(&self, arguments: &[&str]) -> Output {
        Command::new("sh")
            .arg(self.0.path().join("prerm"))
            .args(arguments)
            .output()
            .unwrap()
    }

    /// The units that the script has stopped.
    fn stopped(&self) -> Option<String> {
        let calls = fs::read_to_string(Path::new(&self.log())).unwrap_or_default();
        let stop = calls.lines().find_map(|call| call.strip_prefix("stop "));
        stop.map(str::to_owned)
    }
}

/// systemd drops what it keeps with the unit, and the guests of these VMs would sleep for good.
#[test]
fn the_package_is_not_removed_while_vms_are_stored() {
    let Some(system) = System::new(true, "echo 4") else {
        return;
    };
    let refused = system.prerm(&["remove"]);
    assert!(!refused.status.success());
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(text.contains("drain --all"), "{text}");
    assert_eq!(system.stopped(), None);
    // The unit stays at an upgrade, and they with it.
    assert!(system.prerm(&["upgrade", "2.0"]).status.success());
    assert_eq!(system.stopped(), None);
}

#[test]
fn the_package_is_removed_where_no_vm_is_stored() {
    // The last two: of a systemd without a store, and one that does not answer.
    for systemctl in ["echo 0", "echo", "return 1"] {
        let Some(system) = System::new(true, systemctl) else {
            return;
        };
        assert!(system.prerm(&["remove"]).status.success(), "{systemctl}");
        let stopped = system.stopped();
        assert_eq!(
            stopped.as_deref(),
            Some("pagetide.socket pagetide.service"),
            "{systemctl}"
        );
    }
    let Some(system) = System::new(false, "echo 4") else {
        return;
    };
    assert!(system.prerm(&["remove"]).status.success());
    assert_eq!(system.stopped(), None);
}
