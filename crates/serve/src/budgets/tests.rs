use pagetide_memory::{HostAddress, HostRange, PageSize};

use super::*;

fn budgets() -> Budgets {
    Budgets::new(UserLimits::default(), None)
}

#[test]
fn a_user_at_its_limit_takes_nothing_of_another() {
    let budgets = budgets();
    let first: Vec<_> = (0..3).map_while(|_| budgets.charge(1, 2).ok()).collect();
    assert_eq!(first.len(), 2);
    assert!(budgets.charge(2, 2).is_ok());
    drop(first);
    assert!(budgets.charge(1, 1).is_ok());
}

/// Kind: a line of the log for each of something that a client can make any number of.
#[test]
fn the_lines_of_a_user_are_limited_however_often_it_connects() {
    let budgets = budgets();
    let logged = |asked: usize, may_log: fn(&Charge) -> Option<u64>| {
        let asked = (0..asked).map(|_| budgets.charge(1, 1).unwrap());
        asked.filter(|charge| may_log(charge).is_some()).count()
    };
    // More than the limit if this takes longer than its period.
    let refusals = logged(1000, Charge::may_log_refusal);
    assert!((100..1000).contains(&refusals), "{refusals}");
    let lives = logged(10_000, Charge::may_log_vm);
    assert!((4096..10_000).contains(&lives), "{lives}");
    let other = budgets.charge(2, 1).unwrap();
    assert_eq!(other.may_log_refusal(), Some(0));
    assert_eq!(other.may_log_vm(), Some(0));
}

#[test]
fn users_without_a_connection_are_forgotten_when_there_are_many() {
    let budgets = limited(Resource::Pages, 8);
    let _kept = budgets.charge(u32::MAX, 1).unwrap();
    // It has no connection, and something that is charged to it.
    let turned_away = budgets.of_turned_away(u32::MAX);
    turned_away.take(Resource::Pages, 8).unwrap();
    for uid in 0..3000 {
        drop(budgets.charge(uid, 1));
    }
    assert!(budgets.users.lock().unwrap().len() <= IDLE_USERS + 3);
    assert!(budgets.charge(u32::MAX, 1).is_err());
    let again = budgets.of_turned_away(u32::MAX);
    assert!(again.take(Resource::Pages, 1).is_err());
}

/// Kind: all users' clients share what one of them can use up.
#[test]
fn clients_that_are_turned_away_are_charged_to_their_users() {
    let budgets = budgets();
    let (_open, ours): (Vec<_>, Vec<_>) = (0..CLOSINGS)
        .map(|_| std::os::unix::net::UnixStream::pair().unwrap())
        .unzip();
    let first = budgets.of_turned_away(1);
    let closings = ours.into_iter().map(OwnedFd::from);
    first.closings().unwrap().extend(closings);
    assert!(budgets.of_turned_away(1).closings().is_err());
    assert!(budgets.of_turned_away(2).closings().is_ok());
    assert!(budgets.charge(1, 1).unwrap().closings().is_ok());
}

fn region(pages: usize) -> VmRegion {
    VmRegion {
        range: HostRange::new(HostAddress(4096), pages * 4096).unwrap(),
        page_size: PageSize::Size4K,
        offset: 0,
    }
}

/// The limits of a server, with little of one resource.
fn limited(resource: Resource, limit: u64) -> Budgets {
    let mut limits = UserLimits::default();
    let field = match resource {
        Resource::Threads => &mut limits.threads,
        Resource::Descriptors => &mut limits.descriptors,
        Resource::Mappings => &mut limits.mappings,
        Resource::Regions => &mut limits.regions,
        _ => &mut limits.pages,
    };
    *field = limit;
    Budgets::new(limits, None)
}

#[test]
fn whatever_vms_cost_is_charged_to_their_user_until_they_have_gone() {
    let regions = [region(10), region(20)];
    // What one VM of these regions takes.
    for (resource, cost) in [
        (Resource::Threads, 3),
        (Resource::Descriptors, 14),
        (Resource::Mappings, 9),
        (Resource::Regions, 2),
        (Resource::Pages, 30),
    ] {
        let budgets = limited(resource, 2 * cost);
        let vm = |uid| {
            let charge = budgets.charge(uid, usize::MAX)?;
            charge.take_vm(&regions).map(|()| charge)
        };
        let (first, _second) = (vm(1).unwrap(), vm(1).unwrap());
        let error = vm(1).unwrap_err();
        assert_eq!(error.resource, resource);
        let text = error.to_string();
        assert!(text.contains(&resource.to_string()), "{text}");
        assert!(text.ends_with(resource.remedy()), "{text}");
        assert!(vm(2).is_ok(), "{resource}: another user");
        drop(first);
        assert!(vm(1).is_ok(), "{resource}: it has gone");
    }
}

#[test]
fn a_refused_amount_takes_nothing() {
    let budgets = limited(Resource::Pages, 30);
    let charge = budgets.charge(1, 1).unwrap();
    charge.take_vm(&[region(31)]).unwrap_err();
    charge.take_vm(&[region(30)]).unwrap();
    charge.give_back(Resource::Pages, 30);
    charge.take_vm(&[region(30)]).unwrap();
    drop(charge);
    assert_eq!(*budgets.user(1, Kind::Client).lock(), Amounts::NONE);
}

#[test]
fn a_process_has_limits_and_one_user_leaves_a_part_of_them() {
    let limits = UserLimits::of_this_process();
    let all = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let all = all.current.unwrap();
    assert!(limits.descriptors < all && limits.descriptors > all / 2);
    assert!(limits.threads < u64::MAX && limits.mappings < u64::MAX);
}
