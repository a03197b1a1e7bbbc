//! `pagetide image`.

mod bar;
mod output;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use pagetide_base::units::ByteSize;
use pagetide_sources::image::{
    self, CreateError, CreateOptions, Created, DEFAULT_CHUNK_BYTES, ExtractOptions, Holes,
    ImageInfo, VerifyOptions,
};
use pagetide_sources::{
    DEFAULT_INDEX_BYTES, GuestImage, Location, MappedRam, OpenError, OpenOptions, PagetideImage,
};

use crate::failure::Failure;
use crate::print;
use crate::serve::BasesArgument;
use bar::Bar;
use output::{Document, rows, summary};
pub(crate) use output::{Row, json, lines, percent, size};

/// Standard input or output, in place of a file.
const STANDARD_STREAM: &str = "-";

/// Cloud Hypervisor's file of all memory, one range after the other.
const MEMORY_RANGES: &str = "memory-ranges";

pub(crate) const EXAMPLES: &str = "\
Examples:
  An image of a full snapshot, and one of a diff snapshot above it:
    pagetide image create snapshot.mem -o base.img
    pagetide image create diff.mem -o today.img --base base.img

  A diff of two full snapshots:
    pagetide image create later.mem -o later.img --base base.img --holes zero

  From a pipe, and from an object of a store:
    zstd -dc snapshot.mem.zst | pagetide image create - -o base.img
    pagetide image create s3://snapshots/web.mem -o web.img

  To a store, and one above it:
    pagetide image create snapshot.mem -o s3://snapshots/base.img
    pagetide image create diff.mem -o s3://snapshots/today.img --base s3://snapshots/base.img

  From a file to which QEMU has migrated with mapped-ram, and from a snapshot of Cloud Hypervisor:
    pagetide image create vm.qemu --from qemu-mapped-ram -o vm.img
    pagetide image create snapshot/ --from cloud-hypervisor -o vm.img

  One layer of many, with and without a base below it:
    pagetide image merge today.img -o full.img
    pagetide image merge today.img -o short.img --base base.img

The image names its base by the file name if both are in one directory, so that both can be moved or \
uploaded together, and by the absolute path otherwise. An image at a URL names a base that is a file as if it \
were beside the image. A base that has changed is refused.

What a pipe brings is copied to an unnamed file beside IMAGE first. Neither a pipe nor an object has holes. What goes \
to a URL is a temporary file (TMPDIR) until it is complete; an object appears when the store has all of it. An upload \
that is killed may leave parts in the store, which a rule of the bucket for incomplete uploads removes.

Exit status: 0; 1 if reading or writing failed; 2 if the command line or its files make no sense.";

pub(crate) const VERIFY_NOTES: &str = "\
The images below are read as well: a guest needs all of them. The first 20 damaged chunks are named.

Exit status: 0 if all is as it was written; 1 if not; 2 if there is no such image.";

/// How far an image is trusted.
#[derive(Debug, Args)]
pub(crate) struct OpenArguments {
    /// Where the bases of images may be: in the folder of the image that names them, or anywhere
    #[arg(long, value_enum, value_name = "WHERE", default_value_t = BasesArgument::Beside)]
    bases: BasesArgument,

    /// The most bytes of the indexes of an image and its layers together
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(DEFAULT_INDEX_BYTES))]
    max_index: ByteSize,
}

impl OpenArguments {
    fn options(&self) -> OpenOptions {
        OpenOptions {
            bases: self.bases.into(),
            index_bytes: self.max_index.0,
            ..OpenOptions::default()
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct CreateArguments {
    /// The raw memory: a file, a URL, a pipe, or - for standard input; with --from, what that says
    #[arg(value_name = "RAW", value_parser = location())]
    raw: Location,

    /// Which VMM's file RAW is
    #[arg(long, value_name = "VMM", value_enum, default_value_t = Vmm::Firecracker)]
    from: Vmm,

    /// The RAM block of QEMU's file that is the guest's memory [default: the largest]
    #[arg(long, value_name = "NAME")]
    block: Option<String>,

    /// The new image: a file or a URL
    #[arg(long, short, value_name = "IMAGE", value_parser = location())]
    output: Location,

    /// The image, a file or a URL, whose content is not stored again
    #[arg(long, value_name = "IMAGE", value_parser = location())]
    base: Option<Location>,

    /// Guest memory in a chunk: a power of two from 4K to 4M. One fault decompresses one chunk; larger
    /// chunks compress better
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(DEFAULT_CHUNK_BYTES.into()))]
    chunk: ByteSize,

    /// What a hole of RAW means: the base's content, or zeroes [default: base with --base, where a diff without any
    /// hole is refused; else zero]
    #[arg(long, value_name = "WHAT", value_enum)]
    holes: Option<HolesArgument>,

    /// Accept any length of RAW: one that is no whole number of pages, and another one than the base's
    #[arg(long)]
    any_length: bool,

    #[command(flatten)]
    open: OpenArguments,

    /// Replace an existing IMAGE
    #[arg(long)]
    force: bool,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,

    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
}

/// Who has written the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Vmm {
    /// Raw memory: Firecracker's memory file, and any other without headers
    Firecracker,
    /// A file to which QEMU 9.0 or later has migrated with the capability mapped-ram; a file or a URL
    QemuMappedRam,
    /// Cloud Hypervisor's snapshot: its folder, or the file memory-ranges in it
    CloudHypervisor,
}

#[derive(Debug, Args)]
pub(crate) struct MergeArguments {
    /// The image whose layers become one: a file or a URL
    #[arg(value_name = "IMAGE", value_parser = location())]
    image: Location,

    /// The new image: a file or a URL
    #[arg(long, short, value_name = "IMAGE", value_parser = location())]
    output: Location,

    /// The image, a file or a URL, whose content is not stored again: one of the layers, or any other of the same
    /// length
    #[arg(long, value_name = "IMAGE", value_parser = location())]
    base: Option<Location>,

    /// Guest memory in a chunk: a power of two from 4K to 4M
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(DEFAULT_CHUNK_BYTES.into()))]
    chunk: ByteSize,

    /// Accept another length of the base
    #[arg(long)]
    any_length: bool,

    #[command(flatten)]
    open: OpenArguments,

    /// Replace an existing IMAGE
    #[arg(long)]
    force: bool,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,

    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum HolesArgument {
    Base,
    Zero,
}

#[derive(Debug, Args)]
pub(crate) struct InfoArguments {
    /// The image: a file or a URL
    #[arg(value_name = "IMAGE", value_parser = location())]
    image: Location,

    #[command(flatten)]
    open: OpenArguments,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    /// The image: a file or a URL
    #[arg(value_name = "IMAGE", value_parser = location())]
    image: Location,

    #[command(flatten)]
    open: OpenArguments,

    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExtractArguments {
    /// The image: a file or a URL
    #[arg(value_name = "IMAGE", value_parser = location())]
    image: Location,

    #[command(flatten)]
    open: OpenArguments,

    /// The new raw file: a file or a URL, or - for standard output
    #[arg(long, short, value_name = "RAW", value_parser = location())]
    output: Location,

    /// Replace an existing RAW
    #[arg(long)]
    force: bool,

    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
}

/// A path, also one that is not UTF-8, or a URL.
pub(crate) fn location() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text: OsString| match text.to_str() {
        Some(text) => text.parse(),
        None => Ok(Location::Path(text.into())),
    })
}

/// A request that makes no sense.
#[derive(Debug, thiserror::Error)]
enum BadRequest {
    #[error("--chunk {0}: the size must be a power of two from 4K to 4M")]
    Chunk(ByteSize),
    #[error("--holes base needs --base")]
    HolesWithoutBase,
    #[error(
        "--holes base: only a local file has holes, and neither a pipe nor an object of a store"
    )]
    HolesOfStream,
    #[error("--holes base: a file of QEMU's has all memory, and a page that is not in it is zero")]
    HolesOfQemu,
    #[error("--block: only a file of QEMU's has RAM blocks (--from qemu-mapped-ram)")]
    BlockWithoutQemu,
    #[error(
        "--from qemu-mapped-ram: pages are read at their places; copy what the pipe brings to a file first"
    )]
    QemuStream,
}

/// Verification has found damage.
#[derive(Debug, thiserror::Error)]
#[error("{name}: {damaged} of {chunks} stored chunks are damaged")]
struct DamageFound {
    name: String,
    damaged: u64,
    chunks: u64,
}

/// Sorts an error: a request that made no sense, or a failure.
pub(crate) fn sorted(error: impl std::error::Error + 'static, is_refusal: bool) -> Failure {
    match is_refusal {
        true => Failure::bad_input(error),
        false => Failure::failed(error),
    }
}

fn open(location: &Location, arguments: &OpenArguments) -> Result<PagetideImage, Failure> {
    let opened = PagetideImage::open(location, &arguments.options());
    opened.map_err(unopened)
}

pub(crate) fn unopened(error: OpenError) -> Failure {
    let is_refusal = error.is_refusal();
    sorted(error, is_refusal)
}

/// Whether this names standard input or a pipe. Nothing is opened: that waits for whoever writes to a pipe.
fn is_stream(path: &Path) -> bool {
    let is_pipe = || std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
    path.as_os_str() == STANDARD_STREAM || is_pipe()
}

/// The raw memory of `pagetide image create`.
enum Raw<'a> {
    File(&'a Path),
    Url(&'a str),
    /// With its name.
    Stream(Box<dyn Read>, String),
}

impl<'a> Raw<'a> {
    fn open(location: &'a Location) -> std::io::Result<Self> {
        let path = match location {
            Location::Url(url) => return Ok(Self::Url(url)),
            Location::Path(path) => path,
        };
        if path.as_os_str() == STANDARD_STREAM {
            let name = "standard input".to_owned();
            return Ok(Self::Stream(Box::new(std::io::stdin()), name));
        }
        if !is_stream(path) {
            return Ok(Self::File(path));
        }
        let name = path.display().to_string();
        let pipe = std::fs::File::open(path);
        let named =
            |error: std::io::Error| std::io::Error::new(error.kind(), format!("{name}: {error}"));
        Ok(Self::Stream(Box::new(pipe.map_err(named)?), name))
    }
}

/// `pagetide image create`.
pub(crate) fn create(arguments: &CreateArguments) -> Result<(), Failure> {
    let options = create_options(arguments).map_err(Failure::bad_input)?;
    if arguments.block.is_some() && arguments.from != Vmm::QemuMappedRam {
        return Err(Failure::bad_input(BadRequest::BlockWithoutQemu));
    }
    let bar = Bar::new(arguments.quiet);
    let new = &arguments.output;
    if arguments.from == Vmm::QemuMappedRam {
        return create_from_qemu(arguments, &options, bar);
    }
    let raw = memory_of(arguments);
    let raw = Raw::open(&raw).map_err(Failure::bad_input)?;
    let progress = &mut |done, all| bar.show(done, all);
    let created = match raw {
        Raw::File(path) => image::create(path, new, &options, progress),
        _ if options.holes == Some(Holes::Base) => {
            return Err(Failure::bad_input(BadRequest::HolesOfStream));
        }
        Raw::Url(url) => image::create_from_url(url, new, &options, progress),
        Raw::Stream(mut stream, name) => {
            image::create_from_stream(&mut stream, &name, new, &options, progress)
        }
    };
    drop(bar);
    tell(created, arguments.json)
}

/// Where the memory is.
fn memory_of(arguments: &CreateArguments) -> Location {
    match &arguments.raw {
        Location::Path(path) if arguments.from == Vmm::CloudHypervisor && path.is_dir() => {
            Location::Path(path.join(MEMORY_RANGES))
        }
        raw => raw.clone(),
    }
}

fn create_from_qemu(
    arguments: &CreateArguments,
    options: &CreateOptions,
    bar: Bar,
) -> Result<(), Failure> {
    if options.holes == Some(Holes::Base) {
        return Err(Failure::bad_input(BadRequest::HolesOfQemu));
    }
    let raw = &arguments.raw;
    if let Location::Path(path) = raw
        && is_stream(path)
    {
        return Err(Failure::bad_input(BadRequest::QemuStream));
    }
    let look = &mut |memory: &MappedRam| {
        let others = memory.others().join(", ");
        if !arguments.quiet && !others.is_empty() {
            eprintln!(
                "took the RAM block {}, and left out {others}",
                memory.block()
            );
        }
    };
    let progress = &mut |done, all| bar.show(done, all);
    let block = arguments.block.as_deref();
    let new = &arguments.output;
    let created = image::create_from_mapped_ram(raw, block, new, options, look, progress);
    drop(bar);
    tell(created, arguments.json)
}

/// `pagetide image merge`.
pub(crate) fn merge(arguments: &MergeArguments) -> Result<(), Failure> {
    let options = CreateOptions {
        chunk_bytes: chunk_bytes(arguments.chunk).map_err(Failure::bad_input)?,
        base: arguments.base.clone(),
        any_length: arguments.any_length,
        may_replace: arguments.force,
        open: arguments.open.options(),
        ..CreateOptions::default()
    };
    let opened = open(&arguments.image, &arguments.open)?;
    let bar = Bar::new(arguments.quiet);
    let created = image::merge(&opened, &arguments.output, &options, &mut |done, all| {
        bar.show(done, all);
    });
    drop(bar);
    tell(created, arguments.json)
}

/// Prints what a new image is, or sorts the error.
fn tell(created: Result<Created, CreateError>, is_json: bool) -> Result<(), Failure> {
    let created = created.map_err(|error| {
        let is_refusal = error.is_refusal();
        sorted(error, is_refusal)
    })?;
    let text = match is_json {
        true => json(&Document::created(&created))?,
        false => summary(&created),
    };
    print(&text)
}

fn chunk_bytes(chunk: ByteSize) -> Result<u32, BadRequest> {
    let bytes = u32::try_from(chunk.0).map_err(|_| BadRequest::Chunk(chunk))?;
    let bounds = image::LEAST_CHUNK_BYTES..=image::MOST_CHUNK_BYTES;
    match bytes.is_power_of_two() && bounds.contains(&bytes) {
        true => Ok(bytes),
        false => Err(BadRequest::Chunk(chunk)),
    }
}

fn create_options(arguments: &CreateArguments) -> Result<CreateOptions, BadRequest> {
    let chunk_bytes = chunk_bytes(arguments.chunk)?;
    let holes = match (arguments.holes, &arguments.base) {
        (Some(HolesArgument::Base), None) => return Err(BadRequest::HolesWithoutBase),
        (Some(HolesArgument::Zero), _) => Some(Holes::Zero),
        (Some(HolesArgument::Base), _) => Some(Holes::Base),
        (None, _) => None,
    };
    Ok(CreateOptions {
        chunk_bytes,
        base: arguments.base.clone(),
        holes,
        any_length: arguments.any_length,
        open: arguments.open.options(),
        may_replace: arguments.force,
        ..CreateOptions::default()
    })
}

/// `pagetide image info`.
pub(crate) fn info(arguments: &InfoArguments) -> Result<(), Failure> {
    let info = ImageInfo::read(&arguments.image, &arguments.open.options()).map_err(unopened)?;
    let text = match arguments.json {
        true => json(&Document::new(&info))?,
        false => lines(&rows(&info)),
    };
    print(&text)
}

/// `pagetide image verify`.
pub(crate) fn verify(arguments: &VerifyArguments) -> Result<(), Failure> {
    let opened = open(&arguments.image, &arguments.open)?;
    let bar = Bar::new(arguments.quiet);
    let found = image::verify(&opened, &VerifyOptions::default(), &mut |done, all| {
        bar.show(done, all);
    });
    drop(bar);
    let mut text = String::new();
    for damage in &found.damage {
        text.push_str(&pagetide_base::one_line(damage));
        text.push('\n');
    }
    if found.is_sound() {
        let layers = match found.layers {
            1 => String::new(),
            layers => format!(" in {layers} layers"),
        };
        let stored = ByteSize(found.stored_bytes).about();
        let (name, chunks) = (opened.name(), found.chunks);
        let _ = writeln!(
            text,
            "{name}: {chunks} stored chunks{layers}, {stored}: all sound"
        );
    }
    print(&text)?;
    match found.is_sound() {
        true => Ok(()),
        false => Err(Failure::failed(DamageFound {
            name: opened.name().to_owned(),
            damaged: found.damaged_chunks,
            chunks: found.chunks,
        })),
    }
}

/// `pagetide image extract`.
pub(crate) fn extract(arguments: &ExtractArguments) -> Result<(), Failure> {
    let opened = open(&arguments.image, &arguments.open)?;
    let options = ExtractOptions {
        may_replace: arguments.force,
        ..ExtractOptions::default()
    };
    let bar = Bar::new(arguments.quiet);
    if arguments.output == Location::Path(STANDARD_STREAM.into()) {
        let (mut out, name) = (std::io::stdout().lock(), "standard output");
        let progress = &mut |done, all| bar.show(done, all);
        let written = image::extract_to_stream(&opened, &mut out, name, &options, progress);
        return written.map_err(Failure::failed);
    }
    let written = image::extract(&opened, &arguments.output, &options, &mut |done, all| {
        bar.show(done, all);
    });
    drop(bar);
    let written = written.map_err(|error| {
        let is_refusal = error.is_refusal();
        sorted(error, is_refusal)
    })?;
    let holes = match &arguments.output {
        Location::Path(_) => {
            let holes = ByteSize(opened.bytes() - written).about();
            format!(", {holes} of it in holes")
        }
        // An object has none.
        Location::Url(_) => String::new(),
    };
    print(&format!(
        "{}: {} of guest memory{holes}\n",
        arguments.output,
        ByteSize(opened.bytes()).about(),
    ))
}
