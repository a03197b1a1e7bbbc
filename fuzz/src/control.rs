//! A request at the control socket (`pagetide_serve::control`).

use pagetide_serve::control::message::Request;
use pagetide_serve::fuzzing::request;

use crate::memory::bounded;

pub(crate) fn run(input: &[u8]) -> bool {
    // A line is read twice, and an error quotes a part of it.
    let limit = 16 * input.len() + 4096;
    let Some(asked) = bounded(limit, || request(input)) else {
        return false;
    };
    let written = serde_json::json!({"version": 1, "request": &asked}).to_string();
    assert_eq!(request(written.as_bytes()), Some(asked.clone()));
    // The version is the first thing that is looked at.
    let other = serde_json::json!({"version": 2, "request": &asked}).to_string();
    assert_eq!(request(other.as_bytes()), None);
    if let Request::Add { socket, binding } = &asked
        && let Ok(bound) = binding.binding(socket)
    {
        assert!(bound.socket == *socket && bound.socket_mode.is_none_or(|mode| mode <= 0o777));
    }
    true
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    [
        r#"{"version":1,"request":"list"}"#,
        r#"{"version":1,"request":{"remove":{"socket":"/run/a.sock"}}}"#,
        r#"{"version":1,"request":{"drain":{"socket":null}}}"#,
        r#"{"version":1,"request":{"add":{"socket":"/run/a.sock","binding":{"image":"s3://b/k","digest":"12","state-file":"/s","working-set":"replay","working-set-file":"/w","prefetch":"off","on-failure":"kill","socket-mode":"660","socket-owner":"1:2"}}}}"#,
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}
