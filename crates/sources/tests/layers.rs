//! An image whose layers are objects of stores.

#![allow(clippy::unwrap_used, reason = "test code")]

mod support;

use std::sync::{Arc, Mutex};

use pagetide_sources::image::{CreateOptions, Holes, create};
use pagetide_sources::{Bases, GuestImage, Location, OpenOptions, PagetideImage, Standing};
use pagetide_test_support::eventually;
use support::{Act, Gate, Server, pattern};

/// Each of them answers when all have been asked.
#[test]
fn the_stores_of_all_layers_are_asked_at_once() {
    const LAYERS: usize = 4;
    let open = OpenOptions {
        bases: Bases::Anywhere,
        ..OpenOptions::default()
    };
    let directory = tempfile::tempdir().unwrap();
    let (raw, image) = (directory.path().join("raw"), directory.path().join("image"));
    let mut servers: Vec<Server> = Vec::new();
    for layer in 0..LAYERS as u64 {
        std::fs::write(&raw, pattern(64 << 10, layer)).unwrap();
        let base = servers.last().map(|server| server.url.parse().unwrap());
        let options = CreateOptions {
            holes: base.as_ref().map(|_| Holes::Base),
            base,
            may_replace: true,
            open: open.clone(),
            ..CreateOptions::default()
        };
        create(&raw, &image.clone().into(), &options, &mut |_, _| {}).unwrap();
        let (server, content) = (Server::start(0), std::fs::read(&image).unwrap());
        server.change(|site| site.content = content);
        servers.push(server);
    }
    let top: Location = servers.last().unwrap().url.parse().unwrap();
    let opened = PagetideImage::open(&top, &open).unwrap();
    assert_eq!(opened.standing().unwrap(), Standing::Same);

    // An answer that is late says nothing: this one was in time, although it is that of the layer that comes first.
    let replaced = servers.last().unwrap();
    replaced.change(|site| site.etag = Some("\"second\"".into()));
    eventually("all are asked within the time for one", || {
        let gate = Gate::default();
        let asked = Arc::new(Mutex::new((0, Some(gate.opens_in_the_end()))));
        for server in &servers {
            let (asked, gate) = (Arc::clone(&asked), gate.clone());
            server.behave(move |_| {
                let mut asked = asked.lock().unwrap();
                asked.0 += 1;
                if asked.0 == LAYERS {
                    asked.1 = None;
                }
                Act::Gated(gate.clone())
            });
        }
        opened.standing().unwrap() == Standing::Replaced
    });
}
