//! From `image`, `pull` and `user` of a spec to the root file system of a box.

use std::path::Path;
use std::sync::Arc;

use box_image::{Digest, Image, Lease, PullOptions, Reference};
use box_protocol::actions::PullProgress;
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxSpec, Code, Env, PullPolicy, paths};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use tokio::sync::mpsc;

use super::config::is_allowed;
use super::{Images, Inner, failed, progress};
use crate::backend::ImageRoot;
use crate::box_actor::entry::ImageDefaults;

/// What an image means for a box.
pub(crate) struct ResolvedImage {
    /// The root file system, for the backend.
    pub(crate) root: ImageRoot,
    /// The defaults of the commands of the box.
    pub(crate) defaults: ImageDefaults,
    /// Keeps the image.
    pub(crate) lease: Option<Lease>,
}

impl Images {
    /// Finds the image of a spec, and pulls it if the spec and the caller's rights say so.
    ///
    /// Without an image, the backend decides. `pulls_all` says whether the caller may pull every
    /// image.
    pub(crate) async fn resolve(
        &self,
        spec: &BoxSpec,
        pulls_all: bool,
    ) -> Result<Option<ResolvedImage>, BoxError> {
        let Some(name) = &spec.image else {
            return without_image(spec);
        };
        let Some(inner) = &self.0 else {
            return Ok(None);
        };
        if let Some(path) = inner.config.roots.get(name) {
            return Ok(Some(ResolvedImage {
                root: ImageRoot::new(path),
                defaults: ImageDefaults::default(),
                lease: None,
            }));
        }
        let policy = spec.pull.unwrap_or(PullPolicy::Missing);
        let found = inner.find_or_pull(name, policy, pulls_all, None).await;
        let image = match found {
            Err(error) if is_optional(spec) && is_missing(&error) && !inner.config.strict => {
                return without_image(spec);
            }
            found => found?,
        };
        let asks_argv = spec.main.as_ref().is_some_and(|main| main.argv.is_empty());
        let has_workspace = spec.mounts_host_path();
        let resolving = inner.with_store(move |_, store| {
            let lease = store.lease(&image.digest).map_err(failed)?;
            let path = lease.rootfs();
            let workdir = working_directory(&path, &image);
            let argv = image.config.entrypoint.iter().chain(&image.config.cmd);
            Ok(ResolvedImage {
                defaults: ImageDefaults {
                    cwd: workdir.clone().filter(|_| !has_workspace),
                    argv: argv.filter(|_| asks_argv).cloned().collect(),
                },
                root: ImageRoot {
                    digest: Some(image.digest.to_string()),
                    user: Some(image.config.user.clone()),
                    env: environment(&image.config.env),
                    workdir,
                    ..ImageRoot::new(path)
                },
                lease: Some(lease),
            })
        });
        resolving.await.map(Some)
    }
}

/// The root file system of an existing box, kept while this exists.
pub(crate) struct HeldImage {
    /// The root file system, without its configuration.
    pub(crate) root: ImageRoot,
    _lease: Option<Lease>,
}

impl Images {
    /// Returns the root file system of a box, by the digest that it was created with.
    ///
    /// `None` if the backend knows it.
    pub(crate) async fn hold_root(
        &self,
        spec: &BoxSpec,
        digest: Option<&str>,
    ) -> Result<Option<HeldImage>, BoxError> {
        let Some(inner) = &self.0 else {
            return Ok(None);
        };
        let Some(digest) = digest else {
            let root = spec
                .image
                .as_ref()
                .and_then(|name| inner.config.roots.get(name));
            return Ok(root.map(|path| HeldImage {
                root: ImageRoot::new(path),
                _lease: None,
            }));
        };
        let digest: Digest = digest.parse().map_err(failed)?;
        let holding = inner.with_store(move |_, store| {
            let lease = store.lease(&digest).map_err(failed)?;
            Ok(HeldImage {
                root: ImageRoot::new(lease.rootfs()),
                _lease: Some(lease),
            })
        });
        holding.await.map(Some)
    }
}

fn without_image(spec: &BoxSpec) -> Result<Option<ResolvedImage>, BoxError> {
    if spec.main.as_ref().is_some_and(|main| main.argv.is_empty()) {
        let message = "main: argv must not be empty without an image; set argv or image";
        return Err(BoxError::validation(message).with_detail(&Detail::of_field("main")));
    }
    Ok(None)
}

fn is_optional(spec: &BoxSpec) -> bool {
    let mut best_effort = spec.best_effort.iter().flatten();
    best_effort.any(|primitive| primitive == "image")
}

/// Returns whether the store has no such image, or the name cannot be one of an image.
fn is_missing(error: &BoxError) -> bool {
    matches!(error.code(), Code::NotFound | Code::Validation)
}

/// Returns the working directory of an image, if it is one that exists in it.
fn working_directory(root: &Path, image: &Image) -> Option<String> {
    let path = &image.config.working_dir;
    let path = paths::inside("workdir", path)
        .ok()
        .filter(|path| path != "/")?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty()).ok()?;
    let beneath = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(&root, &path, flags, Mode::empty(), beneath).ok()?;
    Some(path)
}

/// Returns the variables of an image without those that no process can have.
fn environment(variables: &[String]) -> Env {
    let mut env = Env::new();
    for variable in variables {
        if let Some((name, value)) = variable.split_once('=') {
            let _ = env.insert(name, value);
        }
    }
    env
}

impl Inner {
    /// Finds an image, or pulls it.
    pub(super) async fn find_or_pull(
        self: &Arc<Self>,
        name: &str,
        policy: PullPolicy,
        pulls_all: bool,
        report_to: Option<mpsc::Sender<PullProgress>>,
    ) -> Result<Image, BoxError> {
        if policy != PullPolicy::Always {
            match self.find(name).await {
                Err(error)
                    if error.code() == Code::NotFound
                        && policy == PullPolicy::Missing
                        && name.parse::<Digest>().is_err() => {}
                found => return found,
            }
        }
        if let Ok(digest) = name.parse::<Digest>() {
            return Err(failed(box_image::Error::Invalid(format!(
                "image: {digest} has no name; use NAME@DIGEST to pull it"
            ))));
        }
        let reference: Reference = name.parse().map_err(failed)?;
        if !pulls_all && !is_allowed(&self.config.allow_pull, &reference) {
            let name = reference.familiar_name();
            let problem = match policy {
                PullPolicy::Always => format!("this caller may not pull {name}"),
                _ => format!("{name} is not on this machine, and this caller may not pull it"),
            };
            return Err(BoxError::denied(format!(
                "image: {problem}; ask the operator to add it to images.allow_pull"
            ))
            .with_detail(&Detail::of_field("image").of(Subject::Image)));
        }
        let registry = self.registry().await?;
        let _permit = self.pulls.acquire().await;
        if policy == PullPolicy::Missing
            && let Ok(image) = self.find(name).await
        {
            // Another call has pulled it meanwhile.
            return Ok(image);
        }
        let store = self.with_store(|_, store| Ok(store.clone())).await?;
        let (progress, reports) = progress::channel();
        let options = PullOptions {
            progress,
            ..PullOptions::default()
        };
        // Boxed, because it is large.
        let pull = Box::pin(box_image::pull(&store, &registry, &reference, &options));
        let pulled = match report_to {
            None => pull.await,
            Some(to) => reports.during(&to, pull).await,
        };
        pulled.map_err(failed)
    }

    /// Finds an image in the store.
    pub(super) async fn find(self: &Arc<Self>, name: &str) -> Result<Image, BoxError> {
        let name = name.to_owned();
        self.with_store(move |_, store| store.get(&name).map_err(failed))
            .await
    }
}
