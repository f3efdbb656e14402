//! Volumes: their data, and the boxes that mount them.

use box_catalog::{NewItem, Viewer};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent, ItemState};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxId, BoxSpec, ItemId, Name};

use super::Items;
use super::uses::{ItemUse, Refusal, Reserved};
use crate::backend::Backend;
use crate::runtime::{BoxRuntime, unsupported};
use crate::volumes::{MountedVolume, Volumes};

/// Volumes of a box, and their reservations.
pub(crate) type Mounting = (Vec<MountedVolume>, Vec<ItemUse>);

impl BoxRuntime {
    /// The volumes of the first backend that has any.
    fn volumes(&self) -> Result<&dyn Volumes, BoxError> {
        let mut backends = self.shared().config.backends.iter();
        let volumes = backends.find_map(|backend| Backend::volumes(&**backend));
        volumes.ok_or_else(|| unsupported("content", "this backend has no volumes"))
    }

    /// Creates a volume. A crash in between leaves an unfinished item, which the next start removes.
    pub(super) async fn put_volume(&self, new: NewItem) -> Result<CatalogItem, BoxError> {
        let ItemContent::Volume(volume) = &new.content else {
            return Err(BoxError::internal("not a volume"));
        };
        let (volumes, size_mb) = (self.volumes()?, volume.size_mb);
        let tags = new.tags.clone();
        let new = NewItem {
            state: ItemState::Building,
            ..new
        };
        let item = self.on_store(move |store| store.insert(new)).await?;
        let id = item.id.clone();
        let made = volumes.create(&id, bytes(size_mb)).await;
        let ready = match made {
            Ok(enforced) => self.set_ready(id.clone(), enforced, tags).await,
            Err(error) => Err(error),
        };
        if ready.is_err() {
            let record = id.clone();
            let removed = self.on_store(move |store| store.remove(CatalogKind::Volume, &record));
            let _ = removed.await;
            self.remove_volume(&id).await;
        }
        ready
    }

    async fn set_ready(
        &self,
        id: ItemId,
        enforced: bool,
        tags: Vec<Name>,
    ) -> Result<CatalogItem, BoxError> {
        self.on_store(move |store| {
            store.update(CatalogKind::Volume, &id, |item| {
                item.state = ItemState::Ready;
                item.tags.extend(tags);
                if let ItemContent::Volume(volume) = &mut item.content {
                    volume.enforced = enforced;
                }
                Ok(())
            })
        })
        .await
    }

    /// Changes the size of a volume's data, if it differs. No box can use it meanwhile.
    pub(super) async fn resize_volume(
        &self,
        before: &CatalogItem,
        after: &CatalogItem,
    ) -> Result<Option<Reserved>, BoxError> {
        let (ItemContent::Volume(old), ItemContent::Volume(new)) =
            (&before.content, &after.content)
        else {
            return Ok(None);
        };
        if old.size_mb == new.size_mb {
            return Ok(None);
        }
        let uses = &self.shared().items.uses;
        let reserved = uses.reserve(CatalogKind::Volume, &before.id, before.name.as_str())?;
        let resized = self.volumes()?.resize(&before.id, bytes(new.size_mb));
        resized.await?;
        Ok(Some(reserved))
    }

    /// Removes the data of a volume without a record. The next start removes what is left.
    pub(super) async fn remove_volume(&self, id: &ItemId) {
        let Ok(volumes) = self.volumes() else { return };
        if let Err(error) = volumes.remove(id).await {
            tracing::warn!(volume = %id, %error, "cannot remove the data of a volume; the next start removes it");
        }
    }

    /// Measures a volume.
    pub(super) async fn volume_bytes(&self, id: &ItemId) -> Option<u64> {
        self.volumes().ok()?.used_bytes(id).await.ok()
    }

    /// Removes data that no item has, after a crash.
    pub(crate) async fn sweep_items(&self) {
        if self.shared().items.has_damaged_snapshots() {
            tracing::warn!("a record of a snapshot is damaged; layers that nothing uses stay");
        }
        self.shared().collect_layers();
        let Some(store) = &self.shared().items.store else {
            return;
        };
        for (kind, id) in store.interrupted() {
            tracing::info!(%kind, %id, "an earlier server did not finish an item");
        }
        let known = store.ids(CatalogKind::Volume);
        let Ok(volumes) = self.volumes() else { return };
        if let Err(error) = volumes.retain(&known).await {
            tracing::warn!(%error, "cannot remove unfinished volumes");
        }
    }
}

impl Items {
    /// Resolves the volumes of a spec and reserves them for a box.
    ///
    /// A restarted box mounts the volumes that it had, whatever their names are now.
    pub(crate) fn mount(
        &self,
        owner: &str,
        spec: &BoxSpec,
        earlier: &[ItemId],
    ) -> Result<Mounting, BoxError> {
        if spec.volumes.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let store = self.store()?;
        let viewer = Viewer {
            owner,
            sees_all: false,
        };
        let mut found = Vec::with_capacity(spec.volumes.len());
        for (at, mount) in spec.volumes.iter().enumerate() {
            found.push(match earlier.get(at) {
                Some(id) => store.get(CatalogKind::Volume, id)?,
                None => store.find(viewer, CatalogKind::Volume, &mount.volume)?,
            });
        }
        let ids: Vec<_> = found.iter().map(|item| item.id.clone()).collect();
        let (mut mounted, mut uses) = (Vec::new(), Vec::<ItemUse>::new());
        for (item, mount) in found.iter().zip(&spec.volumes) {
            let ItemContent::Volume(volume) = &item.content else {
                return Err(BoxError::internal("not a volume"));
            };
            mounted.push(MountedVolume {
                id: item.id.clone(),
                bytes: bytes(volume.size_mb),
                mount: mount.clone(),
            });
            if !uses.iter().any(|other| *other.id() == item.id) {
                let writer = writer(spec, &ids, &item.id);
                uses.push(self.reserve(item, writer, volume.shared)?);
            }
        }
        Ok((mounted, uses))
    }

    fn reserve(
        &self,
        item: &CatalogItem,
        writer: Option<BoxId>,
        shared: bool,
    ) -> Result<ItemUse, BoxError> {
        let name = &item.name;
        if item.state != ItemState::Ready {
            return Err(BoxError::conflict(format!(
                "volumes: {name} is not ready; try again later"
            )));
        }
        let acquired = self.uses.acquire(&item.id, writer, shared);
        acquired.map_err(|refusal| match refusal {
            Refusal::Reserved => BoxError::conflict(format!(
                "volumes: another call deletes or resizes {name}; try again later"
            ))
            .with_detail(&Detail::of_field("volumes").of(Subject::Volume)),
            Refusal::Writer(other) => BoxError::conflict(format!(
                "volumes: {name} is mounted read-write by box {other}; mount it with ro, delete \
                 that box, or make the volume shared"
            ))
            .with_detail(&Detail::of_field("volumes").of(Subject::Volume)),
        })
    }

    /// Counts the volumes of a box that an earlier process started.
    pub(crate) fn adopt(&self, spec: &BoxSpec, ids: &[ItemId]) -> Vec<ItemUse> {
        let mut uses = Vec::<ItemUse>::new();
        for id in ids {
            if !uses.iter().any(|other| other.id() == id) {
                uses.push(self.uses.adopt(id, writer(spec, ids, id)));
            }
        }
        uses
    }
}

/// Returns the box if one of its mounts can write to the volume.
///
/// The ids are those of the mounts of the spec.
fn writer(spec: &BoxSpec, ids: &[ItemId], id: &ItemId) -> Option<BoxId> {
    let mut mounts = spec.volumes.iter().zip(ids);
    let writes = mounts.any(|(mount, of)| of == id && !mount.ro);
    writes.then(|| spec.box_id.clone())
}

fn bytes(size_mb: u64) -> u64 {
    size_mb.saturating_mul(1 << 20)
}
