//! The devices of a Linux guest: two serial ports, and remains of a PC's keyboard controller and clock.
//!
//! | ports | what | effect |
//! |---|---|---|
//! | 0x3f8 to 0x3ff, IRQ 4 | ttyS0 | the console |
//! | 0x2f8 to 0x2ff, IRQ 3 | ttyS1 | a line that is a number from 0 to 255 ends the run with that status; `discard GPA BYTES`, both hexadecimal, gives up memory |
//! | 0x64 | keyboard controller | 0xfe resets |
//! | 0xcf9 | reset control | bit 2 resets |
//! | 0x70, 0x71 | clock and CMOS | reads as 0, so that the guest does not wait for it |
//!
//! Any other port reads as all ones, as if there was no device.

use std::io::{self, Write};

use pagetide_memory::GuestRange;
use vm_superio::serial::{Error as SerialError, NoEvents};
use vm_superio::{Serial, Trigger};

use super::discard;

/// The console's interrupt line.
pub(super) const CONSOLE_IRQ: u32 = 4;
/// The status port's interrupt line.
pub(super) const STATUS_IRQ: u32 = 3;

const CONSOLE: u16 = 0x3f8;
const STATUS: u16 = 0x2f8;
const SERIAL_PORTS: u16 = 8;
const KEYBOARD: u16 = 0x64;
const KEYBOARD_RESET: u32 = 0xfe;
const CMOS: [u16; 2] = [0x70, 0x71];
const RESET_CONTROL: u16 = 0xcf9;
const RESET_BIT: u32 = 1 << 2;

/// The start of Linux's message when it panics.
const PANIC: &str = "Kernel panic - not syncing";
/// How much of a line is kept.
const LINE_BYTES: usize = 256;

/// A device failed on the host's side.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The console's output cannot be written.
    #[error("cannot write the guest's console")]
    Console(#[source] io::Error),
    /// KVM refuses an interrupt.
    #[error("cannot raise the interrupt of a serial port")]
    Interrupt(#[source] io::Error),
}

impl From<SerialError<io::Error>> for DeviceError {
    fn from(error: SerialError<io::Error>) -> Self {
        match error {
            SerialError::Trigger(source) => Self::Interrupt(source),
            SerialError::IOError(source) => Self::Console(source),
            // Only input without room fails like this, and `input` looks at the room first.
            SerialError::FullFifo => Self::Console(io::ErrorKind::StorageFull.into()),
        }
    }
}

/// What a guest requests with a write to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Reset,
    Exit(u8),
    /// It gives up this memory.
    Discard(GuestRange),
}

/// All devices of a guest.
pub(super) struct Devices<T: Trigger<E = io::Error>> {
    console: Serial<T, NoEvents, Console>,
    status: Serial<T, NoEvents, StatusLine>,
}

impl<T: Trigger<E = io::Error>> Devices<T> {
    /// `console_line` and `status_line` raise [`CONSOLE_IRQ`] and [`STATUS_IRQ`].
    pub(super) fn new(console_line: T, status_line: T, output: Box<dyn Write + Send>) -> Self {
        let console = Console {
            output,
            line: Line::default(),
            panic: None,
        };
        Self {
            console: Serial::new(console_line, console),
            status: Serial::new(status_line, StatusLine::default()),
        }
    }

    /// The guest writes an element of up to 4 bytes.
    pub(super) fn write(&mut self, port: u16, value: u32) -> Result<Option<Request>, DeviceError> {
        let [byte, ..] = value.to_le_bytes();
        if let Some(register) = register(port, CONSOLE) {
            self.console.write(register, byte)?;
        } else if let Some(register) = register(port, STATUS) {
            self.status.write(register, byte)?;
            return Ok(self.status.writer_mut().request.take());
        }
        let reset = (port == KEYBOARD && value == KEYBOARD_RESET)
            || (port == RESET_CONTROL && value & RESET_BIT != 0);
        Ok(reset.then_some(Request::Reset))
    }

    /// The guest reads an element of up to 4 bytes.
    pub(super) fn read(&mut self, port: u16) -> u32 {
        const NOTHING: u32 = u32::MAX;
        let byte = |byte: u8| (NOTHING << 8) | u32::from(byte);
        if let Some(register) = register(port, CONSOLE) {
            byte(self.console.read(register))
        } else if let Some(register) = register(port, STATUS) {
            byte(self.status.read(register))
        } else if port == KEYBOARD || CMOS.contains(&port) {
            byte(0)
        } else {
            NOTHING
        }
    }

    /// Puts as much input into the console as there is room for; returns how many bytes that was.
    pub(super) fn input(&mut self, input: &[u8]) -> Result<usize, DeviceError> {
        let room = self.console.fifo_capacity().min(input.len());
        if room == 0 {
            return Ok(0);
        }
        Ok(self.console.enqueue_raw_bytes(&input[..room])?)
    }

    /// The kernel's panic message, if it panicked.
    pub(super) fn panic_message(&self) -> Option<&str> {
        self.console.writer().panic.as_deref()
    }
}

/// The register that a port is, if it is one of the serial port's.
fn register(port: u16, first: u16) -> Option<u8> {
    let register = port.checked_sub(first).filter(|n| *n < SERIAL_PORTS)?;
    u8::try_from(register).ok()
}

/// The start of the line that the guest is writing.
#[derive(Default)]
struct Line(Vec<u8>);

impl Line {
    /// Adds a byte; returns the line if it ends with that byte.
    fn push(&mut self, byte: u8) -> Option<String> {
        if byte != b'\n' {
            if self.0.len() < LINE_BYTES {
                self.0.push(byte);
            }
            return None;
        }
        let line = String::from_utf8_lossy(&self.0).trim().to_owned();
        self.0.clear();
        Some(line)
    }
}

/// Forwards the console's output, and looks for a panic.
struct Console {
    output: Box<dyn Write + Send>,
    line: Line,
    panic: Option<String>,
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for line in bytes.iter().filter_map(|byte| self.line.push(*byte)) {
            if let Some(start) = line.find(PANIC) {
                self.panic.get_or_insert_with(|| line[start..].to_owned());
            }
        }
        self.output.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

/// Parses the lines on `ttyS1`: a status, or memory to discard.
#[derive(Default)]
struct StatusLine {
    line: Line,
    request: Option<Request>,
}

impl Write for StatusLine {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for line in bytes.iter().filter_map(|byte| self.line.push(*byte)) {
            let status = line.parse().ok().map(Request::Exit);
            self.request = status.or_else(|| discard::parse(&line).map(Request::Discard));
            if self.request.is_none() {
                tracing::warn!("the guest wrote {line:?} to ttyS1, which is no request");
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_memory::GuestAddress;
    use std::cell::Cell;
    use std::rc::Rc;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Count(Rc<Cell<u32>>);

    impl Trigger for Count {
        type E = io::Error;

        fn trigger(&self) -> io::Result<()> {
            self.0.set(self.0.get() + 1);
            Ok(())
        }
    }

    #[derive(Clone, Default)]
    struct Screen(Arc<Mutex<Vec<u8>>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn devices() -> (Devices<Count>, Screen, Count) {
        let (screen, count) = (Screen::default(), Count::default());
        let output = Box::new(screen.clone());
        let devices = Devices::new(count.clone(), Count::default(), output);
        (devices, screen, count)
    }

    fn print(devices: &mut Devices<Count>, port: u16, text: &str) -> Vec<Request> {
        text.bytes()
            .filter_map(|byte| devices.write(port, byte.into()).unwrap())
            .collect()
    }

    #[test]
    fn the_console_has_output_and_input() {
        let (mut devices, screen, count) = devices();
        assert_eq!(print(&mut devices, CONSOLE, "hello\n7\n"), []);
        assert_eq!(*screen.0.lock().unwrap(), b"hello\n7\n");
        // Interrupts come once the driver has enabled them.
        devices.write(CONSOLE + 1, 1).unwrap();
        let before = count.0.get();
        assert_eq!(devices.input(&[b'x'; 100]).unwrap(), 64);
        assert!(count.0.get() > before);
        assert_eq!(devices.input(b"y").unwrap(), 0);
        assert_eq!(devices.read(CONSOLE), 0xffff_ff00 | u32::from(b'x'));
        assert_eq!(devices.input(b"y").unwrap(), 1);
    }

    #[test]
    fn only_a_number_on_a_line_is_a_status() {
        let (mut devices, screen, _) = devices();
        for (text, expected) in [
            ("3", vec![]),
            ("7\r\n", vec![Request::Exit(37)]),
            ("0\n", vec![Request::Exit(0)]),
            ("256\n-1\nok\n\n", vec![]),
            (&"1".repeat(10_000), vec![]),
            ("\n255\n", vec![Request::Exit(255)]),
        ] {
            assert_eq!(print(&mut devices, STATUS, text), expected, "{text:?}");
        }
        assert!(screen.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_line_gives_up_memory() {
        let (mut devices, ..) = devices();
        let range = GuestRange::new(GuestAddress(0x5000), 0x2000).unwrap();
        let requests = print(&mut devices, STATUS, "discard 0x5000 0x2000\r\n7\n");
        assert_eq!(requests, [Request::Discard(range), Request::Exit(7)]);
        let refused = "discard\ndiscard 0x5000\ndiscard 0x5000 0\ndiscard ffffffffffffffff 2\n\
                       discard 0x5000 0x1000 0x1000\ndiscard -1 1\ngive 0x5000 0x1000\n";
        assert_eq!(print(&mut devices, STATUS, refused), []);
    }

    #[test]
    fn two_ports_reset() {
        let (mut devices, ..) = devices();
        for (port, value, expected) in [
            (KEYBOARD, 0xfe, Some(Request::Reset)),
            (KEYBOARD, 0xd1, None),
            (RESET_CONTROL, 0x06, Some(Request::Reset)),
            (RESET_CONTROL, 0x02, None),
            (0x80, 0xfe, None),
            (0xcfc, 0xffff_ffff, None),
        ] {
            assert_eq!(devices.write(port, value).unwrap(), expected, "{port:#x}");
        }
        assert_eq!(devices.read(KEYBOARD) & 0xff, 0);
        assert_eq!(devices.read(0xcf8), u32::MAX);
    }

    #[test]
    fn the_first_panic_message_is_kept() {
        let (mut devices, ..) = devices();
        assert_eq!(devices.panic_message(), None);
        let text =
            "[    1.5] Kernel panic - not syncing: VFS: no root\r\nKernel panic - not syncing: x\n";
        print(&mut devices, CONSOLE, text);
        let expected = "Kernel panic - not syncing: VFS: no root";
        assert_eq!(devices.panic_message(), Some(expected));
    }

    #[test]
    fn output_that_fails_is_an_error() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut devices = Devices::new(Count::default(), Count::default(), Box::new(Closed));
        let error = devices.write(CONSOLE, 1).unwrap_err();
        assert!(matches!(error, DeviceError::Console(_)), "{error}");
    }
}
