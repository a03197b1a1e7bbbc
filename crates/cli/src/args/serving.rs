//! What `pagetide image` and `pagetide working-set` take.

use clap::Subcommand;

use crate::failure::Failure;
use crate::image::{
    self, CreateArguments, ExtractArguments, InfoArguments, MergeArguments, VerifyArguments,
};
use crate::working_set::{self, CaptureArguments, WorkingSetInfoArguments};

#[derive(Debug, Subcommand)]
pub(crate) enum Image {
    /// Make an image of a raw memory file, such as a Firecracker snapshot's
    ///
    /// The image has the memory in chunks: compressed, each with a checksum, equal chunks once, zero
    /// chunks not at all. With --base it stores only what differs from another image, and a hole of
    /// the memory file means "as in the base", as in Firecracker's diff snapshots. IMAGE gets its name
    /// when it is complete; a run that fails or is interrupted leaves no IMAGE.
    #[command(after_long_help = crate::image::EXAMPLES)]
    Create(CreateArguments),
    /// Make one layer of an image and the images below it, or a layer above another base
    ///
    /// An image has at most 16 layers, and each one costs a lookup. The new image has the same guest memory. With
    /// --base it stores what differs from that image, which need not be a layer of IMAGE.
    Merge(MergeArguments),
    /// Show what an image is: sizes, chunks, digest, base
    Info(InfoArguments),
    /// Read all of an image and of the images below it, and name what is damaged
    #[command(after_long_help = crate::image::VERIFY_NOTES)]
    Verify(VerifyArguments),
    /// Write the guest memory of an image as a raw file, with holes for zeroes
    Extract(ExtractArguments),
}

#[derive(Debug, Subcommand)]
pub(crate) enum WorkingSet {
    /// Take the pages of a memory file that are present as the working set of its guests
    ///
    /// For VMs that `pagetide serve` has not restored, and so has not recorded: a VMM that maps the memory
    /// file privately, such as Firecracker with its File backend. The set is merged into the file that
    /// `pagetide serve` replays. It has no order: pages are replayed by their addresses.
    #[command(after_long_help = crate::working_set::EXAMPLES)]
    Capture(CaptureArguments),
    /// Show what a working set is: its image, pages, ranges and recordings
    Info(WorkingSetInfoArguments),
}

impl Image {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match self {
            Self::Create(arguments) => image::create(arguments),
            Self::Merge(arguments) => image::merge(arguments),
            Self::Info(arguments) => image::info(arguments),
            Self::Verify(arguments) => image::verify(arguments),
            Self::Extract(arguments) => image::extract(arguments),
        }
    }
}

impl WorkingSet {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match self {
            Self::Capture(arguments) => working_set::capture(arguments),
            Self::Info(arguments) => working_set::info(arguments),
        }
    }
}
