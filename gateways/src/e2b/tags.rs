//! Tags of templates, and the snapshots that templates share.
//!
//! A tag is a template of its own, `NAME:TAG`, with the files of the build that named it. The template `NAME` has those of
//! its last build.

use axum::http::StatusCode;
use box_protocol::actions::{CatalogListParams, CatalogPutParams, CatalogUpdateParams};
use box_protocol::catalog::{
    CatalogItem, CatalogKind, ItemChange, ItemContent, ItemDraft, TemplateDraft,
};
use box_protocol::{ItemRef, Name, SpecDraft};

use super::catalog::{delete_item, items};
use super::error::ApiError;
use super::templates::find;
use crate::http::context::Context;

/// The label of a template with the tags that its build gets, separated by commas.
pub(super) const TAGS: &str = "e2b.tags";

/// The label of a tag, with the id of its template.
pub(super) const TAG_OF: &str = "e2b.tag_of";

/// The label of a snapshot that a build made.
pub(super) const BUILT: &str = "e2b.built";

type Result<T> = std::result::Result<T, ApiError>;

/// Points the tags of a build at its files.
pub(super) async fn set_tags(
    context: &Context,
    item: &CatalogItem,
    spec: &SpecDraft,
) -> Result<()> {
    let tags = item.labels.get(TAGS).map_or("", String::as_str);
    for tag in tags.split(',').filter(|tag| !tag.is_empty()) {
        let name = format!("{}:{tag}", item.name);
        let runtime = context.runtime();
        match find(context, &name).await {
            Ok(known) => {
                let id = ItemRef::new(known.id.as_str())?;
                let mut change = CatalogUpdateParams::of(CatalogKind::Template, id);
                let draft = TemplateDraft { spec: spec.clone() };
                change.content = Some(ItemChange::Template(Box::new(draft)));
                runtime.update_item(&context.caller, change).await?;
                if let Some(before) = snapshot_of(&known) {
                    release(context, before).await;
                }
            }
            Err(error) if error.status() == StatusCode::NOT_FOUND => {
                let draft = TemplateDraft { spec: spec.clone() };
                let draft = ItemDraft::Template(Box::new(draft));
                let mut new = CatalogPutParams::new(Name::new(name)?, draft);
                let of = (TAG_OF.to_owned(), item.id.to_string());
                new.labels = [of].into();
                runtime.put_item(&context.caller, new).await?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the tags of a template.
pub(super) async fn tags_of(context: &Context, item: &CatalogItem) -> Result<Vec<CatalogItem>> {
    let mut all = items(context, CatalogListParams::of(CatalogKind::Template)).await?;
    all.retain(|other| {
        other
            .labels
            .get(TAG_OF)
            .is_some_and(|of| *of == item.id.to_string())
    });
    Ok(all)
}

/// Returns the snapshot that boxes of a template begin with.
pub(super) fn snapshot_of(item: &CatalogItem) -> Option<&ItemRef> {
    match &item.content {
        ItemContent::Template(content) => content.spec.snapshot.as_ref(),
        _ => None,
    }
}

/// Returns a template of the caller that begins with a snapshot.
pub(super) async fn user_of(context: &Context, snapshot: &str) -> Result<Option<CatalogItem>> {
    let all = items(context, CatalogListParams::of(CatalogKind::Template)).await?;
    let is_used = |item: &CatalogItem| snapshot_of(item).is_some_and(|it| it.as_str() == snapshot);
    Ok(all.into_iter().find(is_used))
}

/// Deletes the snapshot of an earlier build if no template begins with it. Boxes that run keep it.
pub(super) async fn release(context: &Context, snapshot: &ItemRef) {
    if let Ok(None) = user_of(context, snapshot.as_str()).await {
        let _ = delete_item(context, CatalogKind::Snapshot, snapshot.as_str()).await;
    }
}
