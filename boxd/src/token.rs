//! `boxd token`: new tokens for remote callers.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Result;

use crate::args::{TokenArgs, TokenCommand};
use crate::output;
use crate::serve::check_token_name;

/// The random bytes of a token.
const TOKEN_BYTES: usize = 32;

/// The random bytes of an API key of E2B. Old SDKs check the length.
const E2B_BYTES: usize = 20;

/// Prints a new token as a line of the token file.
pub(crate) fn run(args: &TokenArgs, json: bool) -> Result<ExitCode> {
    let TokenCommand::New { name, e2b } = &args.command;
    check_token_name(name)?;
    let token = if *e2b {
        format!("e2b_{}", hex::<E2B_BYTES>()?)
    } else {
        hex::<TOKEN_BYTES>()?
    };
    let text = format!("{name} {token}\n");
    let value = serde_json::json!({"name": name, "token": token});
    output::print_or_json(json, &text, &value)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns random bytes in hex.
fn hex<const N: usize>() -> Result<String> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut bytes[filled..], flags)?;
    }
    let mut text = String::with_capacity(2 * N);
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ_and_have_the_length_that_clients_check() {
        let (one, other) = (hex::<E2B_BYTES>().unwrap(), hex::<E2B_BYTES>().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.len(), 40);
        for bad in ["", "a b", "#a", "local"] {
            assert!(check_token_name(bad).is_err(), "{bad}");
        }
        check_token_name("ann").unwrap();
    }
}
