//! Any bytes as a message: read or refused by every codec, without a panic; and what is read says
//! the same after it is written again.
#![no_main]

mod memory;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        for codec in box_gateways::langbot::ALL_CODECS {
            box_rpc::fuzzing::decode(*codec, text);
        }
    }
});
