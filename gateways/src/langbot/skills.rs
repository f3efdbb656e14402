//! Skills, which LangBot keeps itself since `langbot-plugin` 0.7.13 and had its Box runtime keep before: directories with a
//! `SKILL.md`, those of each workspace below one of its own.

mod archive;
mod front;
mod store;
mod tree;
mod upload;

use std::sync::Arc;

use box_protocol::BoxError;
use box_service::paths::real_path;
use serde_json::{Map, Value, json};

use self::store::Store;
use self::upload::{Upload, slashes};
use super::Host;
use super::actions::{Data, as_text, members};
use super::context::Placement;
use super::errors::key_error;
use super::mounts::blocking;

/// What is wrong, in words.
type Why = String;

/// As many entries of a directory are told, unless it is said.
const LISTED: usize = 200;

type Members = Map<String, Value>;

pub(super) async fn list(
    host: Arc<Host>,
    placement: Arc<Placement>,
    _: Data,
) -> Result<Value, BoxError> {
    let found = with_store(&host, &placement, Store::list);
    Ok(json!({"skills": found.await?}))
}

pub(super) async fn get(
    host: Arc<Host>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let name = members(&data)?.get("name").map(as_text);
    let name = name.ok_or_else(|| key_error("name"))?;
    let found = with_store(&host, &placement, move |store| store.get(&name));
    Ok(json!({"skill": found.await?}))
}

pub(super) async fn create(
    host: Arc<Host>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let data = members(&data)?;
    let skill = object(&data, "skill")?;
    let made = with_store(&host, &placement, move |store| store.create(&skill));
    Ok(json!({"skill": made.await?}))
}

pub(super) async fn update(
    host: Arc<Host>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let data = members(&data)?;
    let (name, skill) = (required(&data, "name")?, object(&data, "skill")?);
    let changed = with_store(&host, &placement, move |store| store.update(&name, &skill));
    Ok(json!({"skill": changed.await?}))
}

pub(super) async fn delete(
    host: Arc<Host>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let name = required(&members(&data)?, "name")?;
    let deleted = name.clone();
    with_store(&host, &placement, move |store| store.delete(&name)).await?;
    Ok(json!({"deleted": deleted}))
}

pub(super) async fn scan(
    host: Arc<Host>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let path = required(&members(&data)?, "path")?;
    let found = with_store(&host, &placement, move |store| store.scan(&path));
    Ok(json!(found.await?))
}

pub(super) async fn files(
    host: Arc<Host>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let data = members(&data)?;
    let name = required(&data, "name")?;
    let path = data.get("path").map(as_text).unwrap_or_default();
    let hidden = data.get("include_hidden").and_then(Value::as_bool) == Some(true);
    let most = match data.get("max_entries") {
        None => LISTED,
        Some(most) => most
            .as_u64()
            .map_or(0, |most| usize::try_from(most).unwrap_or(usize::MAX)),
    };
    with_store(&host, &placement, move |store| {
        store.files(&name, &path, hidden, most)
    })
    .await
}

pub(super) async fn read(
    host: Arc<Host>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let data = members(&data)?;
    let (name, path) = (required(&data, "name")?, required(&data, "path")?);
    with_store(&host, &placement, move |store| store.read(&name, &path)).await
}

pub(super) async fn write(
    host: Arc<Host>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let data = members(&data)?;
    let (name, path) = (required(&data, "name")?, required(&data, "path")?);
    let content = data.get("content").map(as_text).unwrap_or_default();
    with_store(&host, &placement, move |store| {
        store.write(&name, &path, &content)
    })
    .await
}

pub(super) async fn preview(
    host: Arc<Host>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let (file, upload) = uploaded(&data)?;
    let found = with_store(&host, &placement, move |store| {
        store.preview(&file, &upload)
    });
    Ok(json!({"skills": found.await?}))
}

pub(super) async fn install(
    host: Arc<Host>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let (file, upload) = uploaded(&data)?;
    let made = with_store(&host, &placement, move |store| {
        store.install(&file, &upload)
    });
    Ok(json!({"skills": made.await?}))
}

/// The file that a call names, which is taken, and what is to be done with it.
fn uploaded(data: &Data) -> Result<(Vec<u8>, Upload), BoxError> {
    let members = members(data)?;
    let key = required(&members, "file_key")?;
    let file = data
        .peer
        .take_file(&key)
        .ok_or_else(|| BoxError::validation(key))?;
    let text = |name: &str, otherwise: &str| {
        members
            .get(name)
            .map_or_else(|| otherwise.to_owned(), as_text)
    };
    let mut source_paths: Vec<_> = match members.get("source_paths") {
        Some(Value::Array(paths)) => paths.iter().map(|path| slashes(&as_text(path))).collect(),
        _ => Vec::new(),
    };
    let legacy = slashes(&text("source_path", ""));
    if !legacy.is_empty() {
        source_paths.push(legacy);
    }
    let upload = Upload {
        filename: text("filename", "skill.zip"),
        source_subdir: text("source_subdir", ""),
        suffix: text("target_suffix", "upload"),
        source_paths,
    };
    Ok((file, upload))
}

fn required(data: &Members, name: &str) -> Result<String, BoxError> {
    let missing = || BoxError::validation(format!("'{name}'"));
    data.get(name).map(as_text).ok_or_else(missing)
}

fn object(data: &Members, name: &str) -> Result<Members, BoxError> {
    match data.get(name) {
        Some(Value::Object(members)) => Ok(members.clone()),
        Some(_) => Err(BoxError::validation(format!("{name} must be an object"))),
        None => Err(BoxError::validation(format!("'{name}'"))),
    }
}

/// Does something with the skills of a workspace, one after the other.
async fn with_store<T: Send + 'static>(
    host: &Host,
    placement: &Placement,
    work: impl FnOnce(&Store) -> Result<T, Why> + Send + 'static,
) -> Result<T, BoxError> {
    let (root, places) = (host.config().skills_root(), host.places.clone());
    let namespace = placement.namespace.clone();
    let _turn = host.skills.lock().await;
    blocking(move || {
        // Where it really leads: a box may have put a link on the way.
        let root = real_path(&root).ok();
        let root = root.filter(|root| !places.are_closed_to(root));
        let root = root
            .ok_or_else(|| BoxError::validation("box.local.skills_root is blocked for security"))?;
        work(&Store::new(&root, &namespace)).map_err(BoxError::validation)
    })
    .await
}

impl Host {
    /// The directory of a skill of this workspace.
    pub(super) async fn skill_root(
        &self,
        placement: &Placement,
        name: &str,
    ) -> Result<String, BoxError> {
        let name = name.to_owned();
        with_store(self, placement, move |store| store.root_of(&name)).await
    }
}
