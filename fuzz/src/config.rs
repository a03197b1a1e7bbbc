//! `pagetide serve`'s file of options (`crates/cli/src/serve/settings.rs`), and the texts in it.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "the command's own code: it uses all of it"
)]

use std::fmt::Write;

use crate::memory::bounded;

/// The command is a program, and no library: its code is compiled here once more.
#[path = "../../crates/cli/src/serve/settings.rs"]
mod settings;

use pagetide_base::units::ByteSize;
use settings::Settings;

pub(crate) fn run(input: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(input) else {
        return false;
    };
    // A TOML document is a tree, whose nodes are larger than the text of the shortest; errors quote it.
    // Keys of many dots take the most: 700 bytes of memory for each byte.
    let limit = 2000 * text.len() + (64 << 10);
    let parsed = bounded(limit, || Settings::parse(text));
    let commented = Settings::parse(&format!("{text}\n# last"));
    let Ok(settings) = parsed else {
        return false;
    };
    let mut written = String::new();
    let _ = write!(written, "{settings:?}");
    match commented {
        Ok(same) => assert_eq!(format!("{same:?}"), written),
        Err(error) => panic!("a comment is refused: {error}"),
    }
    let Ok(options) = settings.options(&[]) else {
        return false;
    };
    assert!(options.fault_around_pages.is_power_of_two() && options.fault_around_pages <= 512);
    assert!(options.socket_mode <= 0o777);
    // The metrics are no option of the server.
    assert!(
        options
            .bindings
            .iter()
            .all(|binding| written.contains(&format!("{:?}", binding.socket)))
    );
    true
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    [
        "",
        "[sockets]\n\"/run/a.sock\" = \"/images/a.mem\"\n\"/run/b.sock\" = \"s3://bucket/key\"\n",
        r#"
working-set = "auto"
prefetch = "off"
fault-around = 16
metrics = "127.0.0.1:9409"
on-failure = "kill"
socket-mode = "660"
socket-owner = "1000:1000"
cache = "/var/cache/pagetide"
cache-size = "10G"
state = "/run/pagetide"
max-vms = 100
"#,
        "working-set-file = 'a'\nmetrics = \"unix:/run/m.sock\"\nworking-set = \"replay\"\n",
        "[sockets.a]\nimage = \"/a.mem\"\nsocket-mode = \"660\"\nsocket-owner = \"1:2\"\non-failure = \"kill\"\nprefetch = \"off\"\n",
        "prefetch = \"on\"\nmetrics = \"[::1]:80\"\n[sockets]\na = \"\"\"\nfile:///x\"\"\"\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}
