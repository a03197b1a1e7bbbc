//! The VMMs' processes, as the test sees them.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_test_support::{PATIENCE, Rng};

use crate::place::{IMAGE_PAGES, Place};
use crate::vmm::{Kind, NO_MEMORY, PLAN, Plan, SOCKET};
use crate::{Failing, Tally};

/// A socket of each server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Socket {
    /// A raw memory file.
    File,
    /// A Pagetide image in the store.
    Store,
}

impl Socket {
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Store => "store",
        }
    }
}

/// What starts VMMs of one server.
pub struct Vmms<'a> {
    pub place: &'a Place,
    pub server: &'static str,
    pub kinds: Vec<Kind>,
    pub tally: &'a Tally,
    pub failing: &'a Failing,
}

impl Vmms<'_> {
    /// One VMM's life. If it is not a random one, it is long enough for its end.
    pub fn live(&self, socket: Socket, mut rng: Rng, is_random: bool) {
        let kind = rng.pick(&self.kinds);
        let plan = match is_random {
            true => Plan {
                kind,
                pages: pages(kind, &mut rng),
                seed: rng.next(),
                millis: 100 + rng.below(2500),
            },
            false => Plan {
                kind: Kind::Small,
                pages: IMAGE_PAGES,
                seed: 1,
                millis: 200,
            },
        };
        let dies = is_random && rng.one_in(3);
        let death = dies.then(|| Duration::from_millis(rng.below(plan.millis)));
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "vmm_process", "--nocapture"])
            .env(PLAN, plan.text())
            .env(SOCKET, self.place.socket(self.server, socket))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        self.tally.count("VMs", 1);
        self.tally
            .count(&format!("VMs of {} memory", kind.name()), 1);
        if let Err(what) = self.see_off(child, plan, death) {
            let (server, socket) = (self.server, socket.name());
            let place = self.place.directory.path().display();
            self.failing
                .fail(format!("{plan:?} at {server}, {socket} ({place}): {what}"));
        }
    }

    fn see_off(&self, mut child: Child, plan: Plan, death: Option<Duration>) -> Result<(), String> {
        let begun = Instant::now();
        let limit = Duration::from_millis(plan.millis) + 2 * PATIENCE;
        let mut is_killed = false;
        // It ends the process.
        let input = child.stdin.take();
        while child
            .try_wait()
            .map_err(|error| error.to_string())?
            .is_none()
        {
            let age = begun.elapsed();
            if !is_killed && death.is_some_and(|death| age >= death) {
                is_killed = true;
                let _ = child.kill();
            }
            if age > limit || self.failing.is_over() {
                let _ = child.kill();
                let _ = child.wait();
                return match self.failing.is_over() {
                    true => Ok(()),
                    false => Err(format!("it runs after {age:?}")),
                };
            }
            // The time between two looks.
            thread::sleep(Duration::from_millis(4));
        }
        drop(input);
        let output = child
            .wait_with_output()
            .map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout);
        match (output.status.code(), output.status.signal()) {
            (None, Some(9)) if is_killed => {
                self.tally.count("killed VMMs", 1);
                Ok(())
            }
            (Some(0), _) => match text.lines().find_map(|line| line.strip_prefix("done ")) {
                Some(done) => {
                    self.count(done);
                    Ok(())
                }
                None => Err("it has not said that it is done".into()),
            },
            // The pages of a VMM that was killed are not free yet.
            (Some(NO_MEMORY), _) => {
                self.tally.count("VMs without huge pages", 1);
                Ok(())
            }
            (code, signal) => {
                let said = String::from_utf8_lossy(&output.stderr);
                Err(format!(
                    "exit status {code:?}, signal {signal:?}: {said}{text}"
                ))
            }
        }
    }

    /// Adds a VMM's counts: `12 reads, 3 writes`.
    fn count(&self, done: &str) {
        for part in done.split(", ") {
            let (count, what) = part.split_once(' ').unwrap();
            self.tally.count(what, count.parse().unwrap());
        }
    }
}

fn pages(kind: Kind, rng: &mut Rng) -> usize {
    let unit = kind.page_bytes() / 4096;
    let units = IMAGE_PAGES / unit;
    let units = 1 + usize::try_from(rng.below(units as u64)).unwrap();
    units * unit
}
