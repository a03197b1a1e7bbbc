//! What resolves the faults of a run.

use std::num::NonZeroU32;
use std::sync::Arc;

use pagetide_memory::Region;
use pagetide_pager::{
    Contents, Holes, Mode, Pager, PoolConfig, Prefetch, PrefetchConfig, ReaderConfig, Readers,
    RegionConfig, Source,
};
use pagetide_serve::WorkingSetMode;
use pagetide_sources::{FileBlob, ImageSource, RawImage};

use super::guest::{Guest, Ready};
use super::image::{Image, Mapping};
use super::plan::{Part, Series, Via, Way};
use super::raw::Loops;
use crate::benchmark::RunFailure;

/// What has a file open that is paged from. As in a server that has served VMs of an image before, all of it
/// stays open from one run to the next.
pub(super) struct Opened {
    image: Arc<Image>,
    mapping: Arc<Mapping>,
    source: Arc<dyn Source>,
    servers: Vec<((WorkingSetMode, bool), Ready)>,
}

/// What resolves faults.
pub(super) enum Paging {
    Raw(Loops),
    Engine {
        pager: Arc<Pager>,
        readers: Readers,
        prefetch: Option<Prefetch>,
    },
    Server(Box<Guest>),
}

/// What a series' server does with working sets.
pub(super) fn working_set(series: Series) -> WorkingSetMode {
    match series.way {
        Way::Replay | Way::Clone => WorkingSetMode::Replay,
        _ => WorkingSetMode::Off,
    }
}

/// Whether pages are installed before they are touched.
pub(super) fn fetches(series: Series) -> bool {
    matches!(series.part, Part::Fill | Part::Reader | Part::Unpack)
}

impl Opened {
    /// Opens the image, and reads all of it into the page cache.
    pub(super) fn open(image: &Arc<Image>) -> Result<Self, RunFailure> {
        let blob = FileBlob::open(&image.path("memory")).map_err(RunFailure::failed)?;
        let raw = RawImage::new(Arc::new(blob)).map_err(RunFailure::failed)?;
        let source = ImageSource::start(Arc::new(raw), PoolConfig::default(), |_| (), |_| ());
        Ok(Self {
            image: Arc::clone(image),
            mapping: Arc::new(image.map(false).map_err(RunFailure::failed)?),
            source: source.map_err(RunFailure::failed)?,
            servers: Vec::new(),
        })
    }

    /// The server with this working set, which is started at its first use.
    fn server(&mut self, mode: WorkingSetMode, prefetch: bool) -> Result<&mut Ready, RunFailure> {
        let wanted = (mode, prefetch);
        let found = self.servers.iter().position(|(has, _)| *has == wanted);
        let index = match found {
            Some(index) => index,
            None => {
                let ready = Ready::start(&self.image, "memory", mode, prefetch)?;
                self.servers.push((wanted, ready));
                self.servers.len() - 1
            }
        };
        Ok(&mut self.servers[index].1)
    }

    /// Begins to serve a clone of an image that another clone has brought into memory.
    pub(super) fn begin_clone(&mut self, bytes: u64) -> Result<Paging, RunFailure> {
        let server = self.server(WorkingSetMode::Replay, false)?;
        server.keep_a_clone(bytes)?;
        Ok(Paging::Server(Box::new(server.connect_clone(bytes)?)))
    }

    /// Begins to serve the faults of `region`.
    pub(super) fn begin(
        &mut self,
        region: &Arc<Region>,
        series: Series,
    ) -> Result<Paging, RunFailure> {
        let via = series.via.unwrap_or(Via::Copy);
        let around = series.around.unwrap_or(1);
        let readers = series.readers.and_then(NonZeroU32::new);
        let readers = readers.unwrap_or(NonZeroU32::MIN);
        match series.way {
            Way::Raw | Way::Map => {
                let content = Arc::clone(&self.mapping);
                let fills = series.part == Part::Reader;
                let loops = Loops::begin(region, content, via, around, readers, fills)?;
                Ok(Paging::Raw(loops))
            }
            Way::Clone => self.begin_clone(region.bytes()),
            Way::Server | Way::Replay => {
                let server = self.server(working_set(series), fetches(series))?;
                Ok(Paging::Server(Box::new(server.connect(region)?)))
            }
            Way::Engine => {
                let source = Arc::clone(&self.source);
                let (mode, contents) = match via {
                    Via::Copy => (Mode::Missing, Contents::Source(source)),
                    Via::Continue => (Mode::Minor, Contents::PageCache(Holes::AreMissing)),
                };
                let config = RegionConfig::local(Arc::clone(region), mode, contents);
                let pager = Pager::new().map_err(RunFailure::failed)?;
                pager
                    .add(config.fault_around(around.into()))
                    .map_err(RunFailure::failed)?;
                let threads = usize::try_from(readers.get()).map_err(RunFailure::failed)?;
                let readers = Readers::spawn(&pager, ReaderConfig::new(threads));
                let prefetch = fetches(series)
                    .then(|| Prefetch::spawn(&pager, PrefetchConfig::default()))
                    .transpose()
                    .map_err(RunFailure::failed)?;
                Ok(Paging::Engine {
                    readers: readers.map_err(RunFailure::failed)?,
                    pager,
                    prefetch,
                })
            }
        }
    }
}

impl Paging {
    /// Where the memory begins, if it is a clone's own.
    pub(super) fn start(&self) -> Option<u64> {
        match self {
            Self::Server(guest) => guest.start(),
            Self::Raw(_) | Self::Engine { .. } => None,
        }
    }

    /// Installs everything, or waits until everything is installed. `is_there` says so of the memory.
    pub(super) fn fill(
        &mut self,
        bytes: u64,
        is_there: impl Fn() -> Result<bool, RunFailure>,
    ) -> Result<(), RunFailure> {
        match self {
            Self::Raw(loops) => loops.fill(bytes),
            Self::Engine { prefetch, .. } => {
                if let Some(prefetch) = prefetch.take() {
                    prefetch.finish().map_err(RunFailure::failed)?;
                }
                Ok(())
            }
            Self::Server(_) => {
                while !is_there()? {
                    std::thread::sleep(std::time::Duration::from_micros(500));
                }
                Ok(())
            }
        }
    }

    /// Ends the paging, and returns the number of faults. Nobody touches a missing page any more.
    pub(super) fn end(self) -> Result<u64, RunFailure> {
        match self {
            Self::Raw(loops) => loops.end(),
            Self::Server(guest) => guest.end(),
            Self::Engine {
                pager,
                readers,
                prefetch,
            } => {
                drop(prefetch);
                let counted = readers.stop();
                match pager.trouble() {
                    Some(trouble) => Err(RunFailure::failed(trouble)),
                    None => Ok(counted.messages),
                }
            }
        }
    }
}
