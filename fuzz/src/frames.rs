//! What holds for a decoder of frames, whichever protocol's.

use std::fmt::Debug;

use crate::memory::bounded;
use crate::take;

/// A protocol's decoder, and its frames.
pub(crate) trait Decode: Default {
    type Frame: PartialEq + Debug;
    type Error: Copy + PartialEq + Debug;

    /// The first bytes of a stream.
    const MAGIC: &'static [u8];

    fn push(&mut self, bytes: &[u8]);
    fn next_frame(&mut self) -> Result<Option<Self::Frame>, Self::Error>;
    fn buffered(&self) -> usize;
    /// Appends the frame's bytes.
    fn encode(frame: &Self::Frame, out: &mut Vec<u8>);

    /// Whether a frame or an error is there, if the decoder says so beforehand.
    fn announces(&self) -> Option<bool> {
        None
    }
}

/// The first byte divides the rest, which is the stream of one direction. Returns whether all of it is frames, of which
/// `is_message` takes one at least.
pub(crate) fn stream<D: Decode>(mut input: &[u8], is_message: impl Fn(&D::Frame) -> bool) -> bool {
    let [step] = take(&mut input);
    let whole = frames_of::<D>(input, input.len().max(1));
    let parts = frames_of::<D>(input, usize::from(step).max(1));
    assert_eq!(whole, parts, "in parts of {step} bytes");
    let (frames, error) = whole;
    let mut bytes = D::MAGIC.to_vec();
    let mut messages = 0;
    for frame in &frames {
        D::encode(frame, &mut bytes);
        messages += usize::from(is_message(frame));
    }
    if !frames.is_empty() {
        assert!(input.starts_with(&bytes), "frames are what their bytes say");
    }
    messages > 0 && error.is_none()
}

/// All frames of a stream that comes in parts of `step` bytes, and the error after them.
fn frames_of<D: Decode>(input: &[u8], step: usize) -> (Vec<D::Frame>, Option<D::Error>) {
    // The decoder has the bytes, twice while it grows, and a frame has its payload again.
    let limit = 8 * input.len() + 1024;
    let (decoder, frames, error) = bounded(limit, || {
        let mut decoder = D::default();
        let mut frames = Vec::new();
        for part in input.chunks(step) {
            decoder.push(part);
            loop {
                let announced = decoder.announces();
                match decoder.next_frame() {
                    Ok(Some(frame)) => {
                        assert_ne!(announced, Some(false), "a frame that was not announced");
                        frames.push(frame);
                    }
                    Ok(None) => {
                        assert_ne!(announced, Some(true), "a frame that was announced");
                        break;
                    }
                    Err(error) => {
                        assert_eq!(decoder.next_frame(), Err(error), "an error stays");
                        return (decoder, frames, Some(error));
                    }
                }
            }
        }
        (decoder, frames, None)
    });
    assert!(decoder.buffered() <= input.len());
    if error.is_none() && input.len() >= D::MAGIC.len() {
        let mut taken = D::MAGIC.to_vec();
        frames.iter().for_each(|frame| D::encode(frame, &mut taken));
        assert_eq!(decoder.buffered() + taken.len(), input.len());
    }
    (frames, error)
}
