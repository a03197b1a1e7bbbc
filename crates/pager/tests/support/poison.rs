//! Helpers for pages whose content is lost: no access may succeed.

use pagetide_memory::{AccessError, FaultInAccess, FaultInError, PageIndex, PageRange, Region};
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};

use super::is_mapped;

/// Whether poison can be installed in the guest mapping here; prints the reason if not.
pub fn can_poison() -> bool {
    let can = Userfaultfd::available().is_ok_and(|features| features.contains(Features::POISON));
    if !can {
        println!("SKIP: this kernel's userfaultfd lacks UFFD_FEATURE_POISON");
    }
    can
}

/// Checks that the page is inaccessible: to the kernel and to a direct access.
pub fn assert_lost(region: &Region, page: u64) {
    let pages = PageRange::single(PageIndex(page));
    let populated = region.fault_in(pages, FaultInAccess::Read);
    assert_eq!(populated, Err(FaultInError::Poisoned { pages }));
    assert!(!is_mapped(region, page));
    expect_poison(region, page);
}

/// Checks that an access to the page raises SIGBUS, at once or after a sleep in the userfaultfd.
pub fn expect_poison(region: &Region, page: u64) {
    handle_sigbus();
    let mut seen = [7; 8];
    let read = region.read_guest(PageIndex(page), 16, &mut seen);
    assert!(
        matches!(read, Err(AccessError::Poisoned { .. })),
        "page {page}: {read:?}, {seen:?}"
    );
    assert_eq!(seen, [7; 8], "nothing was read");
}

/// Makes guarded copies fail where they raise SIGBUS; any other SIGBUS ends the process.
pub fn handle_sigbus() {
    static INSTALL: std::sync::Once = std::sync::Once::new();
    INSTALL.call_once(|| {
        // SAFETY: all zeroes is a valid sigaction; only the fields below matter.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = leave_copy as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: the handler is async-signal-safe: it accesses only its arguments.
        let result =
            unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
        assert_eq!(result, 0);
    });
}

extern "C" fn leave_copy(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: installed with SA_SIGINFO, so that `info` is valid.
    let info = unsafe { &*info };
    // SAFETY: the kernel has set the address, as for every SIGBUS caused by an access.
    let at = unsafe { info.si_addr() }.addr() as u64;
    // SAFETY: the kernel has put a ucontext_t there, which the handler may change.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    if !set_result(context, at) {
        std::process::abort();
    }
}

#[cfg(target_arch = "x86_64")]
fn set_result(context: &mut libc::ucontext_t, at: u64) -> bool {
    let number = |register: libc::c_int| register.unsigned_abs() as usize;
    let registers = &mut context.uc_mcontext.gregs;
    let instruction = usize::try_from(registers[number(libc::REG_RIP)]).unwrap_or(0);
    let Some(escape) = pagetide_memory::guard::escape_from_copy(instruction) else {
        return false;
    };
    registers[number(libc::REG_RAX)] = at.cast_signed();
    registers[number(libc::REG_RDX)] = 12;
    registers[number(libc::REG_RIP)] = (escape.instruction as u64).cast_signed();
    true
}

#[cfg(target_arch = "aarch64")]
fn set_result(context: &mut libc::ucontext_t, at: u64) -> bool {
    let registers = &mut context.uc_mcontext;
    let instruction = usize::try_from(registers.pc).unwrap_or(0);
    let Some(escape) = pagetide_memory::guard::escape_from_copy(instruction) else {
        return false;
    };
    registers.regs[0] = at;
    registers.regs[1] = 12;
    registers.pc = escape.instruction as u64;
    true
}
