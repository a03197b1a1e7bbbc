//! What a VM's kernel says on its console.

/// Beginnings of messages that no test may cause.
const COMPLAINTS: [&str; 10] = [
    "WARNING: CPU:",
    "WARNING: possible",
    "WARNING: suspicious",
    "WARNING: bad unlock",
    "BUG:",
    "Oops",
    "INFO: task ",
    "kernel BUG at",
    "Kernel panic",
    "rcu: INFO:",
];

/// The lines in which the kernel complains about itself.
pub(super) fn complaints(console: &str) -> Vec<String> {
    console
        .lines()
        .map(|line| strip_time(line.trim_end()))
        .filter(|line| COMPLAINTS.iter().any(|start| line.starts_with(start)))
        .map(str::to_owned)
        .collect()
}

/// Takes the `[    1.234567] ` of printk away.
fn strip_time(line: &str) -> &str {
    let inner = line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("] "));
    match inner {
        Some((time, rest)) if time.trim().parse::<f64>().is_ok() => rest,
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complaints_are_found() {
        let console = "[    0.000000] Linux version 6.12\n\
                       [   12.345678] WARNING: CPU: 1 PID: 77 at virt/kvm/kvm_main.c:1 f+0x1/0x2\r\n\
                       [    1.000000] x86/cpu: WARNING: not this one\n\
                       BUG: KASAN: slab-use-after-free\n";
        let found = complaints(console);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("WARNING: CPU: 1"));
    }
}
