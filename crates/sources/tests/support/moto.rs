//! A server that speaks S3: moto, from PyPI, in a virtual environment at `target/moto`, which
//! `cargo xtask setup` makes.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "test code, of which each test uses a part"
)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// After which it counts as hanging. Python compiles its modules at the first start.
const START_LIMIT: Duration = Duration::from_secs(180);
/// The same in the lab, whose clock jumps while a file is read from its host.
const START_LIMIT_IN_LAB: Duration = Duration::from_secs(1200);

/// How many ports are tried.
const PORTS: usize = 5;

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
        // Between a look for a free port and its use, somebody else may take the port.
        for _ in 0..PORTS {
            let moto = match Self::start_at_a_free_port(&program) {
                Ok(moto) => moto,
                Err(error) => {
                    println!("SKIP: moto does not start: {error}");
                    return None;
                }
            };
            if let Some(moto) = moto.listening(limit) {
                return Some(moto);
            }
        }
        panic!("moto ended {PORTS} times before it listened: run {program:?} by hand");
    }

    fn start_at_a_free_port(program: &Path) -> std::io::Result<Self> {
        let free = TcpListener::bind("127.0.0.1:0")?;
        let port = free.local_addr()?.port();
        drop(free);
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { child, port })
    }

    /// The server once it listens; `None` if it has ended.
    fn listening(mut self, limit: Duration) -> Option<Self> {
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if self.child.try_wait().unwrap().is_some() {
                return None;
            }
            assert!(
                begun.elapsed() < limit,
                "moto does not listen within {limit:?}"
            );
            thread::sleep(Duration::from_millis(50));
        }
        Some(self)
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

/// Sends a request, which moto does not authenticate.
pub fn put(port: u16, path: &str, body: &[u8]) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = format!(
        "PUT {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {}\r\nConnection: close\r\nAuthorization: AWS4-HMAC-SHA256 Credential=key/20261102/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
