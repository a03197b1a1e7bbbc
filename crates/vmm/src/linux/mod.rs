//! A Linux guest, booted by Linux's 64-bit boot protocol, without firmware.
//!
//! A [`LinuxMachine`] has memory in one or two slots, vCPUs, KVM's own interrupt controllers, clock and
//! timer, and two serial ports. `ttyS0` is the console. A line with a number from 0 to 255 on `ttyS1` ends
//! the run with that status: `echo 3 > /dev/ttyS1`. [`LinuxEnd`] lists the other ends. All memory is present
//! at the start, or a pager installs it while the guest runs ([`LinuxPaging`]).
//!
//! There is no ACPI, no PCI and no disk: an MP table lists the processors (CONFIG_X86_MPPARSE), and the root
//! file system is the initrd. `docs/design/linux-guest.md` has the details.
//!
//! ```no_run
//! use std::sync::Arc;
//! use pagetide_vmm::NoFaults;
//! use pagetide_vmm::linux::{LinuxConfig, LinuxConsole, LinuxMachine};
//!
//! let mut config = LinuxConfig::new("vmlinux");
//! config.initrd = Some("initramfs.cpio".into());
//! config.vcpus = 2;
//! let machine = LinuxMachine::new(&config)?;
//! let outcome = machine.run(LinuxConsole::output(std::io::stdout()), Arc::new(NoFaults))?;
//! println!("{} after {:?}", outcome.end, outcome.elapsed);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
mod console;
mod content;
mod cpuid;
mod devices;
mod discard;
mod error;
mod guest;
mod image;
mod layout;
mod machine;
mod machine_checks;
mod memory;
mod mp_table;
mod outcome;
mod paged;
mod run;
mod vcpu;

pub use config::{DEFAULT_CMDLINE, LinuxConfig, LinuxConfigError, MIN_MEMORY_BYTES};
pub use console::LinuxConsole;
pub use content::{ContentError, ContentFile, ContentProblem};
pub use devices::DeviceError;
pub use error::{LinuxError, LinuxRunError};
pub use image::{LoadError, LoadProblem};
pub use machine::LinuxMachine;
pub use machine_checks::{MachineChecks, NotItsMemory};
pub use outcome::{LinuxEnd, LinuxOutcome};
pub use paged::{LinuxPaging, PagedIn};
