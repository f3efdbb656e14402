//! Any bytes as websocket frames: the messages do not depend on how the bytes are split.
//!
//! A library decodes the frames. Our code cuts the stream into frames for it, skips messages beyond the limit and
//! releases the decoder's memory, and this target tests that code.
#![no_main]

mod memory;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| box_transports::fuzzing::frames(bytes));
