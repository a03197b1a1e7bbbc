//! VMs with a label, for Prometheus: which sample of which VM belongs to which trace.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use crate::native::label::VmLabel;

/// VMs that have a sample of their own, however many there are: each is a time series for ever.
const MOST: usize = 1024;

/// The VMs with a label that are being served, by their numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct LabelledVms(Arc<Mutex<BTreeMap<u64, Labelled>>>);

#[derive(Debug)]
struct Labelled {
    socket: String,
    label: VmLabel,
}

/// One of them, until this is dropped.
#[derive(Debug)]
pub(crate) struct LabelledVm {
    vms: LabelledVms,
    number: u64,
}

impl Drop for LabelledVm {
    fn drop(&mut self) {
        self.vms.lock().remove(&self.number);
    }
}

impl LabelledVms {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Labelled>> {
        // One of its elements comes or goes.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Includes a VM with this number.
    pub(crate) fn begin(&self, number: u64, socket: &str, label: &VmLabel) -> LabelledVm {
        let (socket, label) = (socket.to_owned(), label.clone());
        self.lock().insert(number, Labelled { socket, label });
        let vms = self.clone();
        LabelledVm { vms, number }
    }

    /// A sample for each of the VMs that have come last. Returns how many have none.
    pub(crate) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<u64, fmt::Error> {
        // The name of its samples ends with _info.
        let help = "What VMs that are being served are called by their clients; of 1024 at most, which have come last";
        let mut described = encoder.encode_descriptor("vm", help, None, MetricType::Info)?;
        let vms = self.lock();
        for (number, Labelled { socket, label }) in vms.iter().rev().take(MOST) {
            let number = number.to_string();
            described.encode_info(&[
                ("vm", number.as_str()),
                ("socket", socket),
                ("id", label.id()),
                ("trace_id", label.trace_id().unwrap_or_default()),
            ])?;
        }
        Ok(vms.len().saturating_sub(MOST) as u64)
    }
}

#[cfg(test)]
mod tests {
    use crate::metrics::Metrics;

    use super::*;

    /// However many there are, and whatever the names of their sockets.
    #[test]
    fn vms_beyond_a_number_have_no_sample_and_are_counted() {
        let metrics = Metrics::default();
        let begin = |number: u64| {
            let label = VmLabel::new(format!("vm-{number}"), "").unwrap();
            metrics.labelled().begin(number, "/run/\"a\\b\n", &label)
        };
        let samples = || {
            let text = metrics.text();
            let is_sample = |line: &&str| line.starts_with("pagetide_vm_info{");
            let samples = text.lines().filter(is_sample).map(str::to_owned);
            let left_out = text.lines().find_map(|line| {
                let count = line.strip_prefix("pagetide_labelled_vms_left_out ")?;
                count.parse::<usize>().ok()
            });
            (samples.collect::<Vec<_>>(), left_out.unwrap())
        };
        let mut vms: Vec<_> = (1..=MOST as u64 + 2).map(begin).collect();
        let (found, left_out) = samples();
        assert_eq!((found.len(), left_out), (MOST, 2));
        let newest = MOST + 2;
        assert_eq!(
            found.first().unwrap(),
            &format!(
                "pagetide_vm_info{{vm=\"{newest}\",socket=\"/run/\\\"a\\\\b\\n\",id=\"vm-{newest}\",trace_id=\"\"}} 1"
            )
        );
        assert!(found.last().unwrap().contains("id=\"vm-3\""));
        // When others end, those that were left out have one.
        vms.drain(10..20);
        let (found, left_out) = samples();
        assert_eq!((found.len(), left_out), (MOST - 8, 0));
        assert!(found.last().unwrap().contains("id=\"vm-1\""));
        drop(vms);
        assert_eq!(samples(), (Vec::new(), 0));
    }
}
