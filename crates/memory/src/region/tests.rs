mod paging;

use std::error::Error as _;

use pagetide_uapi::host::HugepagePool;

use super::*;

const GPA: GuestAddress = GuestAddress(4 << 30);

/// A region of `backing`; on a machine without such memory, prints the reason and returns `None`.
fn region(bytes: u64, backing: Backing) -> Option<Region> {
    match Region::new(GPA, bytes, backing) {
        Ok(region) => Some(region),
        Err(
            error @ (RegionError::HugepagesNotReserved { .. }
            | RegionError::NoHugepagePool { .. }
            | RegionError::NoTransparentHugepages),
        ) => {
            println!("SKIP: {backing}: {error}");
            None
        }
        Err(error) => panic!("{backing}: {error}"),
    }
}

fn pages(first: u64, count: u64) -> PageRange {
    PageRange::new(PageIndex(first), count)
}

#[test]
fn both_mappings_show_the_same_memory() {
    for backing in Backing::ALL {
        let bytes = 4 * backing.page_size().bytes();
        let Some(region) = region(bytes, backing) else {
            continue;
        };
        let page = PageIndex(3);
        let text = b"written where the guest would";
        region.write_guest(page, 5, text).unwrap();

        let mut seen = vec![0; text.len()];
        match region.read_service(page, 5, &mut seen) {
            Ok(()) => assert_eq!(seen, text),
            Err(error) => {
                assert_eq!(
                    (backing, error),
                    (Backing::Anonymous, AccessError::NoServiceMapping)
                );
            }
        }
        if backing.has_file() {
            region.write_service(page, 6, b"R").unwrap();
            region.read_guest(page, 5, &mut seen).unwrap();
            assert_eq!(&seen[..3], b"wRi");
        }
    }
}

#[test]
fn a_word_is_read_in_place() {
    let region = region(2 << 12, Backing::Shmem).unwrap();
    let word = region.service_word(PageIndex(1), 8).unwrap();
    region
        .write_guest(PageIndex(1), 8, &7_u64.to_ne_bytes())
        .unwrap();
    assert_eq!(word.load(Ordering::Relaxed), 7);
    assert!(region.service_word(PageIndex(1), 4).is_none());
    assert!(region.service_word(PageIndex(1), 4089).is_none());
    assert!(region.service_word(PageIndex(2), 0).is_none());
}

#[test]
fn mappings_are_congruent_to_the_gpa() {
    for (gpa, backing) in [
        (GPA, Backing::Shmem),
        (GuestAddress(0x5000), Backing::Thp),
        (GPA, Backing::Anonymous),
    ] {
        let region = match Region::new(gpa, 0x3000, backing) {
            Ok(region) => region,
            Err(RegionError::NoTransparentHugepages) => {
                println!("SKIP: no transparent huge pages in this kernel");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        for mapping in [Some(region.guest()), region.service()]
            .into_iter()
            .flatten()
        {
            let distance = mapping.start().as_u64().wrapping_sub(gpa.0);
            assert!(PageSize::Size2M.divides(distance), "{backing}: {mapping}");
        }
    }
}

#[test]
fn addresses_and_pages_translate_both_ways() {
    let region = Region::new(GPA, 0x4000, Backing::Shmem).unwrap();
    let gpa = GuestAddress(GPA.0 + 0x2345);
    let hva = region.gpa_to_hva(gpa).unwrap();
    assert_eq!(hva.0 - region.guest().start().0, 0x2345);
    assert_eq!(region.hva_to_gpa(hva), Some(gpa));
    assert_eq!(region.page_of_gpa(gpa), Some(PageIndex(2)));
    assert_eq!(region.page_of_hva(hva), Some(PageIndex(2)));
    assert_eq!(
        region.gpa_of_page(PageIndex(2)),
        Some(GuestAddress(GPA.0 + 0x2000))
    );

    let end = region.range().end();
    assert_eq!(region.gpa_to_hva(end), None);
    assert_eq!(region.page_of_gpa(GuestAddress(GPA.0 - 1)), None);
    assert_eq!(region.page_of_gpa(end), None);
    assert_eq!(region.page_of_hva(region.guest().end()), None);
    assert_eq!(region.gpa_of_page(PageIndex(4)), None);
    assert_eq!(region.guest_range(pages(1, 4)), None);
    assert_eq!(region.guest_range(pages(1, 0)), None);
    assert_eq!(region.guest_range(pages(u64::MAX - 1, 1)), None);
    let range = region.guest_range(pages(1, 3)).unwrap();
    assert_eq!((range.end(), range.bytes()), (region.guest().end(), 0x3000));
}

#[test]
fn accesses_outside_are_refused() {
    let region = Region::new(GPA, 0x2000, Backing::Shmem).unwrap();
    for (page, offset, len) in [
        (1, 0x1000, 1),
        (1, 0xfff, 2),
        (2, 0, 1),
        (u64::MAX, 0, 1),
        (0, u64::MAX, 1),
    ] {
        let page = PageIndex(page);
        let expected = Err(AccessError::Outside { page, offset, len });
        let mut bytes = vec![0; len];
        assert_eq!(region.write_service(page, offset, &bytes), expected);
        assert_eq!(region.read_service(page, offset, &mut bytes), expected);
        assert_eq!(region.write_guest(page, offset, &bytes), expected);
        assert_eq!(region.read_guest(page, offset, &mut bytes), expected);
    }
    assert_eq!(region.write_service(PageIndex(0), 0, &[1; 0x2000]), Ok(()));
}

#[test]
fn punching_drops_content_and_zapping_preserves_it() {
    for backing in Backing::ALL {
        let bytes = 2 * backing.page_size().bytes();
        let Some(region) = region(bytes, backing) else {
            continue;
        };
        let mut seen = [0];
        region.write_guest(PageIndex(0), 0, &[7]).unwrap();
        region.write_guest(PageIndex(1), 0, &[8]).unwrap();

        match region.zap_guest(region.all_pages()) {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(
                    (backing, error),
                    (Backing::Anonymous, AccessError::NoServiceMapping)
                );
            }
        }
        region.read_guest(PageIndex(0), 0, &mut seen).unwrap();
        assert_eq!(seen, [7], "{backing}");

        region.punch(pages(0, 1)).unwrap();
        region.read_guest(PageIndex(0), 0, &mut seen).unwrap();
        assert_eq!(seen, [0], "{backing}");
        region.read_guest(PageIndex(1), 0, &mut seen).unwrap();
        assert_eq!(seen, [8], "{backing}");
    }
}

#[test]
fn faulting_in_makes_pages_present() {
    for (backing, access) in [
        (Backing::Shmem, FaultInAccess::Read),
        (Backing::Shmem, FaultInAccess::Write),
        (Backing::Anonymous, FaultInAccess::Write),
    ] {
        let region = Region::new(GPA, 0x4000, backing).unwrap();
        assert_eq!(resident_pages(&region), 0);
        region.fault_in(pages(1, 2), access).unwrap();
        assert_eq!(resident_pages(&region), 2, "{backing}");
        let beyond = pages(3, 2);
        let refused = region.fault_in(beyond, access);
        assert_eq!(refused, Err(FaultInError::NoSuchPages { pages: beyond }));
    }
}

/// The number of pages of the guest mapping with a page table entry, from `/proc/self/pagemap`.
fn resident_pages(region: &Region) -> usize {
    use std::os::unix::fs::FileExt;
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    let mut entries = vec![0; region.guest().bytes() / 4096 * 8];
    pagemap
        .read_exact_at(&mut entries, region.guest().start().as_u64() / 4096 * 8)
        .unwrap();
    entries
        .as_chunks::<8>()
        .0
        .iter()
        .filter(|entry| u64::from_le_bytes(**entry) >> 63 == 1)
        .count()
}

#[test]
fn impossible_sizes_are_refused() {
    let refuse = |gpa, bytes, backing| Region::new(GuestAddress(gpa), bytes, backing).unwrap_err();
    assert!(matches!(refuse(0, 0, Backing::Shmem), RegionError::Empty));
    for (gpa, bytes, backing) in [
        (0, 4097, Backing::Shmem),
        (1, 4096, Backing::Anonymous),
        (0, 4096, Backing::Hugetlb2M),
        (4096, 2 << 20, Backing::Hugetlb2M),
        (0, 2 << 20, Backing::Hugetlb1G),
    ] {
        let error = refuse(gpa, bytes, backing);
        assert!(
            matches!(error, RegionError::NotPageMultiple { .. }),
            "{error}"
        );
    }
    let error = refuse(!0xfff, 0x2000, Backing::Shmem);
    assert!(matches!(error, RegionError::Wraps { .. }), "{error}");
}

#[test]
fn a_region_larger_than_the_host_memory_is_refused_with_the_available_size() {
    for backing in [Backing::Shmem, Backing::Anonymous] {
        let error = Region::new(GuestAddress(0), 1 << 50, backing).unwrap_err();
        let RegionError::DoesNotFit {
            bytes,
            available_bytes,
            ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!(bytes, 1 << 50);
        assert!(available_bytes > 0);
    }
    let Some(pool) = HugepagePool::read(PageSize::Size2M.bytes()) else {
        println!("SKIP: no hugetlb pool of 2M pages");
        return;
    };
    let asked = pool.total + 1;
    let error = Region::new(GuestAddress(0), asked << 21, Backing::Hugetlb2M).unwrap_err();
    let text = error.to_string();
    let RegionError::HugepagesNotReserved {
        wanted, setting, ..
    } = error
    else {
        panic!("{text}")
    };
    assert_eq!(wanted, asked);
    assert_eq!(setting, pool.setting);
    assert!(text.contains("hugepages-2048kB/nr_hugepages"), "{text}");
}

#[test]
fn errors_chain_their_causes() {
    let error = RegionError::SizeFile {
        bytes: 1,
        errno: Errno::FBIG,
    };
    assert_eq!(error.source().unwrap().to_string(), Errno::FBIG.to_string());
}
