//! What a reader of fleet.md and restore.md types, word for word, in a system that has the package and nothing else.
//!
//! Each block of commands is taken in its place. What a guide leaves to its reader is done here, and said: the editor's
//! text, a digest of which the guide shows the beginning, a directory for images. A block that nothing here takes is an
//! error, so that a guide cannot have commands that were never run.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::container::Container;
use super::moto::{self, Moto};
use super::support::child::Vmm;
use super::support::{content, eventually};
use super::{CONFIG, Host, PAGES, word};

const FLEET: &str = include_str!("../../../../docs/guide/fleet.md");
const RESTORE: &str = include_str!("../../../../docs/guide/restore.md");

const CONTROL: &str = "/run/pagetide/control.sock";
/// Where the process of a server that is not the service's writes its number.
const SERVER_PID: &str = "/server.pid";
const WEB: &str = "/run/pagetide/web.sock";

/// A guide's blocks that were not taken yet.
struct Guide {
    name: &'static str,
    text: &'static str,
    blocks: VecDeque<String>,
}

impl Guide {
    fn of(name: &'static str, text: &'static str) -> Self {
        let parts = text.split("```").skip(1).step_by(2);
        // Of the line that opens a block, and of those of a list, nothing is meant for a shell.
        let blocks = parts.map(|block| {
            let block = block.split_once('\n').unwrap().1;
            block
                .lines()
                .map(|line| line.trim().to_owned() + "\n")
                .collect()
        });
        Self {
            name,
            text,
            blocks: blocks.collect(),
        }
    }

    /// The next block, which has this in it.
    fn block(&mut self, part: &str) -> String {
        let block = self.blocks.pop_front();
        let block = block.unwrap_or_else(|| panic!("{} has no block with {part}", self.name));
        assert!(
            block.contains(part),
            "{}: {part} is not in {block}",
            self.name
        );
        block
    }

    /// A command that stands within a sentence.
    fn says(&self, command: &'static str) -> &'static str {
        let has = self.text.contains(&format!("`{command}`"));
        assert!(has, "{} does not say {command}", self.name);
        command
    }

    fn end(self) {
        assert!(
            self.blocks.is_empty(),
            "{}: not run: {:?}",
            self.name,
            self.blocks
        );
    }
}

/// Before anything was changed in the system. Leaves the service stopped and not enabled, as it was.
pub(super) fn followed(host: &Host) {
    let reader = Reader { host };
    reader.makes_snapshots();
    let mut fleet = Guide::of("fleet.md", FLEET);
    reader.probes(&mut fleet);
    let file = fleet.block("[sockets]");
    let table = fleet.block("[sockets.\"/run/pagetide/web.sock\"]");
    reader.runs_the_package(&mut fleet);
    reader.writes_the_file(&fleet, &file);
    reader.gives_a_socket_its_own_options(&fleet, &file, &table);
    reader.makes_images(&mut fleet);
    reader.lets_systemd_listen(&mut fleet, &file);
    reader.serves_a_jail(&mut fleet);
    fleet.end();
    let mut restore = Guide::of("restore.md", RESTORE);
    reader.restores(&mut restore);
    restore.end();
}

/// Who types what the guides say.
struct Reader<'a> {
    host: &'a Host,
}

impl Reader<'_> {
    fn container(&self) -> &Container {
        &self.host.container
    }

    /// By the shell of a login, in the directory of the snapshots.
    fn shell(&self, script: &str) -> Command {
        let script = format!("cd /snapshots\n{script}");
        self.container().command(&["sh", "-e", "-c", &script])
    }

    fn types(&self, script: &str) -> String {
        done(self.shell(script), script)
    }

    /// In a terminal of its own. The last line becomes the process that is waited for.
    fn leaves_running(&self, script: &str, store: Option<&Moto>) -> Running<'_> {
        let script = script
            .trim_end()
            .replace("pagetide serve", "exec pagetide serve");
        let mut command = self.shell(&format!("echo $$ > {SERVER_PID}\n{script}"));
        if let Some(store) = store {
            moto::use_server(&mut command, store.port);
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        Running {
            reader: self,
            child: child.unwrap(),
        }
    }

    /// Full snapshots of one VM, one with its state file, and a diff that has one page.
    fn makes_snapshots(&self) {
        let container = self.container();
        fs::create_dir_all(container.file("/snapshots")).unwrap();
        let image: Vec<u8> = (0..PAGES).flat_map(content).collect();
        for name in ["web", "worker", "api"] {
            fs::write(container.file(&format!("/snapshots/{name}.mem")), &image).unwrap();
        }
        fs::write(container.file("/snapshots/web.state"), "a VMM's own\n").unwrap();
        self.types("truncate -s $(stat -c %s web.mem) web-diff.mem");
        self.types("dd if=worker.mem of=web-diff.mem bs=4096 skip=3 seek=9 count=1 conv=notrunc");
        self.types("zstd -q web.mem -o web.mem.zst");
        self.types("mkdir -p /images");
    }

    /// A VM at a socket, which is there soon, reads a page.
    fn restores_at(&self, socket: &str) -> Vmm {
        self.finds(socket);
        let program = self.container().this_program();
        let mut vm = Vmm::start_by(program, "vmm", Path::new(socket), PAGES);
        assert_eq!(vm.read(7), word(7), "{socket}");
        vm
    }

    fn finds(&self, socket: &str) {
        eventually("the socket", || {
            let mut test = self.container().command(&["test", "-S", socket]);
            test.status().unwrap().success()
        });
    }

    fn mode_of(&self, file: &str) -> String {
        self.types(&format!("stat -c %u:%g:%a {file}"))
            .trim()
            .to_owned()
    }

    /// The benchmark takes minutes and KVM, and has its own tests: what is run of it is that it exists.
    fn probes(&self, fleet: &mut Guide) {
        let block = fleet.block("pagetide probe");
        let (probe, bench) = block.trim().split_once('\n').unwrap();
        let said = self.types(probe);
        assert!(said.contains("userfaultfd"), "{said}");
        let (bench, _) = bench.split_once('#').unwrap();
        self.types(&format!("{bench} --help"));
    }

    /// From the start of the service to commands at its control socket.
    fn runs_the_package(&self, fleet: &mut Guide) {
        self.types(fleet.says("systemctl enable --now pagetide"));
        self.finds(CONTROL);
        let block = fleet.block("pagetide ctl");
        let lines: Vec<&str> = block.lines().collect();
        let [add, list, status, remove, drain] = lines[..] else {
            panic!("other commands: {block}");
        };
        self.types(add);
        let mut vm = self.restores_at("/run/pagetide/api.sock");
        assert_eq!(self.mode_of("/run/pagetide/api.sock"), "1000:1000:600");
        let said = self.types(list);
        assert!(said.contains("/run/pagetide/api.sock"), "{said}");
        let said = self.types(status);
        assert!(
            said.contains("\"vms\":1") || said.contains("\"vms\": 1"),
            "{said}"
        );
        self.types(remove);
        assert_eq!(vm.read(8), word(8), "a VM stays when its socket goes");
        self.types(drain);
        self.types("systemctl stop pagetide");
        assert_eq!(vm.read(9), word(9), "after a drain nobody is needed");
    }

    fn writes_the_file(&self, fleet: &Guide, file: &str) {
        fs::write(self.container().file(CONFIG), file).unwrap();
        self.types(fleet.says("pagetide serve --config /etc/pagetide/serve.toml --check"));
        self.types("systemctl start pagetide");
        let _web = self.restores_at(WEB);
        let _worker = self.restores_at("/run/pagetide/worker.sock");
        assert_eq!(self.mode_of(WEB), "1000:1000:600");
    }

    fn gives_a_socket_its_own_options(&self, fleet: &Guide, file: &str, table: &str) {
        let log = self.container().log();
        let digest = log.split("\"digest\":\"").nth(1).unwrap();
        let digest = digest.split('"').next().unwrap();
        let table = table.replace("5f0c…", digest);
        assert!(table.contains(digest), "{table}");
        let others: String = file
            .lines()
            .filter(|line| !line.contains(WEB))
            .map(|line| format!("{line}\n"))
            .collect();
        fs::write(self.container().file(CONFIG), others + &table).unwrap();
        self.types("pagetide serve --config /etc/pagetide/serve.toml --check");
        self.types(fleet.says("systemctl reload pagetide"));
        eventually("the socket's own options", || {
            (self.mode_of(WEB) == "1001:1001:660")
                .then_some(())
                .ok_or(self.container().log())
        });
        let _web = self.restores_at(WEB);
    }

    fn makes_images(&self, fleet: &mut Guide) {
        let block = fleet.block("pagetide image create");
        // A command goes on behind a backslash.
        let block = block.replace("\\\n", "");
        let Some(store) = Moto::start() else {
            return;
        };
        moto::put(store.port, "/snapshots", b"");
        self.types("systemctl stop pagetide");
        for line in block.lines() {
            if !line.starts_with("pagetide serve") {
                let mut command = self.shell(line);
                moto::use_server(&mut command, store.port);
                done(command, line);
                continue;
            }
            let server = self.leaves_running(line, Some(&store));
            drop(self.restores_at(WEB));
            server.ends();
        }
        self.types("test -d working-sets");
        self.types("pagetide image extract /images/web-full.image -o /snapshots/back.mem");
        self.types("dd if=web-diff.mem of=worker.mem bs=4096 skip=9 seek=9 count=1 conv=notrunc");
        self.types("cmp worker.mem back.mem");
    }

    /// The socket is systemd's, and a VM that connects starts the service.
    fn lets_systemd_listen(&self, fleet: &mut Guide, file: &str) {
        let block = fleet.block("systemctl edit pagetide.socket");
        fs::write(self.container().file(CONFIG), file).unwrap();
        let sockets = file
            .lines()
            .filter_map(|line| line.strip_prefix('"')?.split('"').next());
        let lines: String = sockets
            .map(|socket| format!("ListenStream={socket}\n"))
            .collect();
        // The editor puts the lines where systemd's text asks for them.
        let text = format!("[Socket]\n{lines}");
        fs::write(self.container().file("/lines"), text).unwrap();
        let editor =
            "#!/bin/sh\nfor file do :; done\nsed -i '/^### Anything between/r /lines' \"$file\"\n";
        fs::write(self.container().file("/editor"), editor).unwrap();
        self.types("chmod +x /editor");
        self.types("systemctl stop pagetide");
        for line in block.lines() {
            let (line, _) = line.split_once('#').unwrap_or((line, ""));
            // systemctl edits on terminals only.
            let line = line.trim();
            self.types(&format!(
                "SYSTEMD_EDITOR=/editor script -qec '{line}' /dev/null"
            ));
        }
        let _vm = self.restores_at(WEB);
        assert_eq!(self.container().property("ActiveState"), "active");
        self.types("systemctl disable --now pagetide.socket");
        self.types("systemctl revert pagetide.socket");
        self.types("systemctl disable --now pagetide");
    }

    /// All but the jailer itself: its VMM connects to what is in its jail.
    fn serves_a_jail(&self, fleet: &mut Guide) {
        let block = fleet.block("jailer");
        let is_jailers = |line: &&str| !line.starts_with("jailer") && !line.starts_with('#');
        let lines = block.lines().filter(is_jailers);
        let script: String = lines.map(|line| line.to_owned() + "\n").collect();
        let jail = "/srv/jailer/firecracker/vm1/root";
        let server = self.leaves_running(&script, None);
        let socket = format!("{jail}/run/pagetide.sock");
        let _vm = self.restores_at(&socket);
        assert_eq!(self.mode_of(&socket), "1234:1234:600");
        assert_eq!(self.mode_of(&format!("{jail}/web.state")), "1234:1234:600");
        server.ends();
    }

    fn restores(&self, restore: &mut Guide) {
        let said = self.types(restore.says("pagetide try /snapshots/web.mem"));
        assert!(said.contains("first page"), "{said}");
        let serve = restore.block("pagetide serve");
        let server = self.leaves_running(&serve, None);
        // The request to Firecracker: `--only thorough` sends such a one.
        let load = restore.block("mem_backend");
        let socket = load.split("\"backend_path\": \"").nth(1).unwrap();
        drop(self.restores_at(socket.split('"').next().unwrap()));
        server.ends();
    }
}

/// A command that runs until it is told to end.
struct Running<'a> {
    reader: &'a Reader<'a>,
    child: Child,
}

impl Running<'_> {
    fn ends(mut self) {
        self.reader.types(&format!("kill $(cat {SERVER_PID})"));
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

/// What a command prints that must succeed.
fn done(mut command: Command, what: &str) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{what}: {}: {text}{said}",
        output.status
    );
    text
}
