//! The times of the protocol. The machines have no clock: their callers measure these, and tell them what has passed.

use std::time::Duration;

macro_rules! times {
    ($($(#[$doc:meta])* $name:ident = $ms:literal;)*) => {
        $($(#[$doc])* pub const $name: Duration = Duration::from_millis($ms);)*

        /// All of them with their names.
        #[cfg(test)]
        pub(crate) const ALL: &[(&str, Duration)] = &[$((stringify!($name), $name),)*];
    };
}

times! {
    /// From the last frame that a side sent on a stream until it sends *alive* there.
    ALIVE_AFTER = 1_000;
    /// From the last byte that came on a stream until the stream is lost.
    SILENT_FOR = 5_000;
    /// From a connection's first byte until it is lost if its handshake is not done.
    HANDSHAKE_WITHIN = 5_000;
    /// The pause before the first attempt to open a lost stream again. It doubles with each attempt.
    FIRST_PAUSE = 100;
    /// The longest such pause.
    LONGEST_PAUSE = 1_000;
    /// From a record's writing until it counts as one that failed, if nobody knows by then whether it is synced.
    RECORD_WITHIN = 5_000;
    /// From a record that failed to sync until it is tried again.
    RECORD_AGAIN = 1_000;
    /// From a request until *stalled* is said of it.
    STALLED_AFTER = 1_000;
    /// `--reconnect`, where an operator sets nothing.
    RECONNECT = 30_000;
    /// `--blackout-limit`, where an operator sets nothing.
    BLACKOUT_LIMIT = 2_000;
}
