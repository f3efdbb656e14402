//! The environment of a box and of its commands.

use box_protocol::actions::{FilePart, FileRead, FileReadParams};
use box_protocol::{BoxError, BoxId, BoxSpec, Code, Defaults, Env, Invalid, default_path};
use box_rpc::Peer;
use futures::StreamExt as _;

use crate::backend::{Facts, guest_of};
use crate::box_actor::agents_error;

/// Maximum size of an environment file.
const FILE_BYTES: u64 = 64 << 10;

/// Returns the default environment of the commands in a box.
///
/// It contains nothing of the runtime's environment. Variables of the image override others. The
/// system directories are read-only, so `pip install` and `npm install -g` install into Python's
/// default user directory.
pub(crate) fn box_environment(
    spec: &BoxSpec,
    facts: &Facts,
    of_image: Option<&Env>,
) -> Result<Env, Invalid> {
    let (user, home) = match &facts.image_user {
        Some(user) => (user.name.as_str(), user.home.as_str()),
        None => guest_of(spec),
    };
    let prefix = format!("{}/.local", home.trim_end_matches('/'));
    let path = default_path(home);
    let mut env = Env::new();
    for (name, value) in [
        ("PATH", path.as_str()),
        ("HOME", home),
        ("USER", user),
        ("LANG", "C.UTF-8"),
        ("TERM", "dumb"),
        // Disables Debian's protection of packaged Python modules (PEP 668); they are read-only anyway.
        ("PIP_BREAK_SYSTEM_PACKAGES", "1"),
        ("NPM_CONFIG_PREFIX", prefix.as_str()),
    ] {
        env.insert(name, value)?;
    }
    env.extend(of_image.cloned().unwrap_or_default());
    Ok(env)
}

/// Returns the environment that a command gets in addition to that of its box.
///
/// Values of the call override values of the file, and these override the defaults.
pub(crate) async fn command_environment(
    agent: &Peer,
    box_id: &BoxId,
    defaults: &Defaults,
    requested: Env,
) -> Result<Env, BoxError> {
    let mut env = defaults.env.clone();
    if let Some(path) = &defaults.env_file {
        env.extend(read(agent, box_id, path).await?);
    }
    env.extend(requested);
    Ok(env)
}

/// Reads the variables of a file in the box, as the guest user.
///
/// A missing file has no variables, because the guest may create it later.
pub(crate) async fn read(agent: &Peer, box_id: &BoxId, path: &str) -> Result<Env, BoxError> {
    match bytes(agent, box_id, path).await {
        Ok(bytes) => Ok(Env::from_lines(&bytes)),
        Err(error) if error.code() == Code::NotFound => Ok(Env::new()),
        Err(error) => {
            let message = format!("defaults.env_file: {}", error.message());
            Err(BoxError::new(error.code(), message))
        }
    }
}

async fn bytes(agent: &Peer, box_id: &BoxId, path: &str) -> Result<Vec<u8>, BoxError> {
    let params = FileReadParams {
        box_id: box_id.clone(),
        user: None,
        expand: true,
        path: path.to_owned(),
        part: Some(FilePart::Bytes {
            offset: 0,
            len: Some(FILE_BYTES + 1),
        }),
        if_match: None,
    };
    let reading = agent.stream::<FileRead>(&params).await;
    let mut chunks = reading.map_err(agents_error)?;
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        bytes.extend_from_slice(&chunk.map_err(agents_error)?.data);
        if bytes.len() as u64 > FILE_BYTES {
            let max = usize::try_from(FILE_BYTES).unwrap_or(usize::MAX);
            return Err(BoxError::limit(
                Code::TooLarge,
                "the environment file",
                "env_file_bytes",
                max,
            ));
        }
    }
    chunks.finish().await.map_err(agents_error)?;
    Ok(bytes)
}
