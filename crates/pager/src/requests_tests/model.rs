//! Requests compared with a model of the page map: no page is lost.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const PAGES: u64 = 24;

/// The state of a page in the page map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Bulk,
    Urgent,
    Settled,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Prefetch(u64, u64),
    /// A fault on a page, with a window around it.
    Fault(u64, u64),
    Submit,
    /// The request with this number, of those in flight.
    Finish(usize),
    Miss(usize, bool),
    /// The same for a bulk request whose content the memory does not take.
    NotInstalled(usize),
    Wait(u64),
    Expire,
    Resume,
    Recall,
    DropBulk,
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..PAGES, 1..20u64).prop_map(|(first, count)| Step::Prefetch(first, count)),
        4 => (0..PAGES, 0..4u32).prop_map(|(page, shift)| Step::Fault(page, 1 << shift)),
        8 => Just(Step::Submit),
        3 => (0..20usize).prop_map(Step::Finish),
        4 => (0..20usize, any::<bool>()).prop_map(|(index, poisoned)| Step::Miss(index, poisoned)),
        2 => (0..20usize).prop_map(Step::NotInstalled),
        3 => (0..400u64).prop_map(Step::Wait),
        1 => Just(Step::Expire),
        1 => Just(Step::Resume),
        1 => Just(Step::Recall),
        1 => Just(Step::DropBulk),
        1 => Just(Step::Clear),
    ];
    prop::collection::vec(step, 0..120)
}

/// The state machine and a page map, with their common invariants.
struct Model {
    requests: Requests,
    map: Vec<State>,
    now: Instant,
    last_id: Option<RequestId>,
    flying: BTreeMap<RequestId, Wanted>,
}

impl Model {
    fn new() -> Self {
        let pages = usize::try_from(PAGES).unwrap();
        Self {
            requests: requests(),
            map: vec![State::Absent; pages],
            now: Instant::now(),
            last_id: None,
            flying: BTreeMap::new(),
        }
    }

    fn state(&mut self, page: u64) -> &mut State {
        &mut self.map[usize::try_from(page).unwrap()]
    }

    /// Changes the Absent pages of `window` that form a run with `page` to `to`.
    fn request(&mut self, page: u64, window: PageRange, to: State) -> PageRange {
        let window = window.intersection(run(0, PAGES));
        let (mut first, mut end) = (page, page + 1);
        while first > window.first().0 && *self.state(first - 1) == State::Absent {
            first -= 1;
        }
        while end < window.end().0 && *self.state(end) == State::Absent {
            end += 1;
        }
        for page in first..end {
            *self.state(page) = to;
        }
        run(first, end - first)
    }

    fn withdraw(&mut self, pages: PageRange, also_urgent: bool) {
        for page in pages.iter() {
            let state = self.state(page.0);
            if *state == State::Bulk || (also_urgent && *state == State::Urgent) {
                *state = State::Absent;
            }
        }
    }

    fn submit(&mut self) -> Result<bool, TestCaseError> {
        let now = self.now;
        let ready = |job: &Job| job.not_before.is_none_or(|at| at <= now);
        let urgent_waits = self.requests.urgent.waiting.iter().any(ready);
        let Some(submission) = self.requests.next_submission(now) else {
            return Ok(false);
        };
        prop_assert!(!self.requests.is_stalled());
        prop_assert!(submission.urgency == Urgency::Urgent || !urgent_waits);
        prop_assert!(self.last_id.is_none_or(|last| last < submission.id));
        self.last_id = Some(submission.id);
        let wanted = self.requests.in_flight[&submission.id].job.wanted;
        prop_assert_eq!(wanted.urgency(), submission.urgency);
        self.flying.insert(submission.id, wanted);
        Ok(true)
    }

    fn finish(&mut self, id: RequestId) -> Result<(), TestCaseError> {
        let wanted = self.flying.remove(&id);
        self.requests.answered();
        prop_assert_eq!(self.requests.finish(id).map(|job| job.wanted), wanted);
        prop_assert_eq!(self.requests.finish(id), None);
        for page in wanted.iter().flat_map(|wanted| wanted.pages.iter()) {
            *self.state(page.0) = State::Settled;
        }
        Ok(())
    }

    fn miss(&mut self, id: RequestId, miss: Miss) -> Result<(), TestCaseError> {
        let was_stalled = self.requests.is_stalled();
        self.flying.remove(&id);
        let after = match miss {
            Miss::NotInstalled { is_lack } => {
                self.requests.answered();
                let job = self.requests.finish(id).unwrap();
                self.requests.not_installed(job, is_lack, self.now)
            }
            _ => self.requests.miss(id, miss, self.now).unwrap(),
        };
        prop_assert_eq!(after.stalled, !was_stalled && self.requests.is_stalled());
        for pages in after.withdraw.into_iter().flatten() {
            self.withdraw(pages, true);
        }
        for pages in after.set_aside {
            for page in pages.iter() {
                prop_assert!(self.requests.set_aside().run_of(page).is_some());
            }
            self.withdraw(pages, false);
        }
        Ok(())
    }

    fn flying(&self, index: usize) -> Option<(RequestId, Wanted)> {
        let index = index % self.flying.len().max(1);
        self.flying
            .iter()
            .nth(index)
            .map(|(&id, &wanted)| (id, wanted))
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Prefetch(page, count) => {
                if *self.state(page) == State::Absent {
                    let pages = self.request(page, run(page, count), State::Bulk);
                    self.requests.want(Wanted { pages, fault: None });
                }
            }
            Step::Fault(page, window) => {
                let fault = Some(PageIndex(page));
                match *self.state(page) {
                    State::Absent => {
                        let window = PageRange::window(PageIndex(page), window);
                        let pages = self.request(page, window, State::Urgent);
                        self.requests.want(Wanted { pages, fault });
                    }
                    State::Bulk => {
                        *self.state(page) = State::Urgent;
                        self.requests.want(urgent(page));
                    }
                    State::Urgent | State::Settled => {}
                }
            }
            Step::Submit => {
                self.submit()?;
            }
            Step::Finish(index) => {
                if let Some((id, _)) = self.flying(index) {
                    self.finish(id)?;
                }
            }
            Step::Miss(index, is_poisoned) => match self.flying(index) {
                Some((id, wanted)) if is_poisoned && wanted.pages.count() > 1 => {
                    self.miss(id, Miss::PoisonedAmongOthers)?;
                }
                Some((id, _)) => self.miss(id, Miss::Failed)?,
                None => {}
            },
            Step::NotInstalled(index) => match self.flying(index) {
                Some((id, wanted)) if wanted.urgency() == Urgency::Bulk => {
                    let is_lack = index % 2 == 0;
                    self.miss(id, Miss::NotInstalled { is_lack })?;
                }
                _ => {}
            },
            Step::Wait(ms) => self.now += Duration::from_millis(ms),
            Step::Expire => {
                self.now += POLICY.deadline;
                while let Some(id) = self.requests.next_expired(self.now) {
                    self.miss(id, Miss::Failed)?;
                }
                prop_assert!(self.flying.is_empty());
            }
            Step::Resume => self.requests.resume(),
            Step::Recall => {
                let ids: Vec<_> = std::mem::take(&mut self.flying).into_keys().collect();
                prop_assert_eq!(self.requests.recall(), ids);
            }
            Step::DropBulk => {
                let (ids, pages) = self.requests.drop_bulk();
                for id in ids {
                    let dropped = self.flying.remove(&id).unwrap();
                    prop_assert_eq!(dropped.urgency(), Urgency::Bulk);
                }
                for pages in pages {
                    self.withdraw(pages, false);
                }
                prop_assert!(self.flying.values().all(|wanted| wanted.fault.is_some()));
            }
            Step::Clear => {
                self.requests.clear();
                self.flying.clear();
                self.withdraw(run(0, PAGES), true);
            }
        }
        self.check()
    }

    /// Checks that no page is lost, and the limits and sums.
    fn check(&mut self) -> Result<(), TestCaseError> {
        let requests = &self.requests;
        let flying: Vec<_> = requests
            .in_flight
            .values()
            .map(|at| at.job.wanted)
            .collect();
        prop_assert_eq!(requests.in_flight.len(), self.flying.len());
        let mut covered = BTreeMap::new();
        for (class, limit, urgency) in [
            (&requests.urgent, 8, Urgency::Urgent),
            (&requests.bulk, 16, Urgency::Bulk),
        ] {
            let waiting = class.waiting.iter().map(|job| job.wanted);
            let own = flying.iter().filter(|wanted| wanted.urgency() == urgency);
            let pages: u64 = own.clone().map(|wanted| wanted.pages.count()).sum();
            prop_assert_eq!(pages, class.in_flight_pages);
            prop_assert!(pages <= limit || own.clone().count() == 1);
            let waiting_pages: u64 = waiting.clone().map(|wanted| wanted.pages.count()).sum();
            prop_assert_eq!(waiting_pages, class.waiting_pages);
            for wanted in waiting.chain(own.copied()) {
                prop_assert_eq!(wanted.urgency(), urgency);
                prop_assert!(!wanted.pages.is_empty());
                for page in wanted.pages.iter() {
                    let best = covered.entry(page.0).or_insert(urgency);
                    *best = urgency.max(*best);
                }
            }
        }
        for (page, state) in (0..).zip(&self.map) {
            let covered = covered.get(&page).copied();
            match state {
                State::Absent | State::Settled => {}
                State::Bulk => prop_assert!(covered.is_some(), "page {page} is lost"),
                State::Urgent => {
                    prop_assert_eq!(covered, Some(Urgency::Urgent), "page {} is lost", page);
                }
            }
        }
        Ok(())
    }
}

proptest! {
    /// In every history, a requested page waits, is in flight, has arrived or was withdrawn; and when
    /// the source finally answers, every page arrives.
    #[test]
    fn no_page_is_lost(steps in steps()) {
        let mut model = Model::new();
        for step in steps {
            model.step(step)?;
        }
        model.requests.resume();
        model.now += POLICY.longest_backoff;
        loop {
            while model.submit()? {}
            let Some((id, _)) = model.flying(0) else { break };
            model.finish(id)?;
            model.check()?;
        }
        prop_assert_eq!(model.requests.waiting(), 0);
        prop_assert_eq!(model.requests.in_flight_bytes(), 0);
        let is_pending = |state: &State| matches!(state, State::Bulk | State::Urgent);
        prop_assert!(!model.map.iter().any(is_pending));
    }
}
