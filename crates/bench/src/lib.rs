//! Pagetide's benchmarks: what they measure, how they sum it up, and how they show it.
//!
//! - [`paging`]: how fast absent guest memory comes in, through userfaultfd and through KVM exits.
//! - [`memslots`]: what a change of memory slots costs running vCPUs, by the method of the change.
//! - [`populate`]: what it saves to fill the stage-2 tables before vCPUs fault.
//! - [`benchmark`]: what each of them is to those who run it; [`prepare`]: what it may lack here.
//! - [`memcycler`]: what memory errors take from a guest's speed and memory.
//! - [`pager`]: what the demand-paging engine and the server add to the shortest loop that pages.
//! - [`model`]: what all benchmarks have in common as data: quantities, columns, comparisons, records.
//! - [`report`]: a result as a terminal table, JSON, SVG and one self-contained HTML page.
//! - [`noise`]: how busy others kept the machine meanwhile.
//!
//! Every benchmark follows the same rules: what is compared runs interleaved in one go, medians and
//! their spread are shown, content is verified after every run, and the report says what machine,
//! kernel and clock the figures come from.

pub mod benchmark;
pub mod draw;
pub mod facts;
pub mod latency;
mod limits;
mod machine;
pub mod memcycler;
pub mod memslots;
pub mod model;
pub mod noise;
pub mod options;
pub mod pager;
pub mod paging;
pub mod populate;
pub mod prepare;
pub mod progress;
pub mod report;
mod schedule;
pub mod stats;
pub mod timing;

pub use pagetide_base::{one_line, units};
