//! The environment of a command, part of which a box may keep in a file.

use box_protocol::actions::{FilePart, FileRead, FileReadParams};
use box_protocol::{BoxError, BoxId, Code, Defaults, Env};
use box_rpc::Peer;
use futures::StreamExt as _;

use crate::box_actor::agents_error;

/// Bytes that such a file may have.
const BYTES: u64 = 64 << 10;

/// What a command finds beside the environment of its box: the defaults, the file's over them, and over both what it asks for.
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

/// The variables of a file in the box, read by its agent as its guest. None if there is no such file: it may come later.
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
