//! A connection, from its first byte to the VM's end.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use pagetide_uapi::userfaultfd::{Features, Userfaultfd};

use super::control::Control;
use super::keeping::{Keeping, Kind};
use super::start::{Plan, Start};
use super::{Client, Common, End, Link, Vm, VmError, chain, kill};
use crate::connection::Connection;
use crate::handshake::VmRegion;
use crate::image::ServedImage;
use crate::intake::{IntakeError, drop_bytes};
use crate::log_limit::{log_refusal, log_vm};
use crate::metrics::Totals;
use crate::named_image::Offer;
use crate::native::FEATURE_SPACES;
use crate::native::attach::{AttachError, AttachedRegion, Beginning, Memory};
use crate::native::message::{MAX_DESCRIPTORS, Message, RefusedCode};
use crate::native::session::{Session, SessionError};
use crate::options::OnFailure;
use crate::parking::Parked;
use crate::receive::{First, ReceiveError, Received};
use crate::state::KeptVm;

/// Serves a VM until it has gone, or the server ends. Logs its life in one line. Returns whether the client
/// was more than a connection without a byte, as programs make that look whether somebody listens.
pub(crate) fn run(common: &Common, offer: &Offer, mut client: Client) -> bool {
    let begun = Instant::now();
    let kept = client.kept.take();
    let Client {
        number,
        socket,
        stream,
        peer,
        charge,
        ..
    } = &client;
    let (number, socket) = (*number, socket.as_str());
    if peer.pid.is_none() && common.options.on_failure == OnFailure::Kill {
        log_vm!(
            warn,
            charge,
            vm = number,
            socket,
            uid = peer.uid,
            "the VMM is in another pid namespace: instead of being killed, it will get SIGBUS"
        );
    }
    let former = kept.as_ref().map(|kept| kept.id);
    let mut received = Received::default();
    let served = match kept {
        None => serve(common, offer, &client, &mut received),
        Some(kept) => resume(common, offer, &client, kept),
    };
    let seconds = begun.elapsed().as_secs_f64();
    let (pid, uid, name) = (peer.pid, peer.uid, offer.name());
    if !matches!(served, Ok((End::HandedOver, ..)) | Err(_)) {
        stream.end();
    }
    match served {
        Ok((end, totals, memory_bytes)) => {
            log_vm!(
                info,
                charge,
                vm = number,
                socket,
                pid,
                uid,
                image = name,
                memory_bytes,
                seconds,
                faults = totals.faults,
                pages_for_faults = totals.pages_for_faults,
                pages_ahead = totals.pages_ahead,
                requests = totals.requests,
                failed_requests = totals.failed_requests,
                %end,
                "VM ended"
            );
        }
        Err(
            VmError::Receive(ReceiveError::Ended { bytes: 0 }) | VmError::Attach(AttachError::Left),
        ) => {
            tracing::debug!(vm = number, socket, pid, "a client connected and left");
            return false;
        }
        Err(error) => {
            common.metrics.count(|totals| totals.vms_refused = 1);
            log_refusal!(
                error,
                charge,
                vm = number,
                socket,
                pid,
                uid,
                image = name,
                error = &error as &dyn std::error::Error,
                "VM refused"
            );
            let is_vmm = former.is_some() || received.has_userfaultfd();
            if is_vmm && common.options.on_failure == OnFailure::Kill {
                kill(common, peer, charge);
            }
            match is_vmm || is_unreceived(&error) {
                true => park(common, client, received, former),
                false => let_go(stream),
            }
        }
    }
    true
}

/// Whether it may be a VMM whose userfaultfd was not even received.
fn is_unreceived(error: &VmError) -> bool {
    matches!(
        error,
        VmError::Receive(ReceiveError::Intake(
            IntakeError::Budget(_) | IntakeError::Porter(_)
        )) | VmError::Attach(AttachError::Session(
            SessionError::Budget(_) | SessionError::Porter(_)
        ))
    )
}

/// Ends the connection of a client that is no VMM: it costs nothing any more.
fn let_go(stream: &Connection) {
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.set_nonblocking(true);
    // Otherwise it would find an error in place of the end.
    drop_bytes(stream.as_fd());
    stream.end();
}

/// Tells the VMM that it is not served, and keeps its descriptor open until it has gone: it may be the last one, and the
/// guest's missing pages must not read as zeroes. That of a VM of a former server, with this number, stays with the keeper.
fn park(common: &Common, client: Client, received: Received, former: Option<u64>) {
    let Client { stream, charge, .. } = client;
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.set_nonblocking(true);
    let descriptors = received.descriptors;
    charge.keep_descriptors(1 + descriptors.len() as u64);
    common.parking.park(Parked {
        stream,
        _descriptors: descriptors,
        kept: common.state.clone().zip(former),
        charge,
    });
}

fn serve(
    common: &Common,
    offer: &Offer,
    client: &Client,
    received: &mut Received,
) -> Result<(End, Totals, u64), VmError> {
    let stopping = || common.stopper.is_stopping();
    let stream = &client.stream;
    let begun = Instant::now();
    let limit = common.options.handshake_limit;
    let first = received.receive(stream, &client.charge, limit, stopping)?;
    let described = match first {
        First::Native => return serve_native(common, offer, client, received, begun),
        First::Firecracker(described) => described,
    };
    received.drop_message(&client.charge);
    // Now, and not when the socket was bound: the VMM's state file is of this moment, too.
    let image = &offer.now(&common.options, &common.metrics)?;
    if !common.options.any_length {
        check_length(&described, image.image.bytes())?;
    }
    client.charge.take_vm(&described)?;
    let descriptor = received.descriptors.first().map(OwnedFd::try_clone);
    let Some(Ok(descriptor)) = descriptor else {
        return Err(ReceiveError::Descriptors { count: 0 }.into());
    };
    let uffd = Arc::new(Userfaultfd::adopt(descriptor, EVENTS).map_err(ReceiveError::from)?);
    let attached = attached(&uffd, described);
    let plan = Plan::new(common, image);
    let kind = Kind {
        is_native: false,
        recording_since_us: plan.recording_since_us(),
    };
    let start = Start {
        keeping: keep(common, image, client, &attached, kind)?,
        plan,
        ..Start::default()
    };
    let vm = Vm::new(common, image, client, attached, start)?;
    live(vm, stream)
}

/// Checks that the image is that of a VM with this memory: Firecracker's memory file has all of it, and nothing else.
fn check_length(described: &[VmRegion], image_bytes: u64) -> Result<(), VmError> {
    let end = |region: &VmRegion| region.offset.saturating_add(region.bytes());
    let vm_bytes = described.iter().map(end).max().unwrap_or(0);
    match vm_bytes == image_bytes {
        true => Ok(()),
        false => Err(VmError::OtherLength {
            vm_bytes,
            image_bytes,
        }),
    }
}

/// Keeps a VM for a successor of this server, if there is a keeper, and the VM can be kept.
fn keep(
    common: &Common,
    image: &ServedImage,
    client: &Client,
    attached: &[AttachedRegion],
    kind: Kind,
) -> Result<Option<Keeping>, VmError> {
    match &common.state {
        Some(state) => Keeping::begin(state, image, client, attached, kind),
        None => Ok(None),
    }
}

/// Goes on where a former server was killed, or has ended.
fn resume(
    common: &Common,
    offer: &Offer,
    client: &Client,
    kept: KeptVm,
) -> Result<(End, Totals, u64), VmError> {
    let Client { stream, charge, .. } = client;
    let image = &offer.opened(&common.options)?;
    let described = kept.description.vm_regions().ok_or(VmError::OtherState)?;
    if kept.description.digest != image.image.digest().to_string() {
        return Err(VmError::OtherImage {
            image: kept.description.image,
        });
    }
    let before = kept.description.file;
    if let (Some(before), Some(now)) = (before, image.image.file_identity())
        && before != now
    {
        return Err(VmError::ReplacedImage {
            // Without credentials: it is a file.
            image: kept.description.image,
            before,
            now,
        });
    }
    charge.take_vm_anyway(&described);
    if kept.description.is_native {
        // Requests and answers were cut anywhere: the VMM learns that nothing more is answered. Its memory is
        // served as long as it keeps its end open.
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
    let since_us = kept.description.recording_since_us;
    let descriptor = kept.uffd.try_clone().map_err(VmError::Keep)?;
    let uffd = Arc::new(Userfaultfd::adopt(descriptor, EVENTS).map_err(ReceiveError::from)?);
    if let Some(state) = &common.state {
        state.serve(kept.id, &uffd);
    }
    let keeping = common.state.as_ref().map(|state| Keeping {
        state: Arc::clone(state),
        id: kept.id,
        maps: kept.maps,
        // Until it is served, the next server can go on as well.
        is_handed_over: true,
    });
    let start = Start {
        keeping,
        is_running: true,
        plan: Plan::go_on(common, image, since_us),
        ..Start::default()
    };
    let mut vm = Vm::new(common, image, client, attached(&uffd, described), start)?;
    if let Some(keeping) = &mut vm.keeping {
        keeping.is_handed_over = false;
    }
    live(vm, stream)
}

/// The VMM's own features are unknown. Events that it did not ask for never come, and being ready for them
/// costs a lock.
const EVENTS: Features = Features::from_bits(
    Features::EVENT_REMOVE.bits()
        | Features::EVENT_UNMAP.bits()
        | Features::EVENT_REMAP.bits()
        | Features::EVENT_FORK.bits()
        | Features::POISON.bits(),
);

/// The regions of a VMM that speaks Firecracker's protocol.
fn attached(uffd: &Arc<Userfaultfd>, described: Vec<VmRegion>) -> Vec<AttachedRegion> {
    let attach = |region: VmRegion| AttachedRegion {
        region,
        memory: Memory::Missing,
        uffd: Arc::clone(uffd),
        maps: Vec::new(),
    };
    described.into_iter().map(attach).collect()
}

/// Serves until the end, and cleans up.
fn live(mut vm: Vm<'_>, stream: &UnixStream) -> Result<(End, Totals, u64), VmError> {
    let end = vm.serve(&mut Link::Plain(stream))?;
    let totals = vm.end(end)?;
    Ok((end, totals, vm.memory_bytes))
}

/// The same for a VMM that speaks the native protocol.
fn serve_native(
    common: &Common,
    offer: &Offer,
    client: &Client,
    received: &mut Received,
    begun: Instant,
) -> Result<(End, Totals, u64), VmError> {
    let stream = &client.stream;
    let arrived = std::mem::take(&mut received.descriptors);
    let is_too_many = received.is_cut || arrived.len() > MAX_DESCRIPTORS;
    let mut session = Session::new(stream, &received.message.bytes, arrived, &client.charge);
    received.drop_message(&client.charge);
    let image = &match offer.now(&common.options, &common.metrics) {
        Ok(image) => image,
        Err(error) => {
            // What it has sent so far stays open until it has gone.
            let (code, text) = (RefusedCode::NoContent, chain(&error));
            session.answer(0, &Message::Refused { code, text });
            session.flush();
            received.descriptors = session.take_descriptors();
            return Err(error.into());
        }
    };
    let kept = &mut received.descriptors;
    let any_length = common.options.any_length;
    let beginning = Beginning::new(&mut session, image, &common.metrics, any_length, kept);
    let attached = match is_too_many {
        true => beginning.refuse(SessionError::Descriptors),
        // From the connection on, however slowly its first bytes have come.
        false => beginning.attach(begun, common.options.handshake_limit, || {
            common.stopper.is_stopping()
        }),
    }?;
    let (id, count) = (attached.id, attached.regions.len());
    let (regions, map_bytes) = (attached.regions, attached.map_bytes);
    // A predecessor has served it.
    let is_running = regions.iter().any(|region| !region.maps.is_empty());
    // A VMM may end its recording at any time: a successor would not know.
    let kind = Kind {
        is_native: true,
        recording_since_us: None,
    };
    let start = keep(common, image, client, &regions, kind).map(|keeping| Start {
        is_native: true,
        is_running,
        keeping,
        // A guest that runs already has touched its working set.
        plan: match is_running {
            false => Plan::new(common, image),
            true => Plan::Nothing,
        },
    });
    let made = start.and_then(|start| Vm::new(common, image, client, regions, start));
    // It has taken the maps over.
    drop(map_bytes);
    let mut vm = match made {
        Ok(vm) => vm,
        Err(error) => {
            let (code, text) = (error.code(), chain(&error));
            session.answer(id, &Message::Refused { code, text });
            session.flush();
            return Err(error);
        }
    };
    if attached.features & FEATURE_SPACES != 0 {
        session.permit_descriptors();
    }
    let mut control = Box::new(Control::new(session, attached.shared));
    control.attached(id, count, &vm);
    let mut link = Link::Native(control);
    let end = vm.serve(&mut link)?;
    if end != End::Complete && link.is_drained() {
        vm.release();
    }
    let (totals, bytes) = (vm.end(end)?, vm.memory_bytes);
    drop(vm);
    received.descriptors.clear();
    if let Link::Native(mut control) = link {
        control.leave();
    }
    Ok((end, totals, bytes))
}
