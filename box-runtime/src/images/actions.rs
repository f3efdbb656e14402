//! `image.*`, and what a caller may do.

use std::sync::Arc;
use std::time::Duration;

use box_image::{Image, PruneOptions, Reference, Uses};
use box_protocol::actions::{
    FileChunk, ImageConfig, ImageExport, ImageExportParams, ImageExportResult, ImageGet,
    ImageGetParams, ImageImport, ImageImportParams, ImageImportResult, ImageInfo, ImageList,
    ImageListParams, ImageListResult, ImageLogin, ImageLoginParams, ImageLogout, ImageLogoutParams,
    ImagePrune, ImagePruneParams, ImagePruneResult, ImagePull, ImagePullParams, ImageRemove,
    ImageRemoveParams, ImageRemoveResult, PullProgress,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Invalid, PullPolicy, UnixMs};
use box_rpc::{Call, Caller, Empty, Handle};
use tokio::sync::mpsc;

use super::passwords::Passwords;
use super::{Inner, failed, progress};
use crate::caller::Visibility as _;
use crate::handlers::{plain, streaming};
use crate::runtime::BoxRuntime;

/// Maximum length of a user name or a password for a registry, in bytes.
const SECRET_BYTES: usize = 64 << 10;

streaming! {
    ImagePull: pull_image(ImagePullParams) -> ImageInfo;
    ImageExport: export_image(ImageExportParams) -> ImageExportResult;
}

plain! {
    ImageImport: import_image(ImageImportParams) -> ImageImportResult;
    ImageList: list_images(ImageListParams) -> ImageListResult;
    ImageGet: get_image(ImageGetParams) -> ImageInfo;
    ImageRemove: remove_image(ImageRemoveParams) -> ImageRemoveResult;
    ImagePrune: prune_images(ImagePruneParams) -> ImagePruneResult;
    ImageLogin: login(ImageLoginParams) -> Empty;
    ImageLogout: logout(ImageLogoutParams) -> Empty;
}

impl BoxRuntime {
    fn images(&self) -> Result<&Arc<Inner>, BoxError> {
        self.shared().images.inner()
    }

    /// Returns the images, if the caller may change those of all callers.
    fn images_of(&self, caller: &Caller, action: &str) -> Result<&Arc<Inner>, BoxError> {
        if !caller.can_see_all() {
            return Err(BoxError::denied(format!(
                "image: only the user of the server may {action}; ask the operator"
            ))
            .with_detail(&Detail::about(Subject::Image)));
        }
        self.images()
    }

    /// Pulls an image, and reports the progress.
    pub async fn pull_image(
        &self,
        caller: &Caller,
        params: ImagePullParams,
        chunks: Option<mpsc::Sender<PullProgress>>,
    ) -> Result<ImageInfo, BoxError> {
        let images = self.images()?;
        let policy = params.policy.unwrap_or(PullPolicy::Always);
        let all = caller.can_see_all();
        let name = &params.reference;
        let pulled = images.find_or_pull(name, policy, all, chunks).await;
        let image = audited(caller, "image.pull", name, pulled)?;
        images.info(image).await
    }

    /// Imports an image from the pieces of an archive.
    pub async fn import_image(
        &self,
        caller: &Caller,
        params: ImageImportParams,
    ) -> Result<ImageImportResult, BoxError> {
        let images = self.images_of(caller, "import an image")?;
        let name = params.name.clone();
        let imported = images.import_piece(params).await.transpose();
        let Some(imported) = imported else {
            return Ok(ImageImportResult::default());
        };
        let image = audited(caller, "image.import", &name, imported)?;
        let image = Some(images.info(image).await?);
        Ok(ImageImportResult { image })
    }

    /// Sends an image as an archive.
    pub async fn export_image(
        &self,
        _: &Caller,
        params: ImageExportParams,
        chunks: Option<mpsc::Sender<FileChunk>>,
    ) -> Result<ImageExportResult, BoxError> {
        let images = self.images()?;
        let Some(chunks) = chunks else {
            let rule = "the archive is sent in chunks; call it with credit";
            return Err(Invalid::new("credit", rule).into());
        };
        images.export(params.image, chunks).await
    }

    /// Lists the images.
    pub async fn list_images(
        &self,
        _: &Caller,
        _: ImageListParams,
    ) -> Result<ImageListResult, BoxError> {
        let images = self.images()?;
        let listing = images.with_store(|inner, store| {
            // A damaged record of a box hides no image.
            let (uses, _) = inner.known_uses();
            let mut items = Vec::new();
            for image in store.list().map_err(failed)? {
                items.push(inner.brief(&image, &uses)?);
            }
            let partial_bytes = store.disk_usage().map_err(failed)?.partial_bytes;
            Ok(ImageListResult {
                items,
                partial_bytes,
            })
        });
        listing.await
    }

    /// Returns the record of an image.
    pub async fn get_image(
        &self,
        _: &Caller,
        params: ImageGetParams,
    ) -> Result<ImageInfo, BoxError> {
        let images = self.images()?;
        let image = images.find(&params.image).await?;
        images.info(image).await
    }

    /// Removes a name of an image, or the image.
    pub async fn remove_image(
        &self,
        caller: &Caller,
        params: ImageRemoveParams,
    ) -> Result<ImageRemoveResult, BoxError> {
        let images = self.images_of(caller, "remove an image")?;
        let name = params.image.clone();
        let removing = images.with_store(move |inner, store| {
            let removed = store.remove(&params.image, &inner.uses()?);
            let removed = removed.map_err(failed)?;
            Ok(ImageRemoveResult {
                names: removed.names,
                digest: removed.image.map(|digest| digest.to_string()),
                freed_bytes: removed.freed_bytes,
            })
        });
        audited(caller, "image.remove", &name, removing.await)
    }

    /// Removes the images that no box uses.
    pub async fn prune_images(
        &self,
        caller: &Caller,
        params: ImagePruneParams,
    ) -> Result<ImagePruneResult, BoxError> {
        let images = self.images_of(caller, "remove images")?;
        let options = PruneOptions {
            named: params.all,
            unused_for: Duration::from_millis(params.unused_for_ms),
        };
        let pruning = images.with_store(move |inner, store| {
            let pruned = store.prune(options, &inner.uses()?).map_err(failed)?;
            Ok(ImagePruneResult {
                digests: pruned.images.iter().map(ToString::to_string).collect(),
                freed_bytes: pruned.freed_bytes,
            })
        });
        audited(caller, "image.prune", "", pruning.await)
    }

    /// Checks a password with its registry, and stores it.
    pub async fn login(
        &self,
        caller: &Caller,
        params: ImageLoginParams,
    ) -> Result<Empty, BoxError> {
        let images = self.images_of(caller, "log in to a registry")?;
        let registry = Reference::registry_name(&params.registry).map_err(registry_failed)?;
        let ImageLoginParams {
            username, password, ..
        } = params;
        check_secret("username", &username)?;
        check_secret("password", &password)?;
        if username.contains(':') {
            return Err(Invalid::new("username", "must not contain a colon").into());
        }
        // No other login writes the file meanwhile.
        let mut current = images.registry.lock().await;
        let (inner, of) = (Arc::clone(images), registry.clone());
        let preparing = tokio::task::spawn_blocking(move || {
            let mut passwords = Passwords::read(&inner.config.passwords)?;
            passwords.insert(of, username, password);
            let client = inner.client(&passwords)?;
            Ok((passwords, client))
        });
        let (passwords, client) = preparing.await.unwrap_or_else(|_| Err(lost()))?;
        let checked = client.check_login(&registry).await;
        let checked = checked.map_err(|error| match error {
            box_image::Error::Denied(_) => registry_failed(box_image::Error::Denied(format!(
                "registry {registry}: it refuses the user name or the password; check both"
            ))),
            error => registry_failed(error),
        });
        let stored = match checked {
            Ok(()) => images.store_passwords(&passwords).await,
            Err(error) => Err(error),
        };
        audited(caller, "image.login", &registry, stored)?;
        *current = Some((passwords, client));
        Ok(Empty {})
    }

    /// Removes the stored password of a registry.
    pub async fn logout(
        &self,
        caller: &Caller,
        params: ImageLogoutParams,
    ) -> Result<Empty, BoxError> {
        let images = self.images_of(caller, "log out of a registry")?;
        let registry = Reference::registry_name(&params.registry).map_err(registry_failed)?;
        let mut current = images.registry.lock().await;
        let inner = Arc::clone(images);
        let reading = move || Passwords::read(&inner.config.passwords);
        let reading = tokio::task::spawn_blocking(reading).await;
        let mut passwords = reading.unwrap_or_else(|_| Err(lost()))?;
        if !passwords.remove(&registry) {
            return Err(BoxError::not_found(format!(
                "registry: the server has no password for {registry}; check its name"
            ))
            .with_detail(&Detail::of_field("registry").of(Subject::Image)));
        }
        let stored = images.store_passwords(&passwords).await;
        audited(caller, "image.logout", &registry, stored)?;
        *current = None;
        Ok(Empty {})
    }
}

impl Inner {
    async fn store_passwords(self: &Arc<Self>, passwords: &Passwords) -> Result<(), BoxError> {
        let (inner, passwords) = (Arc::clone(self), passwords.clone());
        let writing = move || passwords.write(&inner.config.passwords);
        let written = tokio::task::spawn_blocking(writing).await;
        written.unwrap_or_else(|_| Err(lost()))
    }

    /// Returns the full record of an image.
    async fn info(self: &Arc<Self>, image: Image) -> Result<ImageInfo, BoxError> {
        let describing = self.with_store(move |inner, _| {
            let mut info = inner.brief(&image, &inner.known_uses().0)?;
            let layers = image.layers.iter();
            info.layers = layers
                .map(|layer| progress::layer((layer.digest, layer.size)))
                .collect();
            info.config = Some(Box::new(config_of(image.config)));
            Ok(info)
        });
        describing.await
    }

    /// Returns the record of an image in a list. Blocks.
    fn brief(&self, image: &Image, uses: &Uses) -> Result<ImageInfo, BoxError> {
        let count = self.store()?.uses(&image.digest, uses).map_err(failed)?;
        let ms = |seconds: u64| UnixMs(seconds.saturating_mul(1000));
        Ok(ImageInfo {
            digest: image.digest.to_string(),
            names: image.names.clone(),
            source: image.source.clone(),
            platform: image.platform.as_ref().map(ToString::to_string),
            disk_bytes: image.disk_bytes,
            created_at: ms(image.created_at),
            used_at: ms(image.used_at),
            uses: count as u64,
            layers: Vec::new(),
            config: None,
        })
    }
}

/// Longest subject in the audit log, in characters. Valid names are shorter.
const SUBJECT_CHARS: usize = 512;

/// Writes the outcome of an action to the audit log.
fn audited<T>(
    caller: &Caller,
    action: &str,
    subject: &str,
    outcome: Result<T, BoxError>,
) -> Result<T, BoxError> {
    let end = subject.char_indices().nth(SUBJECT_CHARS);
    let subject = end.map_or(subject, |(end, _)| &subject[..end]);
    tracing::info!(
        target: "box_runtime::audit",
        caller = &*caller.name(),
        action,
        subject,
        code = outcome.as_ref().err().map(|error| error.code().as_str()),
        "image"
    );
    outcome
}

fn config_of(config: box_image::ImageConfig) -> ImageConfig {
    let variable = |variable: &String| {
        let (name, value) = variable.split_once('=')?;
        Some((name.to_owned(), value.to_owned()))
    };
    ImageConfig {
        env: config.env.iter().filter_map(variable).collect(),
        user: config.user,
        working_dir: config.working_dir,
        entrypoint: config.entrypoint,
        cmd: config.cmd,
        exposed_ports: config.exposed_ports,
        labels: config.labels,
    }
}

fn check_secret(field: &'static str, text: &str) -> Result<(), Invalid> {
    let rule = if text.is_empty() {
        "must not be empty".to_owned()
    } else if text.len() > SECRET_BYTES {
        format!("must not be longer than {SECRET_BYTES} bytes")
    } else if text.chars().any(char::is_control) {
        "must not contain control characters".to_owned()
    } else {
        return Ok(());
    };
    Err(Invalid::new(field, rule))
}

/// Converts an error about a registry instead of an image.
#[allow(clippy::needless_pass_by_value, reason = "the argument of `map_err`")]
fn registry_failed(error: box_image::Error) -> BoxError {
    let detail = Detail::of_field("registry").of(Subject::Image);
    BoxError::new(error.code(), error.to_string()).with_detail(&detail)
}

fn lost() -> BoxError {
    BoxError::internal("registry: the operation failed")
}
