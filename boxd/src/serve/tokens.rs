//! The named tokens of network callers, from a file or the environment.
//!
//! Tokens never come from the command line and never appear in a log.

use std::collections::BTreeSet;
use std::env::VarError;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use box_rpc::Caller;
use box_service::ServiceConfig;

use super::trusted_file::read_secret;
use crate::langbot::OWNER;

/// The environment variable that holds tokens in the format of the file.
const VARIABLE: &str = "BOXD_TOKENS";

/// The minimum length of a token.
const MIN_TOKEN_BYTES: usize = 32;

/// Returns whether a token may not have this name.
///
/// The names of callers without a token are reserved, and so is that of LangBot, which has its own token.
fn is_reserved(name: &str) -> bool {
    Caller::RESERVED.contains(&name) || name == OWNER
}

/// Checks the name of a new token.
pub(crate) fn check_name(name: &str) -> Result<()> {
    ensure!(
        !name.is_empty() && !name.starts_with('#') && !name.contains(char::is_whitespace),
        "NAME: must be one word that does not begin with #"
    );
    ensure!(
        !is_reserved(name),
        "NAME: {name} is reserved; choose another"
    );
    Ok(())
}

/// The configured tokens and their names.
#[derive(Debug, Clone, Default)]
pub(super) struct Tokens(box_rpc::Tokens, BTreeSet<String>);

impl Tokens {
    /// Reads the tokens: a name and a token per line; `#` starts a comment.
    pub(super) fn read(file: Option<&Path>) -> Result<Self> {
        if let Some(path) = file {
            let display = path.display();
            let read = || {
                let text = String::from_utf8(read_secret(path)?).context("not UTF-8")?;
                Self::parse(&text)
            };
            return read().with_context(|| format!("token file {display}"));
        }
        match std::env::var(VARIABLE) {
            Ok(text) => Self::parse(&text).context(VARIABLE),
            Err(VarError::NotPresent) => Ok(Self::default()),
            Err(VarError::NotUnicode(_)) => bail!("{VARIABLE}: not UTF-8"),
        }
    }

    fn parse(text: &str) -> Result<Self> {
        let mut entries = Vec::new();
        let mut seen = BTreeSet::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            // An error must not contain the line, which holds a secret.
            let number = number + 1;
            let mut words = line.split_whitespace();
            let (Some(name), Some(token), None) = (words.next(), words.next(), words.next()) else {
                bail!("line {number}: expected NAME TOKEN");
            };
            ensure!(
                !is_reserved(name),
                "line {number}: the name {name} is reserved; choose another"
            );
            ensure!(seen.insert(name), "line {number}: duplicate name {name}");
            ensure!(
                token.len() >= MIN_TOKEN_BYTES,
                "line {number}: the token of {name} has fewer than {MIN_TOKEN_BYTES} bytes"
            );
            entries.push((name.to_owned(), token.to_owned()));
        }
        ensure!(!entries.is_empty(), "contains no tokens");
        let known = entries.iter().map(|(name, _)| name.clone()).collect();
        Ok(Self(box_rpc::Tokens::new(entries), known))
    }

    /// Returns whether no token is configured.
    pub(super) fn is_empty(&self) -> bool {
        self.1.is_empty()
    }

    /// Refuses a policy with a table for an unknown caller.
    ///
    /// Callers that need no token have names as well.
    pub(super) fn check_policy(&self, policy: &ServiceConfig) -> Result<()> {
        for name in policy.tokens.keys() {
            ensure!(
                self.1.contains(name) || is_reserved(name),
                "policy.tokens.{name}: unknown token name; define it in server.token_file (--token-file) or {VARIABLE}"
            );
        }
        Ok(())
    }

    /// Returns the tokens for connections that send a hello message.
    pub(super) fn to_rpc(&self) -> box_rpc::Tokens {
        self.0.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_checked_and_errors_do_not_contain_them() {
        let token = "0123456789abcdef0123456789abcdef";
        let tokens = Tokens::parse(&format!("# who\nann {token}\n\nbob x{token}\n")).unwrap();
        assert_eq!(tokens.to_rpc().name_of(token).as_deref(), Some("ann"));
        assert_eq!(tokens.to_rpc().name_of(&token[1..]), None);
        for text in [
            "",
            "ann",
            "ann short-secret",
            &format!("local {token}"),
            &format!("loopback {token}"),
            &format!("ann {token}\nann x{token}"),
            &format!("ann {token} more"),
        ] {
            let error = format!("{:#}", Tokens::parse(text).unwrap_err());
            assert!(
                !error.contains("secret") && !error.contains(token),
                "{error}"
            );
        }
    }

    #[test]
    fn a_token_file_that_others_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "ann 0123456789abcdef0123456789abcdef\n").unwrap();
        assert!(!Tokens::read(Some(file.path())).unwrap().is_empty());
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = format!("{:#}", Tokens::read(Some(file.path())).unwrap_err());
        assert!(error.contains("chmod 600"), "{error}");
    }
}
