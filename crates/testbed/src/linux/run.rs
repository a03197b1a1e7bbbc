//! A Linux guest's run: a thread for each vCPU, one for the console's input, and the caller's, which
//! watches.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use pagetide_kvm::{BoundVcpu, Exit, Vcpu};

use super::control::{Control, Line};
use super::devices::{CONSOLE_IRQ, Devices, STATUS_IRQ, Wish};
use super::error::LinuxRunError;
use super::hooks::VcpuHooks;
use super::input::{LinuxConsole, Typist};
use super::machine::LinuxMachine;
use super::outcome::{LinuxEnd, LinuxOutcome};

impl LinuxMachine {
    /// Runs the guest to its end.
    ///
    /// # Errors
    /// What failed on the host's side, and a guest that has not ended in its time. However a guest
    /// ends by itself is no error.
    pub fn run(
        self,
        console: LinuxConsole,
        hooks: Arc<dyn VcpuHooks>,
    ) -> Result<LinuxOutcome, LinuxRunError> {
        let line = |number| Line {
            vm: Arc::clone(self.vm()),
            number,
        };
        let devices = Devices::new(line(CONSOLE_IRQ), line(STATUS_IRQ), console.output);
        let kicks = self.vcpus.iter().map(Vcpu::kick_handle).collect();
        let control = Arc::new(Control::new(devices, hooks, kicks));
        let typist = console
            .input
            .map(|input| Typist::start(input, Arc::clone(&control)))
            .transpose()?;

        let started = Instant::now();
        self.stopper.begin(&control);
        let mut threads = Vec::new();
        for vcpu in self.vcpus {
            match start(vcpu, &control) {
                Ok(thread) => threads.push(thread),
                Err(error) => control.finish(Err(error)),
            }
        }
        control.watch(started, self.config.time_limit);
        let elapsed = started.elapsed();

        let left = control.wait_for_threads(self.config.stop_grace);
        self.stopper.end();
        let lost = LinuxRunError::Lost {
            threads: left,
            grace: self.config.stop_grace,
        };
        if left > 0 {
            // The typist waits with them if nobody reads what the guest says.
            return Err(lost);
        }
        if let Some(typist) = typist {
            typist.end();
        }
        // They have ended, or are about to. One that panicked has told so.
        let vcpus = threads.into_iter().filter_map(|thread| thread.join().ok());
        let positions: Vec<u64> = vcpus.filter_map(|vcpu| vcpu.rip()).collect();
        match control.take_end().unwrap_or(Err(lost)) {
            Ok(end) => Ok(LinuxOutcome { end, elapsed }),
            Err(LinuxRunError::TimeLimit { limit, .. }) => Err(LinuxRunError::TimeLimit {
                limit,
                rips: positions,
            }),
            Err(error) => Err(error),
        }
    }
}

fn start(mut vcpu: Vcpu, control: &Arc<Control>) -> Result<JoinHandle<Vcpu>, LinuxRunError> {
    let id = vcpu.id();
    let control = Arc::clone(control);
    let enlisted = control.enlist(id);
    thread::Builder::new()
        .name(format!("vcpu-{id}"))
        .spawn(move || {
            let _enlisted = enlisted;
            match drive(&mut vcpu, &control) {
                Ok(Some(end)) => control.finish(Ok(end)),
                Ok(None) => {}
                Err(error) => control.finish(Err(error)),
            }
            vcpu
        })
        .map_err(|source| LinuxRunError::Spawn {
            what: format!("vCPU {id}"),
            source,
        })
}

/// Runs a vCPU until the guest ends, or, with None, until another vCPU or somebody else ended it.
fn drive(vcpu: &mut Vcpu, control: &Control) -> Result<Option<LinuxEnd>, LinuxRunError> {
    let mut vcpu = vcpu.bind()?;
    while !control.is_stopped() {
        let exit = vcpu.run()?;
        if let Some(end) = handle(&mut vcpu, exit, control)? {
            return Ok(Some(end));
        }
    }
    Ok(None)
}

fn handle(
    vcpu: &mut BoundVcpu<'_>,
    exit: Exit,
    control: &Control,
) -> Result<Option<LinuxEnd>, LinuxRunError> {
    let id = vcpu.id();
    match exit {
        Exit::IoOut { port, .. } => {
            let elements = vcpu.out_elements();
            let mut devices = control.devices();
            for element in elements {
                match devices.write(port, element)? {
                    Some(Wish::Reset) => return Ok(Some(LinuxEnd::Reset)),
                    Some(Wish::Exit(status)) => return Ok(Some(LinuxEnd::Status(status))),
                    None => {}
                }
            }
        }
        Exit::IoIn { port, .. } => {
            let mut devices = control.devices();
            vcpu.answer_in(|| devices.read(port));
        }
        // Nothing is there: reads are all ones.
        Exit::Mmio { write: false, .. } => vcpu.answer_mmio(u64::MAX),
        Exit::Mmio { write: true, .. } => {}
        Exit::Interrupted => {
            control.look(vcpu)?;
            let done = control.hooks().interrupted(vcpu);
            done.map_err(|source| LinuxRunError::Hook {
                vcpu: id,
                fault: None,
                source,
            })?;
        }
        Exit::Fault(fault) => {
            let resolved = control.hooks().fault(vcpu, fault);
            resolved.map_err(|source| LinuxRunError::Hook {
                vcpu: id,
                fault: Some(fault),
                source,
            })?;
        }
        Exit::Shutdown => return Ok(Some(LinuxEnd::TripleFault)),
        Exit::Halt | Exit::FailedEntry { .. } | Exit::InternalError { .. } | Exit::Other { .. } => {
            return Err(LinuxRunError::UnexpectedExit {
                vcpu: id,
                exit,
                rip: vcpu.rip().unwrap_or(0),
            });
        }
    }
    Ok(None)
}
