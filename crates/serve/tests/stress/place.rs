//! The directory of one run: images, sockets, the state, and the store.

use std::path::PathBuf;

use pagetide_sources::image::{CreateOptions, create};
use pagetide_test_support::{eventually, mix};
use tempfile::TempDir;

use crate::servers::{Holdings, Serving};
use crate::store;
use crate::vmms::Socket;

pub const PAGE: usize = 4096;

/// Pages of the image: four of 2M.
pub const IMAGE_PAGES: usize = 2048;

/// The word at `index` of a page of the image.
pub fn image_word(page: usize, index: usize) -> u64 {
    match page % 7 {
        3 => 0,
        _ => mix((page * 512 + index / 4) as u64),
    }
}

pub struct Place {
    pub directory: TempDir,
    pub store: store::Server,
}

impl Place {
    /// A raw memory file, and the same memory as a Pagetide image in the store.
    pub fn new(seed: u64) -> Self {
        let directory = tempfile::Builder::new()
            .prefix(&format!("pagetide-stress-{seed}-"))
            .tempdir()
            .unwrap();
        let memory: Vec<u8> = (0..IMAGE_PAGES)
            .flat_map(|page| (0..PAGE / 8).map(move |index| image_word(page, index)))
            .flat_map(u64::to_le_bytes)
            .collect();
        let (raw, image) = (
            directory.path().join("guest.mem"),
            directory.path().join("image"),
        );
        std::fs::write(&raw, memory).unwrap();
        create(
            &raw,
            &image.clone().into(),
            &CreateOptions::default(),
            &mut |_, _| {},
        )
        .unwrap();
        let store = store::Server::start(0);
        let content = std::fs::read(&image).unwrap();
        store.change(|site| site.content = content);
        Self { directory, store }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn socket(&self, server: &str, socket: Socket) -> PathBuf {
        self.path(&format!("{server}-{}.sock", socket.name()))
    }

    pub fn keeper_socket(&self) -> PathBuf {
        self.path("state/keeper.sock")
    }

    /// The keeper's process, which outlives the servers.
    pub fn keeper(&self) -> u32 {
        eventually("the keeper", || {
            let processes = std::fs::read_dir("/proc").unwrap().flatten();
            let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
            let mut pids = pids.filter(|pid: &u32| {
                let has = |file: &str, text: &[u8]| {
                    let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
                    bytes.windows(text.len()).any(|part| part == text)
                };
                let directory = self.directory.path().as_os_str().as_encoded_bytes();
                has("cmdline", b"keeper_process") && has("environ", directory)
            });
            pids.next()
        })
    }

    /// Waits until no VM is left at a server, nor a client that it refused.
    pub fn wait_for_idle(&self, server: &Serving) {
        let pid = server.pid();
        eventually("idle servers", || {
            let threads = Holdings::vm_threads(pid);
            if threads == 0 { Ok(()) } else { Err(threads) }
        });
        // The thread's end comes before that of what it has.
        const LOOKS: usize = 30;
        let mut seen = Holdings::of(pid);
        let mut looks = 0;
        eventually("an idle server changes nothing", || {
            let now = Holdings::of(pid);
            looks = if now == seen { looks + 1 } else { 0 };
            seen = now;
            if looks < LOOKS { Err(looks) } else { Ok(()) }
        });
    }
}
