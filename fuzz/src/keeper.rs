//! What a server leaves at its keeper: the description of a VM (`pagetide_serve`'s module state).

use pagetide_serve::fuzzing::description;

use crate::handshake::check_regions;
use crate::memory::bounded;

pub(crate) fn run(input: &[u8]) -> bool {
    let limit = 16 * input.len() + 4096;
    let Some((regions, written)) = bounded(limit, || description(input)) else {
        return false;
    };
    // Whoever wrote it, a VM has the bounds of the handshake.
    check_regions(&regions);
    let (again, same) = description(&written).expect("what was accepted");
    assert_eq!((again, same), (regions, written));
    true
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    [
        r#"{"socket":"/run/a.sock","image":"/images/a.mem","digest":"00","regions":[{"address":4096,"bytes":8192,"page_bytes":4096,"offset":0}]}"#,
        r#"{"socket":"/run/b.sock","image":"/images/b.mem","digest":"00","regions":[{"address":4096,"bytes":4096,"page_bytes":4096,"offset":0}],"is_native":true,"label":["web-7","00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"]}"#,
        r#"{"socket":"","image":"s3://b/k","digest":"","regions":[{"address":2097152,"bytes":2097152,"page_bytes":2097152,"offset":4096},{"address":8388608,"bytes":4096,"page_bytes":4096,"offset":0}]}"#,
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}
