//! Any bytes as websocket frames: the messages do not depend on how the bytes are split.
#![no_main]

mod memory;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| box_transports::fuzzing::frames(bytes));
