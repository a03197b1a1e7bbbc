//! A blocking client of the native protocol, for VMMs and tests.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pagetide_sources::Digest;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use thiserror::Error;

use super::frame::{Decoder, Frame, FrameError, MAGIC};
use super::label::VmLabel;
use super::message::{
    Attach, AttachSpace, DecodeError, Drained, Health, MAX_DESCRIPTORS, Message, PageMapPart,
    RefusedCode, Welcome, WorkingSetAction, WorkingSetState,
};
use super::{FEATURE_LABELS, FEATURES, LOWEST_VERSION, MAX_MAP_BYTES, VERSION, socket};

/// The size of one read.
const READ_BYTES: usize = 64 << 10;

/// The bytes of a page map in one frame.
const MAP_CHUNK_BYTES: usize = 256 << 10;

/// The most notices that are kept; older ones are dropped.
const MOST_NOTICES: usize = 64;

/// Why a request had no answer that helps.
#[derive(Debug, Error)]
pub enum ClientError {
    /// There is no server at the socket.
    #[error("connecting to {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// Reading or writing failed. After a time limit ([`Client::set_timeout`]) this is `EAGAIN`, and the
    /// connection cannot be used for further requests.
    #[error("the connection to the server")]
    Connection(#[source] Errno),
    /// The server has closed the connection.
    #[error("the server has closed the connection")]
    Closed,
    /// The server has refused the request.
    #[error("refused ({code:?}): {text}")]
    Refused {
        /// Why.
        code: RefusedCode,
        /// Why, for people.
        text: String,
    },
    /// The server's bytes are no frames, or the request is too long for one.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The server's frame is no message.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The server has answered something else.
    #[error("an answer of type {kind:#06x} to another request")]
    Unexpected {
        /// The type of the answer.
        kind: u16,
    },
    /// The answer came without its descriptor.
    #[error("the server has sent no descriptor")]
    NoDescriptor,
    /// More than 16 descriptors.
    #[error("{count} descriptors: {MAX_DESCRIPTORS} is the limit")]
    TooManyDescriptors {
        /// Their number.
        count: usize,
    },
    /// The page maps are longer than a successor takes.
    #[error("the page maps have more than {MAX_MAP_BYTES} bytes")]
    MapsTooLong,
}

/// The answer to attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attached {
    /// The number of regions.
    pub regions: u32,
    /// Whether the VM replays or records a working set.
    pub working_set: WorkingSetState,
    /// All regions together, in bytes.
    pub bytes: u64,
    /// The digest of the image.
    pub image: Digest,
}

/// A memfd that clones of one image share.
#[derive(Debug)]
pub struct Shared {
    /// The file, to be mapped with `MAP_PRIVATE` and registered for MISSING and MINOR.
    pub file: OwnedFd,
    /// Its length.
    pub bytes: u64,
    /// The size of its pages in bytes.
    pub page_bytes: u64,
}

/// A connection to a server. Each request waits for its answer; notices that arrive meanwhile are kept.
///
/// The connection is the VM's life line: when it is closed, the server poisons the pages that are still
/// missing.
///
/// ```no_run
/// use std::os::fd::AsFd;
///
/// use pagetide_serve::native::client::{Client, ClientError};
/// use pagetide_serve::native::message::{Attach, Region};
/// use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
///
/// /// Restores `bytes` bytes of memory at `address`, which `uffd` has registered for MISSING.
/// fn restore(uffd: &Userfaultfd, address: u64, bytes: u64) -> Result<(), ClientError> {
///     let mut client = Client::connect("/run/pagetide.sock".as_ref())?;
///     let attach = Attach {
///         uffd_features: uffd.features().bits(),
///         regions: vec![Region::missing(address, bytes, 0)],
///     };
///     client.attach(&attach, &[uffd.as_fd()])?;
///     // The guest may run now.
///     println!("{:?}", client.health()?);
///     client.drain(|present, pages| println!("{present} of {pages} pages"))?;
///     client.goodbye()
/// }
/// ```
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    decoder: Decoder,
    descriptors: Vec<OwnedFd>,
    notices: VecDeque<Message>,
    welcome: Welcome,
    last_id: u32,
}

impl Client {
    /// Connects to the server at a socket.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(path).map_err(|source| ClientError::Connect {
            path: path.into(),
            source,
        })?;
        Self::over(stream)
    }

    /// Begins the protocol on a connection.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn over(stream: UnixStream) -> Result<Self, ClientError> {
        let none = Welcome {
            version: 0,
            max_payload_bytes: 0,
            max_regions: 0,
            max_descriptors: 0,
            max_memory_bytes: 0,
            max_map_bytes: 0,
            features: 0,
            image_bytes: 0,
            image: Digest([0; 32]),
        };
        let mut client = Self {
            stream,
            decoder: Decoder::new(),
            descriptors: Vec::new(),
            notices: VecDeque::new(),
            welcome: none,
            last_id: 0,
        };
        client.send_bytes(&MAGIC, &[])?;
        let hello = Message::Hello {
            lowest: LOWEST_VERSION,
            highest: VERSION,
            features: FEATURES,
            name: "pagetide-client".into(),
        };
        match client.request(&hello, &[])? {
            Message::Welcome(welcome) => client.welcome = welcome,
            other => return Err(unexpected(&other)),
        }
        Ok(client)
    }

    /// What the server permits, and its image.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The connection, to wait for notices in an event loop: it is readable when one arrives.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Limits the time for which a request waits for bytes of its answer; `None`, as at first, for no
    /// limit.
    ///
    /// # Errors
    /// [`ClientError::Connection`].
    pub fn set_timeout(&self, limit: Option<Duration>) -> Result<(), ClientError> {
        let set = self.stream.set_read_timeout(limit);
        set.map_err(|error| {
            ClientError::Connection(Errno::from_io_error(&error).unwrap_or(Errno::IO))
        })
    }

    /// Asks for the memfd that the clones of the image share.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn share(&mut self) -> Result<Shared, ClientError> {
        match self.request(&Message::Share, &[])? {
            Message::Shared { bytes, page_bytes } => Ok(Shared {
                file: self.descriptors.pop().ok_or(ClientError::NoDescriptor)?,
                bytes,
                page_bytes,
            }),
            other => Err(unexpected(&other)),
        }
    }

    /// Says what the VM is called in the server's log and metrics: once, before attach. Returns false, and says nothing, if
    /// the server has no [`FEATURE_LABELS`].
    ///
    /// # Errors
    /// [`ClientError`]. That the server refuses it is reported by [`Self::attach`].
    pub fn label(&mut self, label: &VmLabel) -> Result<bool, ClientError> {
        if self.welcome.features & FEATURE_LABELS == 0 {
            return Ok(false);
        }
        let _ = self.ask(&Message::Label(label.clone()), &[])?;
        Ok(true)
    }

    /// Sends the page maps of a predecessor ([`Self::hand_over`]), before attach.
    ///
    /// # Errors
    /// [`ClientError`]. A map that the server refuses is reported by [`Self::attach`].
    pub fn resume_from(&mut self, parts: &[PageMapPart]) -> Result<(), ClientError> {
        for part in parts {
            let mut rest = &part.bytes[..];
            loop {
                let (chunk, after) = rest.split_at(rest.len().min(MAP_CHUNK_BYTES));
                let message = Message::ResumeMap(PageMapPart {
                    bytes: chunk.to_vec(),
                    ..*part
                });
                rest = after;
                let id = self.next_id();
                self.send(&message.frame(id, !rest.is_empty()), &[])?;
                if rest.is_empty() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Attaches the VM's memory: from now on its faults are served. The regions name the descriptors by
    /// their place.
    ///
    /// # Errors
    /// [`ClientError`]; the connection has then ended.
    pub fn attach(
        &mut self,
        attach: &Attach,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Attached, ClientError> {
        match self.request(&Message::Attach(attach.clone()), descriptors)? {
            Message::Attached {
                regions,
                working_set,
                bytes,
                image,
            } => Ok(Attached {
                regions,
                working_set,
                bytes,
                image,
            }),
            other => Err(unexpected(&other)),
        }
    }

    /// Attaches a further address space of the VM's memory, such as a vhost-user back end's: `uffd` is its userfaultfd,
    /// with which it has registered its shared mappings of the regions' memfds for MISSING and MINOR. Returns its
    /// number. The server must have [`FEATURE_SPACES`](super::FEATURE_SPACES).
    ///
    /// # Errors
    /// [`ClientError`]; the VM goes on.
    pub fn attach_space(
        &mut self,
        space: &AttachSpace,
        uffd: BorrowedFd<'_>,
    ) -> Result<u32, ClientError> {
        match self.request(&Message::AttachSpace(space.clone()), &[uffd])? {
            Message::SpaceAttached { space } => Ok(space),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends the service of a further address space: its missing pages are poisoned there. Returns how many regions it
    /// had.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn detach_space(&mut self, space: u32) -> Result<u64, ClientError> {
        match self.request(&Message::DetachSpace { space }, &[])? {
            Message::Done { count } => Ok(count),
            other => Err(unexpected(&other)),
        }
    }

    /// The VM's state and counts.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn health(&mut self) -> Result<Health, ClientError> {
        match self.request(&Message::HealthRequest, &[])? {
            Message::Health(health) => Ok(health),
            other => Err(unexpected(&other)),
        }
    }

    /// Fetches every missing page, and waits until all are there. `progress` sees the pages that are
    /// present and all pages, some times a second.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn drain(&mut self, mut progress: impl FnMut(u64, u64)) -> Result<Drained, ClientError> {
        let id = self.ask(&Message::Drain, &[])?;
        loop {
            match self.answer_to(id)?.1 {
                Message::Progress { present, pages } => progress(present, pages),
                Message::Drained(drained) => return Ok(drained),
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// Controls the working set. Returns the state from now on, and the number of pages that were saved
    /// or are to be replayed.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn working_set(
        &mut self,
        action: WorkingSetAction,
    ) -> Result<(WorkingSetState, u64), ClientError> {
        match self.request(&Message::WorkingSet(action), &[])? {
            Message::WorkingSetState { state, pages } => Ok((state, pages)),
            other => Err(unexpected(&other)),
        }
    }

    /// Reports that `bytes` bytes of the image from `offset` on are lost in this VM. Returns the number
    /// of pages that were poisoned.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn poison(&mut self, offset: u64, bytes: u64) -> Result<u64, ClientError> {
        match self.request(&Message::Poison { offset, bytes }, &[])? {
            Message::Poisoned { pages } => Ok(pages),
            other => Err(unexpected(&other)),
        }
    }

    /// Tries stalled regions again now. Returns their number.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn resume(&mut self) -> Result<u64, ClientError> {
        match self.request(&Message::Resume, &[])? {
            Message::Done { count } => Ok(count),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends the paging by this server. Returns the page maps for a successor ([`Self::resume_from`]).
    /// Threads that touch missing pages wait for it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn hand_over(&mut self) -> Result<Vec<PageMapPart>, ClientError> {
        let id = self.ask(&Message::HandOver, &[])?;
        let mut parts: Vec<PageMapPart> = Vec::new();
        let (mut continues, mut bytes) = (false, 0);
        loop {
            match self.answer_to(id)? {
                (more, Message::PageMap(part)) => {
                    bytes += part.bytes.len().max(64);
                    if bytes > MAX_MAP_BYTES {
                        return Err(ClientError::MapsTooLong);
                    }
                    match parts.last_mut().filter(|_| continues) {
                        Some(last) => last.bytes.extend(part.bytes),
                        None => parts.push(part),
                    }
                    continues = more;
                }
                (_, Message::HandedOver { .. }) => return Ok(parts),
                (_, other) => return Err(unexpected(&other)),
            }
        }
    }

    /// Leaves, and waits until the server has let go of the VM: pages that are still missing are
    /// poisoned.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn goodbye(mut self) -> Result<(), ClientError> {
        match self.request(&Message::Goodbye, &[])? {
            Message::Left => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// The oldest notice that has arrived, without waiting.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn notice(&mut self) -> Result<Option<Message>, ClientError> {
        loop {
            if let Some(notice) = self.notices.pop_front() {
                return Ok(Some(notice));
            }
            match self.decoder.next_frame()? {
                Some(frame) => self.keep(&frame)?,
                None => match self.read(RecvFlags::DONTWAIT) {
                    Ok(()) => {}
                    Err(ClientError::Connection(Errno::AGAIN)) => return Ok(None),
                    Err(error) => return Err(error),
                },
            }
        }
    }

    /// Keeps a notice, and drops an answer that nobody waits for.
    fn keep(&mut self, frame: &Frame) -> Result<(), ClientError> {
        match Message::of(frame) {
            // Of the connection, or of a label or a page map, which have no other answer.
            Ok(message @ Message::Refused { .. }) => Err(refused(message)),
            Ok(message) if message.is_notice() => {
                if self.notices.len() >= MOST_NOTICES {
                    self.notices.pop_front();
                }
                self.notices.push_back(message);
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(DecodeError::Unknown { .. }) if frame.is_optional() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn next_id(&mut self) -> u32 {
        self.last_id = self.last_id.checked_add(1).unwrap_or(1);
        self.last_id
    }

    fn request(
        &mut self,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Message, ClientError> {
        let id = self.ask(message, descriptors)?;
        Ok(self.answer_to(id)?.1)
    }

    fn ask(
        &mut self,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<u32, ClientError> {
        let id = self.next_id();
        self.send(&message.frame(id, false), descriptors)?;
        Ok(id)
    }

    /// The next answer to request `id`, and whether another part of it follows.
    fn answer_to(&mut self, id: u32) -> Result<(bool, Message), ClientError> {
        loop {
            let Some(frame) = self.decoder.next_frame()? else {
                self.read(RecvFlags::empty())?;
                continue;
            };
            if frame.id != id {
                self.keep(&frame)?;
                continue;
            }
            return match Message::of(&frame)? {
                message @ Message::Refused { .. } => Err(refused(message)),
                message => Ok((frame.has_more(), message)),
            };
        }
    }

    fn read(&mut self, flags: RecvFlags) -> Result<(), ClientError> {
        let mut bytes = [0; READ_BYTES];
        loop {
            let got = socket::receive(&self.stream, &mut bytes, &mut self.descriptors, flags);
            return match got {
                Ok(got) if got.bytes == 0 => Err(ClientError::Closed),
                Ok(got) => {
                    self.decoder
                        .push(bytes.get(..got.bytes).unwrap_or_default());
                    Ok(())
                }
                Err(Errno::INTR) => continue,
                Err(Errno::CONNRESET) => Err(ClientError::Closed),
                Err(errno) => Err(ClientError::Connection(errno)),
            };
        }
    }

    fn send(&self, frame: &Frame, descriptors: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let count = descriptors.len();
        if count > MAX_DESCRIPTORS {
            return Err(ClientError::TooManyDescriptors { count });
        }
        let mut bytes = Vec::new();
        frame.encode(&mut bytes)?;
        self.send_bytes(&bytes, descriptors)
    }

    fn send_bytes(
        &self,
        mut bytes: &[u8],
        mut descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        while !bytes.is_empty() {
            match socket::send(&self.stream, bytes, descriptors, SendFlags::empty()) {
                Ok(sent) => {
                    descriptors = &[];
                    bytes = bytes.get(sent..).unwrap_or_default();
                }
                Err(Errno::INTR) => {}
                // Its last words may be there to read.
                Err(Errno::PIPE) => return Ok(()),
                Err(errno) => return Err(ClientError::Connection(errno)),
            }
        }
        Ok(())
    }
}

fn unexpected(answer: &Message) -> ClientError {
    let kind = answer.kind();
    ClientError::Unexpected { kind }
}

fn refused(answer: Message) -> ClientError {
    match answer {
        Message::Refused { code, text } => ClientError::Refused { code, text },
        other => unexpected(&other),
    }
}
