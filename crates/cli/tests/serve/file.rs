//! The file with the options of `pagetide serve`.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use pagetide_test_support::eventually;
use rustix::process::Signal;

use super::{Place, assert_refused, ended, is_served, logged, signal};

#[test]
fn all_that_is_wrong_is_told_and_nothing_is_served() {
    let place = Place::new();
    let (first, second) = (place.path("first"), place.path("second"));
    let image = place.path("image");
    let write = |text: &str| fs::write(place.path("serve.toml"), text).expect("a temporary file");
    let checked = || {
        let words = ["--config", "serve.toml", "--check"];
        place.command(&words).output().expect("it starts")
    };
    write(&format!("[sockets]\n{first:?} = {image:?}\n"));
    let output = checked();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "nothing is wrong, sockets that can be served: 1\n"
    );
    assert!(!first.exists());
    write(&format!(
        "[sockets]\n{first:?} = \"/no/such/image\"\n{second:?} = \"/no/other/image\"\n"
    ));
    let output = checked();
    assert_eq!(output.status.code(), Some(2));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines.len(), 2, "{told}");
    assert!(lines[0].contains("/no/such/image does not exist"), "{told}");
    assert!(
        lines[1].contains("/no/other/image does not exist"),
        "{told}"
    );
    write("prefetch = 7");
    assert_refused(&checked(), "wanted string");
}

/// What the package brings: as it is, and with each line that is commented out.
#[test]
fn the_packages_file_makes_sense() {
    const PACKAGED: &str = include_str!("../../systemd/serve.toml");
    let place = Place::new();
    let checked = |text: &str| {
        fs::write(place.path("serve.toml"), text).expect("a temporary file");
        let words = ["--config", "serve.toml", "--check"];
        place.command(&words).output().expect("it starts")
    };
    let output = checked(PACKAGED);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let uncommented = |line: &str| match line.strip_prefix('#') {
        Some(option) if !option.starts_with(' ') => format!("{option}\n"),
        _ => format!("{line}\n"),
    };
    let all: String = PACKAGED.lines().map(uncommented).collect();
    assert!(all.contains("\nmetrics = "), "{all}");
    let told = String::from_utf8(checked(&all).stderr).expect("UTF-8");
    assert!(told.contains("/snapshots/web.mem does not exist"), "{told}");
    // The directory of the socket may be missing, too, and nothing else is wrong.
    let is_of_this_host = |line: &str| line.contains("web.mem") || line.contains("web.sock");
    assert!(told.lines().all(is_of_this_host), "{told}");
}

#[test]
fn a_file_has_the_options_and_is_read_again_at_sighup() {
    let place = Place::new();
    let config = place.path("serve.toml");
    let write = |text: &str| fs::write(&config, text).expect("a temporary file");
    let (first, second) = (place.path("first"), place.path("second"));
    let image = place.path("image");
    let sockets = |sockets: &[&Path]| {
        let line = |socket: &&Path| format!("{socket:?} = {image:?}\n");
        format!(
            "[sockets]\n{}",
            sockets.iter().map(line).collect::<String>()
        )
    };
    write(&format!(
        "prefetch = \"off\"\nsocket-mode = \"640\"\n{}",
        sockets(&[&first])
    ));
    let log = place.path("log");
    let mut command = place.command(&["--config", "serve.toml"]);
    command.stderr(fs::File::create(&log).expect("a temporary file"));
    let mut child = command.spawn().expect("it starts");
    eventually("the socket", || first.exists());
    assert!(is_served(&first));
    let mode = fs::metadata(&first)
        .expect("it is there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o640);

    write(&sockets(&[&first, &second]));
    signal(&child, Signal::HUP);
    eventually("the second socket", || second.exists());
    assert!(is_served(&first) && is_served(&second));

    write(&format!(
        "prefetch = \"off\"\nsocket-mode = \"600\"\nmetrics = \"localhost:0\"\n{}",
        sockets(&[&first, &second])
    ));
    signal(&child, Signal::HUP);
    logged(&log, "metrics, socket-mode (of open sockets)");

    // None of these changes anything.
    for (bad, wanted) in [
        ("prefetch = 7", "wanted string"),
        (
            "[sockets]\n\"third\" = \"s3://bucket/image\"",
            "no image was at a URL",
        ),
    ] {
        write(bad);
        signal(&child, Signal::HUP);
        logged(&log, wanted);
    }
    assert!(is_served(&first) && is_served(&second));
    let third = place.path("third");
    write(&format!(
        "{}{third:?} = \"/no/such/image\"\n",
        sockets(&[&second])
    ));
    signal(&child, Signal::HUP);
    let line = logged(&log, "/no/such/image does not exist");
    assert!(line.contains("it is tried again"), "{line}");
    eventually("the first socket's end", || !first.exists());
    assert!(is_served(&second) && !third.exists());
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
    let messages = fs::read_to_string(&log).expect("UTF-8");
    assert!(!messages.contains('\u{1b}'), "colours are for terminals");

    for (bad, wanted) in [
        ("prefetch = 7", "wanted string"),
        ("no-such-option = 1", "unknown field"),
        ("socket-mode = \"999\"", "a mode such as 660"),
        ("[sockets.a]\ndigest = \"12\"", "missing field `image`"),
        ("[sockets]\na = 7", "an image, or a table with image"),
        (
            "[sockets.a]\nimage = \"image\"\nsocket-mode = \"999\"",
            "a mode such as 660",
        ),
        (
            "[sockets.a]\nimage = \"image\"\non-failure = \"panic\"",
            "expected `stall` or `kill`",
        ),
        (
            "[sockets.a]\nimage = \"image\"\nowner = 7",
            "unknown field `owner`",
        ),
        (
            "[sockets.a]\nimage = \"image\"\ndigest = \"12\"",
            "a digest has 64 hexadecimal digits",
        ),
        (
            "[sockets]\na = \"ftp://x/y\"",
            "no image can be read from ftp://",
        ),
        ("", "no socket to serve"),
        ("= 1", "serve.toml"),
    ] {
        write(bad);
        let output = place
            .command(&["--config", "serve.toml"])
            .output()
            .expect("it starts");
        assert_refused(&output, wanted);
    }
    let output = place
        .command(&["--config", "missing.toml"])
        .output()
        .expect("it starts");
    assert_refused(&output, "missing.toml");
}

#[test]
fn a_socket_of_the_file_may_have_options_of_its_own() {
    let place = Place::new();
    let (socket, other) = (place.path("socket"), place.path("other"));
    let image = place.path("image");
    let write = |mode: &str| {
        let text = format!(
            "[sockets]\n{other:?} = {image:?}\n[sockets.{socket:?}]\nimage = {image:?}\n\
             socket-mode = \"{mode}\"\nprefetch = \"off\"\nworking-set = \"off\"\non-failure = \"kill\"\n"
        );
        fs::write(place.path("serve.toml"), text).expect("a temporary file");
    };
    let has_mode = |path: &Path, wanted: u32| {
        let mode = |status: fs::Metadata| status.permissions().mode() & 0o777;
        fs::metadata(path)
            .map(mode)
            .is_ok_and(|mode| mode == wanted)
    };
    write("640");
    let mut child = place
        .command(&["--config", "serve.toml"])
        .spawn()
        .expect("it starts");
    eventually("the socket's mode", || has_mode(&socket, 0o640));
    eventually("the other socket's mode", || has_mode(&other, 0o600));
    assert!(is_served(&socket) && is_served(&other));
    write("660");
    signal(&child, Signal::HUP);
    eventually("the socket's new mode", || has_mode(&socket, 0o660));
    eventually("the socket", || is_served(&socket));
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
}

/// The options of the command line that are flags or numbers there.
#[test]
fn a_file_has_once_the_log_and_a_size_in_bytes() {
    let place = Place::new();
    let (socket, image) = (place.path("socket"), place.path("image"));
    let text = format!(
        "log = \"json\"\ncache = \"cache\"\ncache-size = 1048576\n\
         metrics = \"localhost:0\"\n[sockets]\n{socket:?} = {image:?}\n"
    );
    fs::write(place.path("serve.toml"), &text).expect("a temporary file");
    let mut child = place
        .command(&["--config", "serve.toml"])
        .spawn()
        .expect("it starts");
    eventually("the socket", || socket.exists());
    let once = format!("once = true\n{text}");
    fs::write(place.path("serve.toml"), once).expect("a temporary file");
    signal(&child, Signal::HUP);
    // The last VM ends the server when the file was read; a bad message ends a VM.
    eventually("the server's end", || {
        let connected = UnixStream::connect(&socket);
        let _ = connected.and_then(|mut stream| stream.write_all(b"no handshake"));
        !socket.exists()
    });
    assert_eq!(ended(&mut child).code(), Some(0));
    let mut messages = String::new();
    let mut stderr = child.stderr.take().expect("it is piped");
    stderr.read_to_string(&mut messages).expect("UTF-8");
    for line in messages.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect("a JSON object");
        assert!(line["message"].is_string(), "{line}");
    }
    assert!(messages.contains("\"metrics\""), "{messages}");

    fs::write(place.path("serve.toml"), "cache-size = true").expect("a temporary file");
    let output = place
        .command(&["--config", "serve.toml"])
        .output()
        .expect("it starts");
    assert_refused(&output, "a number of bytes, or a text such as");
}
