//! What a thread counts while it resolves faults.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What happened. Each thread counts for itself, in memory of its own; the sums are made
        /// when it is done.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
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
    /// Faults on pages that another thread owned.
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
