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
    /// Of those, pages that a source answered were all zeroes.
    zero_pages,
    /// Of the installed pages, those that no fault had asked for: prefetch did, or a peer pushed them.
    ahead_pages,
    /// Pages that were to be installed and were mapped already (EEXIST).
    exists,
    /// Calls that the kernel cut short (EAGAIN).
    again,
    /// Pages whose content was found to be lost: by the source, or by an uncorrected error here.
    poisoned,
    /// Faults on pages that were requested, or that another thread was installing.
    lost_claims,
    /// Exits that waited for their page.
    waits,
    /// Faults on pages that were present already.
    already_present,
    /// Pages whose mapping had been lost.
    reinstalls,
    /// Pages that were given up and faulted on: they read as zeroes now.
    zeroed,
    /// Requests that faults made.
    requests,
    /// Answers of sources that brought content.
    answers,
    /// Answers that came after their request was given up.
    late_answers,
    /// Requests that failed, or were not answered in time.
    failed_requests,
    /// Calls that mapped installed pages in stage 2.
    populations,
    /// Bytes that these calls mapped.
    populated_bytes,
    /// Pages that were populated because fast GUP could not take them.
    faulted_in,
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
