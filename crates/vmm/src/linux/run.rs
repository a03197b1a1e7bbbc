//! A Linux guest's run: the pool, a thread for the console's input, and the caller's thread, which watches.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pagetide_kvm::Vcpu;

use crate::control::Stopper;
use crate::failure::PoolFailure;
use crate::hooks::VcpuHooks;
use crate::pool::{PoolConfig, PoolEnd, VcpuPool};

use super::console::{LinuxConsole, start_input};
use super::devices::{CONSOLE_IRQ, Devices, STATUS_IRQ};
use super::error::LinuxRunError;
use super::guest::{Guest, Line};
use super::machine::LinuxMachine;
use super::outcome::{LinuxEnd, LinuxOutcome};

/// How often the vCPUs are kicked to find out whether any of them can still run.
const LOOK: Duration = Duration::from_millis(500);
/// How many times in a row all vCPUs must be found dead: one could have started another in between.
const DEAD_LOOKS: u32 = 2;

impl LinuxMachine {
    /// Runs the guest to its end. `hooks` get its memory faults, and the exits that no device answers.
    ///
    /// # Errors
    /// A failure on the host's side, or the time limit. A guest that ends by itself is no error, however it
    /// ends.
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
        let vcpus = self.vcpus.len();
        let guest = Arc::new(Guest::new(devices, hooks, self.on_discard, vcpus));
        let stopper = self.stopper;
        let started = Instant::now();
        let hooks: Arc<dyn VcpuHooks> = Arc::<Guest>::clone(&guest);
        let pool = VcpuPool::start(self.vcpus, hooks, &stopper, &PoolConfig::default())?;
        let input = console
            .input
            .map(|input| start_input(input, Arc::clone(&guest), stopper.clone()))
            .transpose()?;
        watch(&pool, &guest, &stopper, started, self.config.time_limit);
        let elapsed = started.elapsed();
        let grace = self.config.stop_grace;
        let PoolEnd {
            vcpus,
            lost,
            failure,
        } = pool.join(grace);
        if !lost.is_empty() {
            // The input's thread may wait with them, if nobody reads the guest's output.
            let threads = lost.len();
            return Err(LinuxRunError::Lost { threads, grace });
        }
        if let Some(Err(_)) = input.map(JoinHandle::join) {
            tracing::warn!("the thread of the console's input panicked");
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

/// Waits until the run is over, and ends it at the time limit or when no vCPU will run again.
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
            // The instruction pointers are read when the threads have ended.
            let rips = Vec::new();
            return stopper.stop(LinuxRunError::TimeLimit { limit, rips });
        }
        all_dead = if guest.all_dead() { all_dead + 1 } else { 0 };
        if all_dead == DEAD_LOOKS {
            guest.note_end(LinuxEnd::Halted);
            return stopper.end();
        }
        pool.kick_all();
    }
}
