//! Templates: `/templates`.

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent, ItemDraft, TemplateDraft};
use box_protocol::{BoxState, HOST_IMAGE, Invalid, ItemRef, SpecDraft, VolumeMount};
use serde::Deserialize;
use serde_json::{Value, json};

use super::box_request::apply_base;
use super::catalog::{change, delete_item, item, items, mebibytes_text, put, resolve, shown, with};
use super::errors::{ApiError, in_use};
use super::sizes::{MAX_DISK_MB, MAX_MEMORY_MB, check_cpus, check_megabytes, millicores};
use super::{box_view, boxes};
use crate::http::body::Json;
use crate::http::context::Context;
use crate::http::quantity::{megabytes, quantity};
use crate::http::refusal::json_response;

/// The fields of the contract, and the members of a request that they come from.
const FIELDS: [(&str, &str); 3] = [
    ("cpus", "resources.cpu"),
    ("memory_mb", "resources.memory"),
    ("disk_mb", "resources.storage"),
];

/// The resources of a template that sets none.
const CPU: &str = "500m";
const MEMORY: &str = "512Mi";

fn cpus_text(cpus: f64) -> String {
    match millicores(cpus) {
        whole if whole % 1000 == 0 => (whole / 1000).to_string(),
        part => format!("{part}m"),
    }
}

/// Resources of a template.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Resources {
    cpu: Option<String>,
    memory: Option<String>,
    storage: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Mount {
    volume_name: String,
    mount_path: String,
}

/// A new template.
#[derive(Debug, Deserialize)]
pub(super) struct NewTemplate {
    name: String,
    image: String,
    #[serde(default)]
    resources: Resources,
    #[serde(default)]
    volume_mounts: Option<Vec<Mount>>,
}

impl NewTemplate {
    /// Returns the spec without volumes.
    fn spec(&self) -> Result<SpecDraft, Invalid> {
        let mut spec = SpecDraft::default();
        apply_base(&mut spec);
        if self.image.trim().is_empty() {
            return Err(Invalid::new("image", "must not be empty"));
        }
        spec.image = Some(self.image.clone());
        let resources = &self.resources;
        let cpu = resources.cpu.as_deref().unwrap_or(CPU);
        spec.cpus = Some(quantity("resources.cpu", cpu)?);
        check_cpus("resources.cpu", spec.cpus)?;
        let memory = resources.memory.as_deref().unwrap_or(MEMORY);
        spec.memory_mb = Some(megabytes("resources.memory", memory)?);
        check_megabytes("resources.memory", spec.memory_mb, MAX_MEMORY_MB)?;
        if let Some(storage) = &resources.storage {
            spec.disk_mb = Some(megabytes("resources.storage", storage)?);
        }
        check_megabytes("resources.storage", spec.disk_mb, MAX_DISK_MB)?;
        Ok(spec)
    }

    async fn mounts(&self, context: &Context) -> Result<Vec<VolumeMount>, ApiError> {
        let mut mounts = Vec::new();
        for mount in self.volume_mounts.iter().flatten() {
            let (kind, name) = (CatalogKind::Volume, &mount.volume_name);
            let (volume, _) = resolve(context, kind, "volume_name", name).await?;
            mounts.push(VolumeMount::new(volume, mount.mount_path.clone())?);
        }
        Ok(mounts)
    }
}

/// Returns a template, with the names that its volumes have now.
async fn template_view(context: &Context, template: &CatalogItem) -> Value {
    let ItemContent::Template(properties) = &template.content else {
        return shown(template);
    };
    let spec = &properties.spec;
    let mut mounts = Vec::new();
    for mount in spec.volumes.iter().flatten() {
        let text = mount.volume.as_str();
        let volume = item(context, CatalogKind::Volume, text).await.ok();
        let name = volume.as_ref().map_or(text, |volume| volume.name.as_str());
        mounts.push(json!({"volume_name": name, "mount_path": mount.mount_path}));
    }
    let disk = spec.disk_mb.filter(|disk| *disk > 0);
    let resources = json!({
        "cpu": spec.cpus.map_or_else(|| CPU.to_owned(), cpus_text),
        "memory": spec.memory_mb.map_or_else(|| MEMORY.to_owned(), mebibytes_text),
        "storage": disk.map(mebibytes_text),
    });
    let more = json!({
        "image": spec.image.as_deref().unwrap_or(HOST_IMAGE),
        "resources": resources,
        "volume_mounts": mounts,
    });
    with(shown(template), more)
}

/// `POST /templates`.
pub(super) async fn create(
    context: Context,
    Json(request): Json<NewTemplate>,
) -> Result<Response, ApiError> {
    let mut spec = request.spec()?;
    let mounts = request.mounts(&context).await?;
    spec.volumes = Some(mounts).filter(|mounts| !mounts.is_empty());
    let draft = ItemDraft::Template(Box::new(TemplateDraft { spec }));
    let created = put(&context, request.name, draft).await;
    let item = created.map_err(|error| ApiError::from(error).with_fields(&FIELDS))?;
    let view = template_view(&context, &item).await;
    Ok(json_response(StatusCode::CREATED, &view))
}

/// `GET /templates`.
pub(super) async fn list(context: Context) -> Result<Response, ApiError> {
    let items = items(&context, CatalogKind::Template).await?;
    let mut templates = Vec::new();
    for item in &items {
        templates.push(template_view(&context, item).await);
    }
    Ok(json_response(
        StatusCode::OK,
        &json!({"templates": templates}),
    ))
}

/// `GET /templates/{name}`.
pub(super) async fn get(context: Context, Path(name): Path<String>) -> Result<Response, ApiError> {
    let item = item(&context, CatalogKind::Template, &name).await?;
    let view = template_view(&context, &item).await;
    Ok(json_response(StatusCode::OK, &view))
}

/// A new name.
#[derive(Debug, Deserialize)]
pub(super) struct Rename {
    name: Option<String>,
}

/// `PATCH /templates/{name}`.
pub(super) async fn update(
    context: Context,
    Path(name): Path<String>,
    Json(request): Json<Rename>,
) -> Result<Response, ApiError> {
    let item = item(&context, CatalogKind::Template, &name).await?;
    let item = change(&context, &item, request.name, None).await?;
    let view = template_view(&context, &item).await;
    Ok(json_response(StatusCode::OK, &view))
}

/// `DELETE /templates/{name}`.
pub(super) async fn delete(
    context: Context,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    let template = item(&context, CatalogKind::Template, &name).await?;
    let boxes = boxes::all(&context).await?;
    let user = boxes.iter().find(|info| {
        let of = info.template.as_ref().map(ItemRef::as_str);
        info.state != BoxState::Failed && of == Some(template.id.as_str())
    });
    if let Some(user) = user {
        return Err(in_use("template", "sandbox", box_view::name(user)));
    }
    delete_item(&context, &template).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_return_as_they_were_sent() {
        for (text, cpus) in [("500m", 0.5), ("1", 1.0), ("2", 2.0), ("1500m", 1.5)] {
            assert_eq!(cpus_text(cpus), text);
        }
    }

    #[test]
    fn a_template_has_the_default_resources() {
        let template: NewTemplate = serde_json::from_value(json!({
            "name": "t", "image": "host",
        }))
        .unwrap();
        let spec = template.spec().unwrap();
        assert_eq!(
            (spec.cpus, spec.memory_mb, spec.disk_mb),
            (Some(0.5), Some(512), None)
        );
        for (resource, text) in [
            ("cpu", "lots"),
            ("cpu", "100000"),
            ("cpu", "1m"),
            ("memory", "99999Ti"),
            ("storage", "99999Ti"),
        ] {
            let wrong: NewTemplate = serde_json::from_value(json!({
                "name": "t", "image": "host", "resources": {resource: text},
            }))
            .unwrap();
            let refused = wrong.spec().unwrap_err();
            assert_eq!(refused.field(), format!("resources.{resource}"));
        }
    }
}
