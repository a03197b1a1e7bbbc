//! What the tour shows, in the order of `pagetide --help`.

/// Where a stop's commands run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// On this machine and its kernel.
    Host,
    /// On the patched kernel, in a VM with two CPUs that counts instructions.
    Lab,
    /// In a VM with one CPU, as guests need that take interrupts.
    LabWithOneCpu,
}

/// One command of the tour.
#[derive(Debug)]
pub(super) struct Stop {
    /// Of its picture.
    pub(super) name: &'static str,
    /// The command.
    pub(super) title: &'static str,
    /// What the command is for.
    pub(super) purpose: &'static str,
    pub(super) place: Place,
    /// Shell commands, one a line. A line that begins with @ is run and not shown.
    pub(super) commands: &'static str,
}

impl Stop {
    /// The commands that are shown.
    pub(super) fn shown(&self) -> Vec<&'static str> {
        let lines = self.commands.lines();
        lines.filter(|line| hidden(line).is_none()).collect()
    }
}

/// A line of [`Stop::commands`] that is not shown.
pub(super) fn hidden(line: &str) -> Option<&str> {
    line.strip_prefix('@')
}

pub(super) const STOPS: [Stop; 15] = [
    Stop {
        name: "try",
        title: "pagetide try",
        purpose: "How long would a VM wait for its memory, if it were restored from a file? It takes any \
                  file of\nwhole pages of 4 KiB, and needs neither root nor KVM.",
        place: Place::Host,
        commands: "@rm -f web.mem.working-set\npagetide try web.mem",
    },
    Stop {
        name: "serve",
        title: "pagetide serve",
        purpose: "Restores VMs: each runs at once, and its pages come as its guest touches them. `restored` is the \
                  example of what\na VMM does ([vmm.md](guide/vmm.md)); [restore.md](guide/restore.md) shows Firecracker.",
        place: Place::Host,
        commands: "@rm -f web.sock control.sock\n\
                   pagetide serve --control control.sock web.sock=web.mem &\n\
                   @server=$!; wait_for test -S control.sock\n\
                   restored web.sock 256\n\
                   @wait_for sh -c \"pagetide ctl --control control.sock status | grep 'VMs  *0'\"\n\
                   @kill $server; wait $server",
    },
    Stop {
        name: "ctl",
        title: "pagetide ctl",
        purpose: "Says to a running server what to serve, and asks how it is.",
        place: Place::Host,
        commands: "@rm -f web.sock control.sock\n\
                   @pagetide serve --control control.sock web.sock=web.mem & server=$!; wait_for test -S control.sock\n\
                   pagetide ctl --control control.sock add shop.sock=web.mem\n\
                   pagetide ctl --control control.sock list\n\
                   pagetide ctl --control control.sock drain web.sock\n\
                   pagetide ctl --control control.sock remove shop.sock\n\
                   pagetide ctl --control control.sock status\n\
                   @kill $server; wait $server",
    },
    Stop {
        name: "probe",
        title: "pagetide probe",
        purpose: "What has this kernel, and what does the command do without the rest?",
        place: Place::Host,
        commands: "pagetide probe",
    },
    Stop {
        name: "image",
        title: "pagetide image",
        purpose: "Keeps snapshots compressed, each page once, with checksums, and a later one as what differs from an \
                  earlier one.",
        place: Place::Host,
        commands: "@rm -f *.img back.mem; cp web.mem later.mem; printf changed | dd of=later.mem bs=1M seek=9 conv=notrunc\n\
                   pagetide image create web.mem -o web.img\n\
                   pagetide image create later.mem -o later.img --base web.img --holes zero\n\
                   pagetide image info later.img\n\
                   pagetide image verify later.img\n\
                   pagetide image merge later.img -o whole.img\n\
                   pagetide image extract whole.img -o back.mem\n\
                   cmp back.mem later.mem && echo equal\n\
                   @rm -f *.img later.mem back.mem",
    },
    Stop {
        name: "working-set",
        title: "pagetide working-set",
        purpose: "Shows which pages are fetched ahead of the next guest, and takes them from memory that is present.",
        place: Place::Host,
        commands: "pagetide working-set info web.mem.working-set\n\
                   pagetide working-set capture web.mem --page-cache -o cached.working-set",
    },
    Stop {
        name: "run",
        title: "pagetide run",
        purpose: "Boots a Linux guest, here with none of its memory: its processor leaves KVM_RUN for each missing \
                  page.",
        place: Place::LabWithOneCpu,
        commands: "pagetide run --kernel vmlinux --initrd initramfs.cpio --paging exit --cmdline 'quiet -- uname -a'",
    },
    Stop {
        name: "bench-paging",
        title: "pagetide bench paging",
        purpose: "How fast does absent guest memory come in, through userfaultfd and through exits from KVM_RUN?",
        place: Place::Lab,
        commands: "pagetide bench paging --quiet --vcpus 1 --per-vcpu 4M --fault-around 1,16 --readers 1 --runs 3 --out paging",
    },
    Stop {
        name: "bench-memslots",
        title: "pagetide bench memslots",
        purpose: "What does a change of memory slots cost running vCPUs, by one ioctl, by stopping them, or by a hole?",
        place: Place::Lab,
        commands: "pagetide bench memslots --quiet --vcpus 2 --ops split --commits 8 --runs 3 --out memslots",
    },
    Stop {
        name: "bench-populate",
        title: "pagetide bench populate",
        purpose: "How fast do stage-2 tables fill before vCPUs access memory, and what does that save the guest?",
        place: Place::Lab,
        commands: "pagetide bench populate --quiet --vcpus 2 --memory 16M --threads 1 --runs 3 --out populate",
    },
    Stop {
        name: "bench-memcycler",
        title: "pagetide bench memcycler",
        purpose: "What do memory errors take from a running guest?",
        place: Place::Lab,
        commands: "pagetide bench memcycler --quiet --memory 32M --poison 0,25 --seconds 1 --runs 3 --out memcycler",
    },
    Stop {
        name: "bench-pager",
        title: "pagetide bench pager",
        purpose: "What do the pager and its server add to the shortest loop that pages from a file?",
        place: Place::Host,
        commands: "pagetide bench pager --quiet --part random,fill --memory 64M --runs 3 --out pager",
    },
    Stop {
        name: "bench-all",
        title: "pagetide bench all",
        purpose: "Runs every benchmark that this machine can run, here small ones and without KVM, and leaves one file.",
        place: Place::Host,
        commands: "pagetide bench all --quick --quiet --out all > all.txt\n\
                   grep -e == -e 'not measured' -e 'All results' all.txt",
    },
    Stop {
        name: "bench-show",
        title: "pagetide bench show",
        purpose: "Shows the report of an earlier benchmark again, and draws its page.",
        place: Place::Host,
        commands: "pagetide bench show pager/pager.json --out again\n\
                   ls again",
    },
    Stop {
        name: "completions",
        title: "pagetide completions",
        purpose: "Prints the completion script of a shell.",
        place: Place::Host,
        commands: "pagetide completions bash > pagetide.bash\n\
                   wc -l pagetide.bash",
    },
];
