//! Counters of a thread that resolves faults.

macro_rules! counters {
    ($(#[$what:meta])* $type:ident: $($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $(#[$what])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $type {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl $type {
            /// Adds another thread's counts.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }

            /// The counts since `before`, an earlier value of the same thread.
            #[must_use]
            pub(crate) fn since(&self, before: &Self) -> Self {
                Self { $($name: self.$name.wrapping_sub(before.$name),)* }
            }

            /// Every count, with its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Counts of events. Each thread counts separately in its own memory; sums are computed at its end.
    Counters:
    /// Faults, of both deliveries.
    faults,
    /// Faults delivered by a userfaultfd.
    messages,
    /// Writes to pages that the owner has protected against writing.
    protected_writes,
    /// Calls that installed pages.
    installs,
    /// Pages installed.
    pages,
    /// Installed pages whose source reported zeroes.
    zero_pages,
    /// Installed pages that no fault had requested: by prefetch or by a push.
    ahead_pages,
    /// Pages that were found mapped at installation (EEXIST).
    exists,
    /// Calls that the kernel ended early (EAGAIN).
    again,
    /// Pages found to be lost: by the source, or by an uncorrected error here.
    poisoned,
    /// Faults on pages that were already requested, or that another thread was installing.
    lost_claims,
    /// Exits that waited for their page.
    waits,
    /// Faults on pages that were already present.
    already_present,
    /// Pages whose mapping had been lost.
    reinstalls,
    /// Faults on discarded pages, which now read as zeroes.
    zeroed,
    /// Requests that faults made.
    requests,
    /// Answers with content.
    answers,
    /// Answers that were handed over, and were installed by another thread than the one that completed the request.
    handed_over,
    /// Pages that a thread which waited for a page received itself.
    pages_received_by_waiter,
    /// Answers that arrived after their request was cancelled.
    late_answers,
    /// Requests that failed, or were not answered in time.
    failed_requests,
    /// Pages that prefetch set aside, because they could not be fetched or installed.
    set_aside,
    /// Calls that mapped installed pages in stage 2.
    populations,
    /// Bytes that these calls mapped.
    populated_bytes,
    /// Pages that were faulted in for an access because fast GUP could not take them.
    faulted_in,
    /// UFFDIO_WAKE calls.
    wakes,
    /// Reads of a userfaultfd.
    reads,
    /// Reads without a message.
    empty_reads,
    /// Times that a reader slept.
    sleeps,
    /// Times that prefetch paused in favour of faults.
    yields,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_added_field_by_field() {
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
