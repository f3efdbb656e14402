//! Credentials: given ones, and those of Docker's configuration and its helpers.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

use super::Registry;
use crate::error::{Error, Result, shown};
use crate::reference::DOCKER_HUB;

/// Maximum size of Docker's configuration.
const FILE_BYTES: u64 = 4 << 20;
/// Maximum size of a helper's answer.
const HELPER_BYTES: u64 = 64 << 10;
const HELPER_TIME: Duration = Duration::from_secs(30);
/// The key of Docker Hub in Docker's configuration and for helpers.
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";
/// User name by which a helper marks an identity token.
const TOKEN_USER: &str = "<token>";

/// Credentials for a registry.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// A user and a password or access token.
    Basic {
        /// The user.
        username: String,
        /// The password.
        password: String,
    },
    /// A token that the registry's token service exchanges.
    IdentityToken(String),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Basic { username, .. } => write!(f, "Basic({username:?}, …)"),
            Self::IdentityToken(_) => f.write_str("IdentityToken(…)"),
        }
    }
}

/// Returns the path of Docker's configuration: in `DOCKER_CONFIG`, or in the home directory.
pub fn docker_config_path() -> Option<PathBuf> {
    let folder = match std::env::var_os("DOCKER_CONFIG").filter(|folder| !folder.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".docker"),
    };
    Some(folder.join("config.json"))
}

/// The fields of Docker's configuration about credentials.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DockerConfig {
    auths: HashMap<String, DockerAuth>,
    cred_helpers: HashMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DockerAuth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
}

impl Registry {
    /// Finds the credentials for a registry; `None` for an anonymous request.
    pub(super) async fn credentials(&self, authority: &str) -> Result<Option<Credentials>> {
        let options = &self.inner.options;
        if let Some(given) = options.credentials.get(authority) {
            return Ok(Some(given.clone()));
        }
        let Some(path) = &options.docker_config else {
            return Ok(None);
        };
        let Some(config) = read(path).await? else {
            return Ok(None);
        };
        if let Some(helper) = find(&config.cred_helpers, authority) {
            return ask_helper(helper, authority).await;
        }
        if let Some(found) = find(&config.auths, authority)
            && let Some(credentials) = found.credentials()?
        {
            return Ok(Some(credentials));
        }
        match &config.creds_store {
            Some(helper) if !helper.is_empty() => ask_helper(helper, authority).await,
            _ => Ok(None),
        }
    }
}

async fn read(path: &Path) -> Result<Option<DockerConfig>> {
    let file = match tokio::fs::File::open(path).await {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("Docker's configuration", &error)),
    };
    let mut content = Vec::new();
    let read = file.take(FILE_BYTES + 1).read_to_end(&mut content).await;
    read.map_err(|error| Error::io("Docker's configuration", &error))?;
    if content.len() as u64 > FILE_BYTES {
        return Err(Error::too_large(
            "Docker's configuration",
            "file_bytes",
            FILE_BYTES,
        ));
    }
    // Without the parser's text, which may quote a secret.
    let parsed = serde_json::from_slice(&content);
    parsed
        .map(Some)
        .map_err(|_| Error::invalid("Docker's configuration: it is not valid JSON; correct it"))
}

/// Finds the entry of a registry, whose key may be an address.
fn find<'a, T>(entries: &'a HashMap<String, T>, authority: &str) -> Option<&'a T> {
    let is_hub = |key: &str| matches!(key, DOCKER_HUB | "index.docker.io" | "registry-1.docker.io");
    let matches = |key: &str| {
        let key = key
            .trim_start_matches("https://")
            .trim_start_matches("http://");
        let key = key.split('/').next().unwrap_or(key);
        key == authority || (is_hub(authority) && is_hub(key))
    };
    entries.get(authority).or_else(|| {
        entries
            .iter()
            .find(|(key, _)| matches(key))
            .map(|(_, value)| value)
    })
}

impl DockerAuth {
    fn credentials(&self) -> Result<Option<Credentials>> {
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        if let Some(token) = given(&self.identitytoken) {
            return Ok(Some(Credentials::IdentityToken(token)));
        }
        if let Some(auth) = given(&self.auth) {
            let bad = || {
                Error::invalid(
                    "Docker's configuration: an entry of `auths` is not USER:PASSWORD in base64; log in again",
                )
            };
            let text = STANDARD.decode(auth.trim()).map_err(|_| bad())?;
            let text = String::from_utf8(text).map_err(|_| bad())?;
            let (username, password) = text.split_once(':').ok_or_else(bad)?;
            return Ok(Some(Credentials::Basic {
                username: username.to_owned(),
                password: password.trim_end_matches('\0').to_owned(),
            }));
        }
        let both = given(&self.username).zip(given(&self.password));
        Ok(both.map(|(username, password)| Credentials::Basic { username, password }))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperAnswer {
    username: String,
    secret: String,
}

/// Asks a credential helper, a program of the operator.
async fn ask_helper(helper: &str, authority: &str) -> Result<Option<Credentials>> {
    let named = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if helper.is_empty() || !helper.chars().all(named) {
        return Err(Error::invalid(format!(
            "Docker's configuration: the helper `{}` has an invalid name",
            shown(helper)
        )));
    }
    let server = if authority == DOCKER_HUB {
        DOCKER_HUB_KEY
    } else {
        authority
    };
    let failed = |problem: &str| {
        Error::unavailable(format!(
            "credential helper `{helper}`: {problem}; run it by hand to see why"
        ))
    };
    let mut child = Command::new(format!("docker-credential-{helper}"))
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|_| failed("it cannot be started"))?;
    let asked = tokio::time::timeout(HELPER_TIME, async {
        if let Some(mut input) = child.stdin.take() {
            // A helper may answer without reading.
            let _ = input.write_all(format!("{server}\n").as_bytes()).await;
        }
        let mut answer = Vec::new();
        if let Some(output) = child.stdout.take() {
            output
                .take(HELPER_BYTES + 1)
                .read_to_end(&mut answer)
                .await?;
        }
        if answer.len() as u64 > HELPER_BYTES {
            return Err(std::io::Error::other("too long"));
        }
        Ok((child.wait().await?, answer))
    });
    let (status, answer) = match asked.await {
        Err(_) => return Err(failed("it did not answer in time")),
        Ok(Err(_)) => return Err(failed("its answer is unusable")),
        Ok(Ok(answer)) => answer,
    };
    if !status.success() {
        // The words of Docker's helpers for "none".
        let text = String::from_utf8_lossy(&answer);
        if text.contains("credentials not found") {
            return Ok(None);
        }
        return Err(failed("it failed"));
    }
    let found: HelperAnswer =
        serde_json::from_slice(&answer).map_err(|_| failed("its answer is unusable"))?;
    Ok(Some(match found.username.as_str() {
        TOKEN_USER => Credentials::IdentityToken(found.secret),
        _ => Credentials::Basic {
            username: found.username,
            password: found.secret,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_docker_match_registries() {
        let entries = |key: &str| HashMap::from([(key.to_owned(), 1)]);
        for (key, authority, found) in [
            ("https://index.docker.io/v1/", "docker.io", true),
            ("docker.io", "docker.io", true),
            ("ghcr.io", "ghcr.io", true),
            ("https://ghcr.io/v2/", "ghcr.io", true),
            ("http://localhost:5000", "localhost:5000", true),
            ("ghcr.io.evil.example", "ghcr.io", false),
            ("localhost", "localhost:5000", false),
            ("https://index.docker.io/v1/", "mirror.example", false),
        ] {
            assert_eq!(
                find(&entries(key), authority).is_some(),
                found,
                "{key} {authority}"
            );
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let basic = Credentials::Basic {
            username: "u".into(),
            password: "hunter2".into(),
        };
        assert_eq!(format!("{basic:?}"), "Basic(\"u\", …)");
        assert!(!format!("{:?}", Credentials::IdentityToken("hunter2".into())).contains("hunter2"));
    }
}
