//! Any bytes as the head of an upgrade, of its answer and of a proxy's answer.
#![no_main]

mod memory;

use httparse::{EMPTY_HEADER, Response, Status};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    box_transports::fuzzing::upgrade(bytes);
    let bytes = bytes.get(1..).unwrap_or_default();
    let Some((size, accepted)) = box_runtime::fuzzing::proxy_answer(bytes) else {
        return;
    };
    let mut headers = [EMPTY_HEADER; 64];
    let mut parsed = Response::new(&mut headers);
    // The runtime reads only the status, and skips no empty line before it as the library does.
    let head = &bytes[..size];
    if let Ok(Status::Complete(_)) = parsed.parse(head)
        && head.starts_with(b"HTTP")
    {
        let code = parsed.code.unwrap_or_default();
        assert_eq!(accepted, (200..300).contains(&code), "{code}");
    }
});
