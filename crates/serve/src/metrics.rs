//! Counts for Prometheus.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pagetide_pager::Waited;
use pagetide_sources::{GuestImage, ImageError, ObjectCounters};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::histogram::{Histogram, WAIT_US, WORK_US};
use crate::labelled::LabelledVms;
use crate::readiness::{Readiness, Trouble};
use crate::usage::Usage;

macro_rules! metrics {
    (
        counters { $($(#[$counter_doc:meta])* $counter:ident = $counter_help:literal,)* }
        gauges { $($(#[$gauge_doc:meta])* $gauge:ident = $gauge_help:literal,)* }
    ) => {
        /// The counts of a server at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Totals {
            $($(#[$counter_doc])* pub $counter: u64,)*
            $($(#[$gauge_doc])* pub $gauge: u64,)*
        }

        #[derive(Debug, Default)]
        struct Cells {
            $($counter: AtomicU64,)*
            $($gauge: AtomicU64,)*
        }

        impl Cells {
            fn totals(&self) -> Totals {
                Totals {
                    $($counter: self.$counter.load(Ordering::Relaxed),)*
                    $($gauge: self.$gauge.load(Ordering::Relaxed),)*
                }
            }

            /// Adds what has changed from `before` to `now`.
            fn add(&self, before: &Totals, now: &Totals) {
                $(self.$counter.fetch_add(now.$counter.wrapping_sub(before.$counter), Ordering::Relaxed);)*
                $(self.$gauge.fetch_add(now.$gauge.wrapping_sub(before.$gauge), Ordering::Relaxed);)*
            }
        }

        impl Totals {
            fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
                $(counter(encoder, stringify!($counter), $counter_help, self.$counter)?;)*
                $(gauge(encoder, stringify!($gauge), $gauge_help, self.$gauge)?;)*
                Ok(())
            }
        }
    };
}

metrics! {
    counters {
    /// VMs that were accepted.
    vms_accepted = "VMs that have connected",
    /// VMs whose message or descriptor was refused.
    vms_refused = "VMs whose message or descriptor was refused",
    /// VMs that were served and have gone.
    vms_ended = "VMs that were served and have gone",
    /// VMs that were killed because their content was unavailable.
    vms_killed = "VMs that were killed because content was unavailable",
    /// Faults of guests.
    faults = "Faults that were read from userfaultfds",
    /// Pages installed for faults.
    pages_for_faults = "Pages installed for faults, with their neighbours",
    /// Pages installed before their first touch.
    pages_ahead = "Pages installed before their first touch, by prefetch and replay",
    /// Pages requested from a source because a guest waits.
    requests = "Requests to sources for which a guest waits",
    /// Answers with content.
    answers = "Answers of sources with content",
    /// Requests that failed or were not answered in time.
    failed_requests = "Requests to sources that failed or were not answered in time",
    /// Pages that prefetch has set aside.
    pages_set_aside = "Pages that prefetch has left out because they could not be read or installed",
    /// Faults on pages that were discarded by a balloon.
    faults_on_removed = "Faults on pages that the guest had discarded, which read as zeroes",
    /// Pages that were found mapped.
    pages_found = "Pages that were already mapped when their content was to be installed",
    /// Installing calls that the kernel ended early.
    again = "Installing calls that the kernel ended early, as while a REMOVE event is unread",
    /// Failed reads of images.
    source_errors = "Failed reads of images",
    /// Regions that have stalled.
    stalls = "Times that a region has stalled because its source failed, or its memory took no content",
    /// Pages of working sets that were to be replayed.
    replayed_pages = "Pages of working sets that were replayed",
    /// Touches of pages that were not in the replayed working set, or not yet installed.
    replay_misses = "Faults of VMs with a replayed working set",
    /// Pages of working sets that were left out of their replay, to see whether guests touch them.
    sampled_pages = "Pages of working sets that were left out of their replay, to see whether guests touch them",
    /// Those that guests have touched.
    sampled_pages_touched = "Pages left out of a replay that the guest has touched",
    /// Times that the keeper has ended.
    keeper_ends = "Times that the keeper of VMs (--state) has ended while the server ran",
    /// Pages that were recorded.
    recorded_pages = "Pages in the working sets that were recorded",
    }
    gauges {
    /// VMs that are being served.
    vms = "VMs that are being served",
    /// Bytes of memory of these VMs.
    memory_bytes = "Bytes of memory of the VMs that are being served",
    /// Requests that wait to be submitted to a source.
    waiting_requests = "Requests that wait to be submitted to a source",
    /// Bytes that were requested from sources and not yet answered.
    in_flight_bytes = "Bytes that were requested from sources and not yet answered",
    /// Regions that are stalled.
    stalled_regions = "Regions that are stalled because their source failed, or their memory took no content",
    }
}

/// The counts of a server, shared by its threads.
#[derive(Clone, Debug, Default)]
pub struct Metrics(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    cells: Cells,
    /// Times from the reading of a fault's message to its resolution on that thread.
    resolve: Histogram,
    /// Times for which guests waited for pages whose content was at hand, and for others.
    waits: [Histogram; 2],
    /// Times of reads of images.
    read: Histogram,
    /// Failed reads by kind.
    errors: Mutex<Vec<(&'static str, u64)>>,
    /// The images that are served, and the counts of those that are not any more.
    images: Mutex<Images>,
    /// The sockets, and the VMs of each.
    sockets: Mutex<Vec<SocketVms>>,
    /// The VMs with a label.
    labelled: LabelledVms,
    /// What the server is ready for, once there is one.
    readiness: OnceLock<Arc<Readiness>>,
    /// Lines of the log that were dropped, if somebody counts them.
    log_lines_dropped: OnceLock<Arc<AtomicU64>>,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            cells: Cells::default(),
            resolve: Histogram::new(WORK_US),
            waits: [Histogram::new(WAIT_US), Histogram::new(WAIT_US)],
            read: Histogram::new(WORK_US),
            // A counter without a sample has no growth at its first error.
            errors: Mutex::new(ImageError::kinds().map(|kind| (kind, 0)).collect()),
            images: Mutex::default(),
            sockets: Mutex::default(),
            labelled: LabelledVms::default(),
            readiness: OnceLock::new(),
            log_lines_dropped: OnceLock::new(),
        }
    }
}

/// The labels of [`Shared::waits`].
const WAITED_FOR: [&str; 2] = ["at_hand", "source"];

/// Sockets that have a sample of their own. The others share one: each label is a time series for ever.
const MOST_SOCKETS: usize = 64;

/// The VMs of a socket.
#[derive(Debug)]
pub(crate) struct SocketVms {
    pub(crate) socket: String,
    pub(crate) image: String,
    pub(crate) usage: Arc<Usage>,
}

#[derive(Debug, Default)]
struct Images {
    served: Vec<Arc<dyn GuestImage>>,
    ended: ObjectCounters,
}

impl Images {
    fn replace(&mut self, served: Vec<Arc<dyn GuestImage>>) {
        let is_served = |old: &&Arc<dyn GuestImage>| served.iter().any(|new| Arc::ptr_eq(old, new));
        let gone = self.served.iter().filter(|old| !is_served(old));
        let gone = gone.filter_map(|image| image.counters());
        let ended = gone.fold(self.ended, ObjectCounters::plus);
        *self = Self { served, ended };
    }
}

impl Metrics {
    /// The counts at this moment.
    pub fn totals(&self) -> Totals {
        self.0.cells.totals()
    }

    /// Adds what one thread has counted since it reported `before`.
    pub(crate) fn add(&self, before: &Totals, now: &Totals) {
        self.0.cells.add(before, now);
    }

    pub(crate) fn count(&self, what: impl FnOnce(&mut Totals)) {
        let mut now = Totals::default();
        what(&mut now);
        self.add(&Totals::default(), &now);
    }

    pub(crate) fn resolved(&self, duration: Duration) {
        self.0.resolve.record(duration);
    }

    /// A guest has waited so long for a page.
    pub(crate) fn waited(&self, what: Waited, duration: Duration) {
        let [at_hand, source] = &self.0.waits;
        match what {
            Waited::Here => at_hand.record(duration),
            Waited::Source => source.record(duration),
        }
    }

    pub(crate) fn source_read(&self, duration: Duration) {
        self.0.read.record(duration);
    }

    pub(crate) fn source_error(&self, kind: &'static str) {
        self.count(|totals| totals.source_errors = 1);
        let mut errors = self.lock_errors();
        match errors.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => errors.push((kind, 1)),
        }
    }

    /// Includes the counts of these images' stores from now on.
    pub(crate) fn watch(&self, images: Vec<Arc<dyn GuestImage>>) {
        self.lock_images().replace(images);
    }

    /// Includes the numbers of VMs of these sockets, in place of former ones. The first ones have samples of their own.
    pub(crate) fn watch_sockets(&self, sockets: Vec<SocketVms>) {
        *self.lock_sockets() = sockets;
    }

    fn lock_sockets(&self) -> std::sync::MutexGuard<'_, Vec<SocketVms>> {
        self.0
            .sockets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn encode_sockets(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "VMs of a socket, and connections that are none yet; of those beyond 64 sockets together";
        let mut described =
            encoder.encode_descriptor("socket_vms", help, None, MetricType::Gauge)?;
        // A socket that was closed and bound again is one.
        let listed = self.lock_sockets();
        let mut sockets: Vec<(&str, &str, usize)> = Vec::with_capacity(listed.len());
        let mut places = HashMap::with_capacity(listed.len());
        for SocketVms {
            socket,
            image,
            usage,
        } in &*listed
        {
            let place = *places.entry((socket, image)).or_insert(sockets.len());
            match sockets.get_mut(place) {
                Some((_, _, vms)) => *vms += usage.vms(),
                None => sockets.push((socket, image, usage.vms())),
            }
        }
        let (own, others) = sockets.split_at(sockets.len().min(MOST_SOCKETS));
        let mut tell = |socket: &str, image: &str, vms: usize| {
            let vms = i64::try_from(vms).unwrap_or(i64::MAX);
            let labels = [("socket", socket), ("image", image)];
            described.encode_family(&labels)?.encode_gauge(&vms)
        };
        for (socket, image, vms) in own {
            tell(socket, image, *vms)?;
        }
        match others.is_empty() {
            true => Ok(()),
            false => {
                let vms = others.iter().map(|other| other.2).sum();
                tell("other", "other", vms)
            }
        }
    }

    /// The VMs with a label that are being served.
    pub(crate) fn labelled(&self) -> &LabelledVms {
        &self.0.labelled
    }

    /// Includes whether this server takes further VMs. The first call counts.
    pub(crate) fn watch_readiness(&self, readiness: Arc<Readiness>) {
        let _ = self.0.readiness.set(readiness);
    }

    /// All that is wrong with the server now.
    pub(crate) fn troubles(&self) -> Vec<Trouble> {
        let stalled_regions = self.totals().stalled_regions;
        let readiness = self.0.readiness.get();
        readiness.map_or_else(Vec::new, |readiness| readiness.troubles(stalled_regions))
    }

    /// Includes this count of lines of the log that were dropped. The first call counts.
    pub fn watch_log(&self, dropped: Arc<AtomicU64>) {
        let _ = self.0.log_lines_dropped.set(dropped);
    }

    /// Counts one image in place of another one, which some VMs may still have: what they read from now on is not
    /// counted.
    pub(crate) fn watch_instead(&self, former: &Arc<dyn GuestImage>, new: &Arc<dyn GuestImage>) {
        let is_other = |image: &&Arc<dyn GuestImage>| !Arc::ptr_eq(image, former);
        // Two images may be replaced at one time: what is watched does not change between the look and the change.
        let mut watched = self.lock_images();
        let others = watched.served.iter().filter(is_other).cloned();
        let images = others.chain([Arc::clone(new)]).collect();
        watched.replace(images);
    }

    /// The counts of the stores of all images.
    fn stores(&self) -> ObjectCounters {
        let images = self.lock_images();
        let counted = images.served.iter().filter_map(|image| image.counters());
        counted.fold(images.ended, ObjectCounters::plus)
    }

    fn lock_images(&self) -> std::sync::MutexGuard<'_, Images> {
        self.0.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_errors(&self) -> std::sync::MutexGuard<'_, Vec<(&'static str, u64)>> {
        self.0.errors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counts in the text format of Prometheus (OpenMetrics).
    pub fn text(&self) -> String {
        let mut registry = Registry::with_prefix("pagetide");
        registry.register_collector(Box::new(self.clone()));
        let mut text = String::new();
        // Writing into a String does not fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
        text
    }
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.totals().encode(&mut encoder)?;
        let help = "Time from the reading of a fault's message until it was resolved, or its page requested";
        let described = encoder.encode_descriptor(
            "fault_resolve_seconds",
            help,
            None,
            MetricType::Histogram,
        )?;
        self.0.resolve.encode(described)?;
        let help = "Time for which guests waited: from the reading of a fault's message until its page was there";
        let mut described =
            encoder.encode_descriptor("guest_wait_seconds", help, None, MetricType::Histogram)?;
        for (waits, what) in self.0.waits.iter().zip(WAITED_FOR) {
            waits.encode_as(&mut described, &[("for", what)])?;
        }
        let help = "Time of a read of an image that had to wait, or to decompress";
        let described =
            encoder.encode_descriptor("source_read_seconds", help, None, MetricType::Histogram)?;
        self.0.read.encode(described)?;
        let stores = self.stores();
        let counts = [
            (
                "store_gets",
                "GETs to object stores, hedges and retries included",
                stores.gets,
            ),
            (
                "store_hedges",
                "GETs that were sent because an earlier one was slow",
                stores.hedges,
            ),
            (
                "store_retries",
                "Attempts after a failed GET",
                stores.retries,
            ),
            (
                "store_bytes",
                "Bytes that object stores have sent",
                stores.bytes,
            ),
            (
                "store_memory_hits",
                "Blocks of objects that were found in memory",
                stores.memory_hits,
            ),
            (
                "store_disk_hits",
                "Blocks of objects that were found in the disk cache",
                stores.disk_hits,
            ),
            (
                "store_misses",
                "Blocks of objects that were in neither",
                stores.misses,
            ),
            (
                "store_disk_damaged",
                "Files of the disk cache that were damaged",
                stores.disk_damaged,
            ),
        ];
        for (name, help, value) in counts {
            counter(&mut encoder, name, help, value)?;
        }
        let is_ready = !self.troubles().into_iter().any(Trouble::refuses_vms);
        let help = "Whether the server takes further VMs: 1 or 0";
        gauge(&mut encoder, "ready", help, is_ready.into())?;
        let waiting = self.0.readiness.get();
        let waiting = waiting.map_or(0, |readiness| readiness.waiting());
        let help =
            "Sockets that are not served yet, since their image or the socket cannot be opened";
        gauge(&mut encoder, "sockets_waiting", help, waiting as u64)?;
        self.encode_sockets(&mut encoder)?;
        let left_out = self.labelled().encode(&mut encoder)?;
        let help =
            "VMs with a label that have no sample of pagetide_vm_info, since 1024 have come later";
        gauge(&mut encoder, "labelled_vms_left_out", help, left_out)?;
        let dropped = self.0.log_lines_dropped.get();
        let dropped = dropped.map_or(0, |dropped| dropped.load(Ordering::Relaxed));
        let help = "Lines of the log that were dropped, because standard error did not take them";
        counter(&mut encoder, "log_lines_dropped", help, dropped)?;
        let errors = self.lock_errors().clone();
        let help = "Failed reads of images by kind";
        let mut described =
            encoder.encode_descriptor("source_errors_by_kind", help, None, MetricType::Counter)?;
        for (kind, count) in errors {
            let label = [("kind", kind)];
            described
                .encode_family(&label)?
                .encode_counter::<NoLabelSet, u64, u64>(&count, None)?;
        }
        Ok(())
    }
}

fn counter(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    use prometheus_client::metrics::counter::ConstCounter;
    let metric = ConstCounter::new(value);
    let described = encoder.encode_descriptor(name, help, None, metric.metric_type())?;
    metric.encode(described)
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    use prometheus_client::metrics::gauge::ConstGauge;
    let metric = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
    let described = encoder.encode_descriptor(name, help, None, metric.metric_type())?;
    metric.encode(described)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_every_count_and_all_histograms() {
        let metrics = Metrics::default();
        metrics.count(|totals| totals.faults = 3);
        let before = Totals {
            vms: 2,
            ..Totals::default()
        };
        metrics.add(&Totals::default(), &before);
        metrics.add(&before, &Totals { vms: 1, ..before });
        metrics.resolved(Duration::from_micros(7));
        metrics.resolved(Duration::from_secs(3));
        metrics.waited(Waited::Here, Duration::from_micros(9));
        metrics.waited(Waited::Source, Duration::from_secs(59));
        metrics.waited(Waited::Source, Duration::from_secs(61));
        metrics.source_error("late");
        metrics.source_error("late");
        let text = metrics.text();
        for line in [
            "pagetide_faults_total 3",
            "pagetide_vms 1",
            "pagetide_source_errors_by_kind_total{kind=\"late\"} 2",
            "pagetide_source_errors_by_kind_total{kind=\"damaged\"} 0",
            "pagetide_fault_resolve_seconds_count 2",
            "pagetide_fault_resolve_seconds_bucket{le=\"+Inf\"} 2",
            "pagetide_fault_resolve_seconds_bucket{le=\"0.000008\"} 1",
            "pagetide_guest_wait_seconds_count{for=\"at_hand\"} 1",
            "pagetide_guest_wait_seconds_bucket{le=\"0.000016\",for=\"at_hand\"} 1",
            "pagetide_guest_wait_seconds_bucket{le=\"30.0\",for=\"source\"} 0",
            "pagetide_guest_wait_seconds_bucket{le=\"60.0\",for=\"source\"} 1",
            "pagetide_guest_wait_seconds_bucket{le=\"+Inf\",for=\"source\"} 2",
        ] {
            assert!(text.contains(line), "{line} is missing in:\n{text}");
        }
    }

    /// However many sockets there are, and whatever their names.
    #[test]
    fn sockets_beyond_a_number_share_a_sample() {
        let metrics = Metrics::default();
        let socket = |number: usize| {
            let usage = Arc::<Usage>::default();
            usage.begin();
            SocketVms {
                socket: format!("/run/\"{number}"),
                image: "/a.mem".to_owned(),
                usage,
            }
        };
        metrics.watch_sockets((0..70).map(socket).collect());
        let text = metrics.text();
        let samples = text
            .lines()
            .filter(|line| line.starts_with("pagetide_socket_vms{"));
        assert_eq!(samples.count(), 65, "{text}");
        for line in [
            "pagetide_socket_vms{socket=\"/run/\\\"63\",image=\"/a.mem\"} 1",
            "pagetide_socket_vms{socket=\"other\",image=\"other\"} 6",
        ] {
            assert!(text.contains(line), "{line} is missing in:\n{text}");
        }
    }
}
