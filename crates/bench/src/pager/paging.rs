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

/// What is made before a run's time begins.
pub(super) enum Prepared {
    Raw(Mapping),
    Engine(Arc<dyn Source>),
    Server(Ready),
}

/// What resolves faults.
pub(super) enum Paging {
    Raw(Loops),
    Engine {
        pager: Arc<Pager>,
        readers: Readers,
        prefetch: Option<Prefetch>,
    },
    Server(Guest),
}

/// Whether pages are installed before they are touched.
fn fetches(series: Series) -> bool {
    matches!(series.part, Part::Fill | Part::Reader)
}

impl Prepared {
    /// Opens the image as the series needs it.
    pub(super) fn new(image: &Image, series: Series) -> Result<Self, RunFailure> {
        Ok(match series.way {
            Way::Raw | Way::Map => Self::Raw(image.map(false).map_err(RunFailure::failed)?),
            Way::Engine => {
                let blob = FileBlob::open(&image.path("memory")).map_err(RunFailure::failed)?;
                let image = RawImage::new(Arc::new(blob)).map_err(RunFailure::failed)?;
                let config = PoolConfig::default();
                let source = ImageSource::start(Arc::new(image), config, |_| (), |_| ());
                Self::Engine(source.map_err(RunFailure::failed)?)
            }
            Way::Server => Self::server(image, WorkingSetMode::Off, fetches(series))?,
            Way::Replay => Self::server(image, WorkingSetMode::Replay, false)?,
        })
    }

    /// A server with this working set.
    pub(super) fn server(
        image: &Image,
        mode: WorkingSetMode,
        prefetch: bool,
    ) -> Result<Self, RunFailure> {
        Ok(Self::Server(Ready::bind(image, mode, prefetch)?))
    }

    /// Begins to serve the faults of `region`.
    pub(super) fn begin(self, region: &Arc<Region>, series: Series) -> Result<Paging, RunFailure> {
        let via = series.via.unwrap_or(Via::Copy);
        let around = series.around.unwrap_or(1);
        let readers = series.readers.and_then(NonZeroU32::new);
        let readers = readers.unwrap_or(NonZeroU32::MIN);
        match self {
            Self::Raw(content) => {
                let fills = series.part == Part::Reader;
                let loops = Loops::begin(region, content, via, around, readers, fills)?;
                Ok(Paging::Raw(loops))
            }
            Self::Server(ready) => Ok(Paging::Server(ready.connect(region)?)),
            Self::Engine(source) => {
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
