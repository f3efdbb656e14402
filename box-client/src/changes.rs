//! What a box has changed: listed, applied to the host, or discarded.

use std::collections::VecDeque;

use box_protocol::actions::{
    BoxApply, BoxApplyParams, BoxApplyResult, BoxDiff, BoxDiffParams, BoxDiscard, BoxDiscardParams,
    DiffEntry,
};
use box_protocol::{BoxError, Code};
use futures::Stream;
use futures::stream::try_unfold;

use crate::error::ClientError;
use crate::handle::BoxHandle;

impl BoxHandle {
    /// Streams what the box has changed, in the order of the paths.
    ///
    /// `since` is `image`, `workspace` or the name of a checkpoint. Without it, the server compares
    /// the workspace if that is an overlay, and otherwise all private files. With `path`, only
    /// changes at that path and below it.
    pub fn changes(
        &self,
        since: Option<&str>,
        path: Option<&str>,
    ) -> Result<impl Stream<Item = Result<DiffEntry, ClientError>> + Send + use<>, ClientError>
    {
        let mut params = BoxDiffParams::of(self.id().clone());
        params.since = since.map(box_protocol::Name::new).transpose()?;
        params.path = path.map(str::to_owned);
        let client = self.client().clone();
        let begin = (client, params, VecDeque::new(), true);
        Ok(try_unfold(
            begin,
            async |(client, mut params, mut page, more)| {
                let mut more = more;
                loop {
                    if let Some(change) = page.pop_front() {
                        return Ok(Some((change, (client, params, page, more))));
                    }
                    if !more {
                        return Ok(None);
                    }
                    let next = client.call::<BoxDiff>(&params).await?;
                    more = next.next.is_some();
                    if more && (next.changes.is_empty() || next.next == params.after) {
                        let problem = "the server repeats a page of changes";
                        return Err(BoxError::new(Code::Internal, problem).into());
                    }
                    params.after = next.next;
                    page = next.changes.into();
                }
            },
        ))
    }

    /// Writes the changes of an overlay workspace to its host directory.
    ///
    /// `conflict` names files that changed on the host as well, unless `force` is set.
    pub async fn apply(&self, options: ApplyOptions) -> Result<BoxApplyResult, ClientError> {
        let params = BoxApplyParams {
            box_id: self.id().clone(),
            paths: options.paths,
            force: options.force,
            dry_run: options.dry_run,
        };
        self.client().call::<BoxApply>(&params).await
    }

    /// Restores these paths of an overlay workspace, or all. Returns the number of changes.
    pub async fn discard(&self, paths: Vec<String>) -> Result<u64, ClientError> {
        let params = BoxDiscardParams {
            box_id: self.id().clone(),
            paths,
        };
        let done = self.client().call::<BoxDiscard>(&params).await?;
        Ok(done.discarded)
    }
}

/// What [`BoxHandle::apply`] writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ApplyOptions {
    /// Only these paths, with everything below them; all if empty.
    pub paths: Vec<String>,
    /// Whether to replace files that changed on the host as well.
    pub force: bool,
    /// Whether to write nothing and only report.
    pub dry_run: bool,
}
