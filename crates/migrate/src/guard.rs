//! The guards: the rules without which an execution ends with two owners, none, or a page that is lost or stale. The
//! protocol's document has them by the same numbers. A test turns off one at a time, and expects the model to find out.

macro_rules! guards {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        /// One guard.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(crate) enum Guard {
            $($(#[$doc])* $name = $number,)*
        }

        #[cfg(test)]
        impl Guard {
            /// All guards, in the order of their numbers.
            pub(crate) const ALL: &'static [Self] = &[$(Self::$name,)*];
        }
    };
}

guards! {
    /// Source: what was sent and not acknowledged on a stream that is lost is dirty, and after the seal to be sent again.
    Unacknowledged = 1,
    /// Source: a page is sent at most once in a round; what was lost or damaged goes into the next one.
    OncePerRound = 2,
    /// Source: dirty pages are harvested once more when the last vCPU has stopped.
    LastHarvest = 3,
    /// Source: it seals when every stream that is up has acknowledged its end mark.
    EndMarksAcknowledged = 4,
    /// Both: the destination says *ready*, and the source yields, only if both have the same digest of the missing map.
    SameMap = 5,
    /// Source: *c* leaves it only after *yielded* is synced.
    YieldSynced = 6,
    /// Source: a *yielded* that failed to sync is not shown: *c* stays secret.
    FailedYieldHidden = 7,
    /// Source: a *yielded* that failed to sync binds: the VM stays paused until a later record is synced.
    FailedYieldBinds = 8,
    /// Source: after a seal the VM runs only when *running again* is synced.
    RunningAgainSynced = 9,
    /// Source: after the yield the VM runs only against *r*.
    RefusalNeeded = 10,
    /// Source: *r* is what has the hash that the destination gave before the first page.
    RefusalVerified = 11,
    /// Source: it believes no operator that the other host is dead, if it knows that the VM has run there.
    NoFenceAfterEntered = 12,
    /// Source: when the destination has sent its map, exactly these pages are sent.
    MapDecides = 13,
    /// Source: memory is kept until *complete*, or the operator's release.
    KeptUntilComplete = 14,
    /// Destination: content of a round that is not newer than what was taken is dropped.
    NewestRoundWins = 15,
    /// Destination: a page that is being stored is not stored a second time meanwhile.
    OneStoreAtATime = 16,
    /// Destination: a record is acknowledged only when it is stored.
    StoredFirst = 17,
    /// Destination: a record that is damaged is not stored.
    DamagedDropped = 18,
    /// Destination: after the seal no record of precopy is stored.
    PrecopyEnds = 19,
    /// Destination: stale copies of missing pages are destroyed before anything reads memory.
    MissingPunched = 20,
    /// Destination: in postcopy a page is installed once.
    InstalledOnce = 21,
    /// Destination: it enters the guest only with *c*.
    CommitNeeded = 22,
    /// Destination: *c* is what has the hash that the source gave before the first page.
    CommitVerified = 23,
    /// Destination: it enters the guest only when *entered* is synced.
    EnteredSynced = 24,
    /// Destination: an *entered* that failed to sync is not acted on.
    FailedEnteredHidden = 25,
    /// Destination: once it has begun to refuse, it never enters.
    RefusedForGood = 26,
    /// Destination: once it has *c*, it never refuses.
    NoRefusalAfterCommit = 27,
    /// Destination: one that was started again never enters: its memory is gone.
    RestartRefuses = 28,
    /// Destination: it says *complete* only when nothing is missing.
    NothingMissing = 29,
    /// Destination: it loads the state only if it is whole, and has the length and the digest that the seal says.
    SameState = 30,
    /// Source: where *running again* cannot be synced, the VM runs only when the holder of its memory has ended.
    HolderEnded = 31,
    /// Source: it says *released* only when its memory and the holder are gone, so that no restart needs the destination.
    FreedFirst = 32,
    /// Source: it forgets the migration when it has heard that the destination has ended, or has waited for that in vain.
    KeptUntilHeard = 33,
    /// Destination: it keeps *r* until the source has said that it has it, or has ended without it.
    RefusalKept = 34,
    /// Source: it sends what the destination's map says only if that has the digest that *resume* says.
    ResumedMap = 35,
    /// Destination: it answers a damaged record only if the record's bytes confirm how many pages it has.
    PagesConfirmed = 36,
}

/// The guards that are in force: all, except in a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Guards {
    #[cfg(test)]
    pub(crate) off: Option<Guard>,
}

impl Guards {
    /// All guards but one.
    #[cfg(test)]
    pub(crate) fn without(guard: Guard) -> Self {
        Self { off: Some(guard) }
    }

    /// Whether the guard is in force.
    #[inline]
    pub(crate) fn has(self, guard: Guard) -> bool {
        #[cfg(test)]
        {
            self.off != Some(guard)
        }
        #[cfg(not(test))]
        {
            let _ = guard;
            true
        }
    }
}
