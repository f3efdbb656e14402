//! Templates: partial specs below the words of a request.

use box_catalog::Viewer;
use box_protocol::catalog::{CatalogKind, ItemContent};
use box_protocol::{BoxError, BoxId, Code, ItemRef, SpecDraft};
use box_rpc::Caller;

use crate::runtime::BoxRuntime;

impl BoxRuntime {
    /// Fills the unset fields of a request from its template.
    ///
    /// An existing box keeps the fields that it has, also if the template has changed since.
    pub(crate) async fn apply_template(
        &self,
        caller: &Caller,
        spec: &mut SpecDraft,
    ) -> Result<(), BoxError> {
        if spec.template.is_none() && spec.pool.is_none() {
            return Ok(());
        }
        if let Ok(id) = BoxId::new(spec.box_id.as_deref().unwrap_or_default().trim()) {
            match self.get(caller, &id).await {
                Ok(existing) => {
                    spec.inherit_unset(&existing);
                    return Ok(());
                }
                Err(error) if error.code() == Code::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let name = caller.name();
        let viewer = Viewer {
            owner: &name,
            sees_all: false,
        };
        let store = self.items().store()?;
        let item = match (&spec.template, &spec.pool) {
            (Some(template), _) => store.find(viewer, CatalogKind::Template, template)?,
            (None, Some(pool)) => match store.find(viewer, CatalogKind::Pool, pool)?.content {
                ItemContent::Pool(pool) => store.get(CatalogKind::Template, &pool.template)?,
                _ => return Ok(()),
            },
            (None, None) => return Ok(()),
        };
        if let ItemContent::Template(template) = &item.content {
            spec.fill_from(&template.spec);
        }
        if spec.template.is_none() {
            spec.template = Some(ItemRef::new(&item.id)?);
        }
        Ok(())
    }
}
