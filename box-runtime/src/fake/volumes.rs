//! Volumes of the fake backend: names in memory.

use std::collections::BTreeSet;

use async_trait::async_trait;
use box_protocol::{BoxError, ItemId};

use super::FakeBackend;
use crate::volumes::{MountedVolume, Volumes};

impl FakeBackend {
    /// Returns the ids and sizes in bytes of the existing volumes.
    pub fn volumes_made(&self) -> Vec<(ItemId, u64)> {
        self.inner().volumes.clone()
    }

    /// Returns the volumes of each requested box, in order.
    pub fn volumes_mounted(&self) -> Vec<Vec<MountedVolume>> {
        self.inner().record.volumes.clone()
    }

    /// Makes the creation and the change of volumes fail; `None` lets them succeed.
    pub fn set_volume_error(&self, error: Option<BoxError>) {
        self.inner().volume_error = error;
    }

    /// Adds the data of a volume that no item has.
    pub fn leave_volume(&self, id: ItemId) {
        self.inner().volumes.push((id, 0));
    }
}

#[async_trait]
impl Volumes for FakeBackend {
    async fn create(&self, id: &ItemId, bytes: u64) -> Result<bool, BoxError> {
        let mut inner = self.inner();
        // A failed creation leaves a part.
        inner.volumes.push((id.clone(), bytes));
        inner.volume_error.clone().map_or(Ok(true), Err)
    }

    async fn resize(&self, id: &ItemId, bytes: u64) -> Result<(), BoxError> {
        let mut inner = self.inner();
        if let Some(error) = &inner.volume_error {
            return Err(error.clone());
        }
        let volume = inner.volumes.iter_mut().find(|(of, _)| of == id);
        if let Some((_, size)) = volume {
            *size = bytes;
        }
        Ok(())
    }

    async fn used_bytes(&self, _: &ItemId) -> Result<u64, BoxError> {
        Ok(4096)
    }

    async fn remove(&self, id: &ItemId) -> Result<(), BoxError> {
        self.inner().volumes.retain(|(of, _)| of != id);
        Ok(())
    }

    async fn retain(&self, known: &BTreeSet<ItemId>) -> Result<(), BoxError> {
        self.inner().volumes.retain(|(of, _)| known.contains(of));
        Ok(())
    }
}
