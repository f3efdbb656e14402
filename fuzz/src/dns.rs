//! Any bytes as a DNS message of a box: answered with its id and question, or not at all.
#![no_main]

mod memory;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| box_runtime::fuzzing::dns(bytes));
