//! What a thread counts while it resolves faults.

macro_rules! counters {
    ($(#[$what:meta])* $type:ident: $($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $(#[$what])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $type {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl $type {
            /// Adds what another thread counted.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }

            /// Every count, with its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// What happened. Each thread counts for itself, in memory of its own; the sums are made when it
    /// is done.
    Counters:
    /// Faults delivered, by either way.
    faults,
    /// Faults delivered by a userfaultfd.
    messages,
    /// Calls that installed something.
    installs,
    /// Pages installed.
    pages,
    /// Pages that were to be installed and were mapped already (EEXIST).
    exists,
    /// Calls that the kernel cut short (EAGAIN).
    again,
    /// Pages whose content was found to be lost: by the source, or by an uncorrected error here.
    poisoned,
    /// Faults on pages that another thread owned, and pages that prefetch found taken.
    lost_claims,
    /// Of those, exits that waited for the owner.
    waits,
    /// Faults on pages that were present already.
    already_present,
    /// Pages whose mapping had been lost.
    reinstalls,
    /// Pages that were populated because fast GUP could not take them.
    populates,
    /// UFFDIO_WAKE calls.
    wakes,
    /// Reads of a userfaultfd.
    reads,
    /// Of those, reads that found no message.
    empty_reads,
    /// Times that a reader went to sleep.
    sleeps,
    /// Times that prefetch gave way to faults.
    yields,
}

counters! {
    /// What became of the pages that arrived without being asked for.
    PopulateCounters:
    /// Ranges handed over by prefetch and by faults that brought neighbours in.
    ranges,
    /// Of those, ranges that became part of one that was waiting.
    merged,
    /// Of those, ranges for which there was no room, or no time.
    dropped,
    /// Bytes in the ranges that were dropped: the guest faults on them.
    dropped_bytes,
    /// Batches that were mapped.
    calls,
    /// Bytes in those batches.
    asked_bytes,
    /// Bytes that the sink says it mapped.
    mapped_bytes,
    /// Times that population gave way to faults.
    yields,
    /// Batches that failed: one at most, since it ends the population.
    failures,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_made_field_by_field() {
        let mut sum = Counters {
            faults: 1,
            wakes: 2,
            ..Counters::default()
        };
        sum.add(&Counters {
            faults: 10,
            sleeps: 5,
            ..Counters::default()
        });
        assert_eq!(
            sum,
            Counters {
                faults: 11,
                wakes: 2,
                sleeps: 5,
                ..Counters::default()
            }
        );
        assert!(sum.named().any(|named| named == ("wakes", 2)));
    }
}
