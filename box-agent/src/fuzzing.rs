//! Entry points for the fuzzer: archives that a caller sends and a guest may change.

pub use crate::files::fuzzing::{pack, unpack};
