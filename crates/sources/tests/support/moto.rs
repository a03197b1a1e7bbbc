//! A server that speaks S3: moto, from PyPI, in a virtual environment at `target/moto`, which
//! `cargo xtask setup` makes.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "test code, of which each test uses a part"
)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// After which it counts as hanging. Python compiles its modules at the first start.
const START_LIMIT: Duration = Duration::from_secs(180);
/// The same in the lab, whose clock jumps while a file is read from its host.
const START_LIMIT_IN_LAB: Duration = Duration::from_secs(1200);

/// What the server says of its address, before the port.
const ADDRESS: &str = "Running on http://127.0.0.1:";

/// A running server, which ends when it is dropped.
pub struct Moto {
    child: Child,
    pub port: u16,
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?;
    Some(target.join("moto/bin/moto_server")).filter(|path| path.exists())
}

impl Moto {
    /// Starts a server without objects. `None`, and a line that says why, without one.
    pub fn start() -> Option<Self> {
        let Some(program) = program() else {
            println!("SKIP: no target/moto: cargo xtask setup installs it from PyPI");
            return None;
        };
        let limit = match std::env::var_os("PAGETIDE_TIMING") {
            Some(_) => START_LIMIT_IN_LAB,
            None => START_LIMIT,
        };
        match Self::spawn(&program) {
            Ok(moto) => Some(moto.listening(limit)),
            Err(error) => {
                println!("SKIP: moto does not start: {error}");
                None
            }
        }
    }

    /// The server's port is of its kernel's choice: one that was chosen here could be another test's when the
    /// server binds it, and that test's server would answer in its place for a while.
    fn spawn(program: &Path) -> std::io::Result<Self> {
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", "0"]);
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Self { child, port: 0 })
    }

    /// The server once it listens, at the port that it names.
    fn listening(mut self, limit: Duration) -> Self {
        let lines = BufReader::new(self.child.stderr.take().unwrap()).split(b'\n');
        let (sender, said) = mpsc::channel();
        // Reads to the end, since the server writes a line on each request.
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = sender.send(String::from_utf8_lossy(&line).into_owned());
            }
        });
        let end = Instant::now() + limit;
        let mut before = String::new();
        loop {
            let line = match said.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => {
                    panic!("moto does not listen within {limit:?}: {before}")
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait().unwrap();
                    panic!("moto ends before it listens: {status}: {before}");
                }
            };
            if let Some((_, port)) = line.split_once(ADDRESS) {
                let digits = port.split(|letter: char| !letter.is_ascii_digit());
                self.port = digits.into_iter().next().unwrap().parse().unwrap();
                return self;
            }
            before += &line;
            before.push('\n');
        }
    }
}

/// Has a process use the server at `port` as S3. (Not this process: other threads read its environment.)
pub fn use_server(command: &mut Command, port: u16) {
    command
        .env("AWS_ACCESS_KEY_ID", "key")
        .env("AWS_SECRET_ACCESS_KEY", "word")
        .env("AWS_DEFAULT_REGION", "us-east-1")
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}"));
}

/// Puts an object, or makes a bucket.
pub fn put(port: u16, path: &str, body: &[u8]) {
    request(port, "PUT", path, body);
}

/// Sends a request, which moto does not authenticate, and returns the answer.
pub fn request(port: u16, method: &str, path: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {}\r\nConnection: close\r\nAuthorization: AWS4-HMAC-SHA256 Credential=key/20261102/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    answer
}
