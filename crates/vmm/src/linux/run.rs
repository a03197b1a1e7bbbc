//! A Linux guest's run: the pool, a thread for the console's input, and the caller's, which watches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagetide_kvm::Vcpu;

use crate::control::Stopper;
use crate::failure::PoolFailure;
use crate::hooks::VcpuHooks;
use crate::pool::{PoolConfig, PoolEnd, VcpuPool};

use super::devices::{CONSOLE_IRQ, Devices, STATUS_IRQ};
use super::error::LinuxRunError;
use super::guest::{Guest, Line};
use super::input::{LinuxConsole, Typist};
use super::machine::LinuxMachine;
use super::outcome::{LinuxEnd, LinuxOutcome};

/// How often the vCPUs are asked whether they live.
const LOOK: Duration = Duration::from_millis(500);
/// Answers in which all are dead before it is believed: between two vCPUs' answers the one could
/// have started the other.
const BELIEVED: u32 = 2;

impl LinuxMachine {
    /// Runs the guest to its end. `hooks` get its memory faults, and the exits that no device answers.
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
        let guest = Arc::new(Guest::new(
            devices,
            hooks,
            self.on_given_up,
            self.vcpus.len(),
        ));
        let stopper = self.stopper;
        let typist = console
            .input
            .map(|input| Typist::start(input, Arc::clone(&guest), stopper.clone()))
            .transpose()?;

        let started = Instant::now();
        let hooks: Arc<dyn VcpuHooks> = Arc::<Guest>::clone(&guest);
        let pool = VcpuPool::start(self.vcpus, hooks, &stopper, &PoolConfig::default())?;
        watch(&pool, &guest, &stopper, started, self.config.time_limit);
        let elapsed = started.elapsed();
        let grace = self.config.stop_grace;
        let PoolEnd {
            vcpus,
            lost,
            failure,
        } = pool.join(grace);
        if !lost.is_empty() {
            // The typist waits with them if nobody reads what the guest says.
            let threads = lost.len();
            return Err(LinuxRunError::Lost { threads, grace });
        }
        if let Some(typist) = typist {
            typist.end();
        }
        match failure.map(PoolFailure::into_own) {
            None => {
                let end = guest.take_end().unwrap_or(LinuxEnd::Stopped);
                Ok(LinuxOutcome { end, elapsed })
            }
            Some(LinuxRunError::TimeLimit { limit, .. }) => Err(LinuxRunError::TimeLimit {
                limit,
                rips: vcpus.iter().filter_map(Vcpu::rip).collect(),
            }),
            Some(error) => Err(error),
        }
    }
}

/// Waits until the run is over, and ends it when its time is up or when nobody lives.
fn watch(
    pool: &VcpuPool,
    guest: &Guest,
    stopper: &Stopper,
    started: Instant,
    limit: Option<Duration>,
) {
    let mut all_dead = 0;
    loop {
        let left = limit.map_or(LOOK, |limit| limit.saturating_sub(started.elapsed()));
        if pool.wait(left.min(LOOK)) {
            return;
        }
        if let Some(limit) = limit.filter(|limit| started.elapsed() >= *limit) {
            // Who was where is found out when the threads are back.
            let rips = Vec::new();
            return stopper.stop(LinuxRunError::TimeLimit { limit, rips });
        }
        all_dead = if guest.all_dead() { all_dead + 1 } else { 0 };
        if all_dead == BELIEVED {
            guest.note_end(LinuxEnd::Halted);
            return stopper.end();
        }
        pool.kick_all();
    }
}
