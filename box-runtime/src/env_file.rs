//! The environment of a command, including the environment file of its box.

use box_protocol::actions::{FilePart, FileRead, FileReadParams};
use box_protocol::{BoxError, BoxId, Code, Defaults, Env};
use box_rpc::Peer;
use futures::StreamExt as _;

use crate::box_actor::agents_error;

/// Maximum size of an environment file.
const BYTES: u64 = 64 << 10;

/// Returns the environment that a command gets in addition to that of its box.
///
/// Values of the call override values of the file, and these override the defaults.
pub(crate) async fn environment(
    agent: &Peer,
    box_id: &BoxId,
    defaults: &Defaults,
    asked: Env,
) -> Result<Env, BoxError> {
    let mut env = defaults.env.clone();
    if let Some(path) = &defaults.env_file {
        env.extend(read(agent, box_id, path).await?);
    }
    env.extend(asked);
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
            let words = format!("defaults.env_file: {}", error.message());
            Err(BoxError::new(error.code(), words))
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
            len: Some(BYTES + 1),
        }),
        if_match: None,
    };
    let reading = agent.stream::<FileRead>(&params).await;
    let mut chunks = reading.map_err(agents_error)?;
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        bytes.extend_from_slice(&chunk.map_err(agents_error)?.data);
        if bytes.len() as u64 > BYTES {
            let max = usize::try_from(BYTES).unwrap_or(usize::MAX);
            return Err(BoxError::limit(
                Code::TooLarge,
                "a file of variables in bytes",
                "env_file_bytes",
                max,
            ));
        }
    }
    chunks.finish().await.map_err(agents_error)?;
    Ok(bytes)
}
