//! A forked child that reads one word.

/// What the child has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildHas {
    Content,
    Zeroes,
    /// The access has raised the signal of lost memory.
    Lost,
    Other(i32),
}

const CONTENT: i32 = 40;
const ZEROES: i32 = 41;

/// Starts a child that reads a word, and compares it with `wanted`.
pub fn fork_to_read(at: *const u64, wanted: u64) -> i32 {
    let signal = i64::from(libc::SIGCHLD);
    // Not libc's fork, which holds the allocator's lock, which threads need on which the fork waits.
    // SAFETY: without a stack or flags, clone is fork. The child makes only async-signal-safe calls.
    let child = unsafe { libc::syscall(libc::SYS_clone, signal, 0_u64, 0_u64, 0_u64, 0_u64) };
    if child == 0 {
        // SAFETY: async-signal-safe.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        // SAFETY: the memory is mapped in the parent, and no other thread is in the child.
        let found = unsafe { at.read_volatile() };
        let status = match found {
            found if found == wanted => CONTENT,
            0 => ZEROES,
            _ => 1,
        };
        // SAFETY: async-signal-safe.
        unsafe { libc::_exit(status) }
    }
    i32::try_from(child).unwrap()
}

/// What a child has found, when it has ended.
pub fn found_by(child: i32) -> ChildHas {
    let mut status = 0;
    // SAFETY: requires room for the status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    match (libc::WIFSIGNALED(status), libc::WEXITSTATUS(status)) {
        (true, _) if libc::WTERMSIG(status) == libc::SIGBUS => ChildHas::Lost,
        (false, CONTENT) => ChildHas::Content,
        (false, ZEROES) => ChildHas::Zeroes,
        _ => ChildHas::Other(status),
    }
}
