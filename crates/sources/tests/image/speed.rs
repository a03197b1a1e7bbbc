//! How fast an image is read. Figures depend on the machine, so that nothing is asserted; run it with
//! `cargo test --release -p pagetide-sources --test image -- --ignored --nocapture`.

use std::time::Instant;

use crate::common::{Place, Random};
use pagetide_memory::Urgency;
use pagetide_pager::Filled;
use pagetide_sources::image::CreateOptions;
use pagetide_sources::{GuestImage, Location, OpenOptions, PagetideImage};

const MEMORY: u64 = 512 << 20;
const STEP: u64 = 1 << 20;

/// Half of it zero in runs of 1 MiB; the rest compresses about 3 to 1.
fn write_memory(place: &Place) {
    let mut random = Random(1);
    let words: Vec<[u8; 8]> = (0..4096).map(|_| random.next().to_le_bytes()).collect();
    let mut parts = Vec::new();
    for step in (0..MEMORY / STEP).step_by(2) {
        let mut content = Vec::new();
        while content.len() < 1 << 20 {
            let number = random.next();
            match number % 8 {
                0 => content.extend(random.bytes(8)),
                1 | 2 => content.extend([0; 24]),
                _ => {
                    let word = usize::try_from(number >> 8 & 0x3ff).expect("few");
                    content.extend(words[word]);
                }
            }
        }
        content.truncate(1 << 20);
        parts.push((step * STEP, content));
    }
    let parts: Vec<_> = parts
        .iter()
        .map(|(at, part)| (*at, part.as_slice()))
        .collect();
    place.write_sparse("raw", MEMORY, &parts);
}

fn open(place: &Place, cache_bytes: usize) -> PagetideImage {
    let location = Location::Path(place.path("image"));
    PagetideImage::open(
        &location,
        &OpenOptions {
            cache_bytes,
            ..OpenOptions::default()
        },
    )
    .expect("it opens")
}

/// Reads pages at random by `read_now`; prints the median and the 99th percentile.
fn random_pages(image: &PagetideImage, what: &str) {
    let mut random = Random(2);
    let mut page = [0; 4096];
    let mut times = Vec::new();
    let mut waited = 0;
    while times.len() < 20_000 {
        let offset = random.below(MEMORY / 4096) * 4096;
        let begun = Instant::now();
        let filled = image.read_now(offset, &mut page, Urgency::Urgent);
        let elapsed = begun.elapsed();
        match filled {
            Some(Filled::Bytes) => times.push(elapsed),
            Some(_) => {}
            None => {
                // Not in the page cache, and nothing else is wrong.
                let read = image.read(offset, &mut page, Urgency::Urgent);
                read.expect("it is readable");
                waited += 1;
            }
        }
    }
    times.sort_unstable();
    let (median, late) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    println!("{what}: a random 4K page in {median:?}, 99 % within {late:?}; not at once: {waited}");
}

#[test]
#[ignore = "measures"]
fn reading_takes() {
    let place = Place::new();
    write_memory(&place);
    let created = place.create("raw", "image", &CreateOptions::default());
    let info = created.info;
    println!(
        "created in {:?}; zero: {} of {} chunks; data to stored: {:.2}",
        created.elapsed,
        info.zero_chunks,
        info.chunks,
        info.stored_chunks as f64 * 65_536.0 / info.stored_bytes as f64
    );
    random_pages(&open(&place, 0), "without a cache");
    random_pages(&open(&place, 32 << 20), "with a cache of 32 MiB");
    random_pages(&open(&place, 1 << 30), "with a cache of 1 GiB");
    let image = open(&place, 32 << 20);
    for round in 0..3 {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let image = &image;
                scope.spawn(move || {
                    let mut buffer = vec![0; 1 << 20];
                    for step in (0..MEMORY / STEP).filter(|step| step / 2 % 2 == thread) {
                        let read = image.read(step * STEP, &mut buffer, Urgency::Bulk);
                        read.expect("it is readable");
                    }
                });
            }
        });
        let elapsed = begun.elapsed();
        let rate = MEMORY as f64 / (1 << 30) as f64 / elapsed.as_secs_f64();
        println!("round {round}: all of it by two threads in {elapsed:?}, {rate:.2} GiB/s");
    }
}
