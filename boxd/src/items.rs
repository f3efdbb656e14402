//! Commands for items of the catalog: `volume`, `template` and `pool`.

use std::io::Read as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use box_client::{
    CatalogItem, CatalogKind, CatalogListParams, CatalogPutParams, CatalogUpdateParams, SpecDraft,
};
use box_protocol::catalog::{
    ItemChange, ItemContent, ItemDraft, PoolChange, PoolDraft, TemplateDraft, VolumeChange,
    VolumeDraft,
};
use box_protocol::{Defaults, ItemRef, Labels, Name, UnixMs};

use crate::args::{
    Cli, ItemChanges, ItemListArgs, ItemOptions, PoolArgs, PoolCommand, Switch, TemplateArgs,
    TemplateCommand, TemplateSpec, VolumeArgs, VolumeCommand,
};
use crate::boxes::{for_each_target, format_age, show};
use crate::{connect, output, values};

/// Largest file with a spec.
const SPEC_BYTES: u64 = 4 << 20;

/// `boxd volume`.
pub(crate) async fn volume(cli: &Cli, args: &VolumeArgs) -> Result<ExitCode> {
    match &args.command {
        VolumeCommand::Create(args) => {
            let mut draft = VolumeDraft {
                shared: args.shared,
                ..VolumeDraft::default()
            };
            if let Some(size) = args.size {
                draft.size_mb = size;
            }
            create(cli, &args.name, &args.options, ItemDraft::Volume(draft)).await
        }
        VolumeCommand::Ls(args) => list(cli, args, CatalogKind::Volume).await,
        VolumeCommand::Inspect(args) => inspect(cli, &args.names, CatalogKind::Volume).await,
        VolumeCommand::Update(args) => {
            let change = VolumeChange {
                size_mb: args.size,
                shared: args.shared.map(|shared| shared == Switch::On),
            };
            let content = (change != VolumeChange::default()).then_some(change);
            let content = content.map(ItemChange::Volume);
            update(cli, CatalogKind::Volume, &args.item, &args.changes, content).await
        }
        VolumeCommand::Rm(args) => remove(cli, &args.names, CatalogKind::Volume).await,
    }
}

/// `boxd template`.
pub(crate) async fn template(cli: &Cli, args: &TemplateArgs) -> Result<ExitCode> {
    const KIND: CatalogKind = CatalogKind::Template;
    match &args.command {
        TemplateCommand::Create(args) => {
            let spec = spec(&args.spec)?;
            let draft = ItemDraft::Template(Box::new(TemplateDraft { spec }));
            create(cli, &args.name, &args.options, draft).await
        }
        TemplateCommand::Ls(args) => list(cli, args, KIND).await,
        TemplateCommand::Inspect(args) => inspect(cli, &args.names, KIND).await,
        TemplateCommand::Update(args) => {
            let spec = spec(&args.spec)?;
            let content = (spec != SpecDraft::default())
                .then(|| ItemChange::Template(Box::new(TemplateDraft { spec })));
            update(cli, KIND, &args.item, &args.changes, content).await
        }
        TemplateCommand::Rm(args) => remove(cli, &args.names, KIND).await,
    }
}

/// `boxd pool`.
pub(crate) async fn pool(cli: &Cli, args: &PoolArgs) -> Result<ExitCode> {
    const KIND: CatalogKind = CatalogKind::Pool;
    match &args.command {
        PoolCommand::Create(args) => {
            let mut draft = PoolDraft::new(ItemRef::new(&args.template)?, args.size);
            if let Some(max_age) = args.max_age {
                draft.max_age_sec = max_age.as_secs().max(1);
            }
            let draft = ItemDraft::Pool(Box::new(draft));
            create(cli, &args.name, &args.options, draft).await
        }
        PoolCommand::Ls(args) => list(cli, args, KIND).await,
        PoolCommand::Inspect(args) => inspect(cli, &args.names, KIND).await,
        PoolCommand::Update(args) => {
            let change = PoolChange {
                template: args.template.as_ref().map(ItemRef::new).transpose()?,
                size: args.size,
                max_age_sec: args.max_age.map(|max_age| max_age.as_secs().max(1)),
                ..PoolChange::default()
            };
            let content = (change != PoolChange::default()).then(|| Box::new(change));
            let content = content.map(ItemChange::Pool);
            update(cli, KIND, &args.item, &args.changes, content).await
        }
        PoolCommand::Rm(args) => remove(cli, &args.names, KIND).await,
    }
}

async fn create(
    cli: &Cli,
    name: &str,
    options: &ItemOptions,
    content: ItemDraft,
) -> Result<ExitCode> {
    let params = CatalogPutParams {
        name: Name::new(name)?,
        tags: names(&options.tag)?,
        labels: labels(&options.label)?,
        content,
    };
    let client = connect::server(cli).await?;
    let item = client.put_item(&params).await?;
    print_item(cli, &item)
}

pub(crate) async fn update(
    cli: &Cli,
    kind: CatalogKind,
    item: &str,
    changes: &ItemChanges,
    content: Option<ItemChange>,
) -> Result<ExitCode> {
    let removed = changes.unlabel.iter().map(|label| (label.clone(), None));
    let added = labels(&changes.options.label)?.into_iter();
    let params = CatalogUpdateParams {
        name: changes.name.as_ref().map(Name::new).transpose()?,
        tags: names(&changes.options.tag)?,
        untag: names(&changes.untag)?,
        labels: removed
            .chain(added.map(|(label, value)| (label, Some(value))))
            .collect(),
        content,
        ..CatalogUpdateParams::of(kind, ItemRef::new(item)?)
    };
    let client = connect::server(cli).await?;
    let item = client.update_item(&params).await?;
    print_item(cli, &item)
}

/// Prints the name of a changed item, or all of it as JSON.
pub(crate) fn print_item(cli: &Cli, item: &CatalogItem) -> Result<ExitCode> {
    output::print_or_json(cli.json, &output::lines([&item.name]), item)?;
    Ok(ExitCode::SUCCESS)
}

async fn list(cli: &Cli, args: &ItemListArgs, kind: CatalogKind) -> Result<ExitCode> {
    let filter = CatalogListParams {
        labels: labels(&args.label)?,
        ..CatalogListParams::of(kind)
    };
    list_with(cli, args.quiet, filter).await
}

/// Prints the items that match a filter.
pub(crate) async fn list_with(
    cli: &Cli,
    quiet: bool,
    filter: CatalogListParams,
) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let kind = filter.kind;
    let items = client.items(filter).await?;
    let names = items.iter().map(|item| item.name.to_string());
    show(cli, quiet, names, &items, || table(kind, &items))
}

fn table(kind: CatalogKind, items: &[CatalogItem]) -> String {
    let now = UnixMs::now();
    let row = |item: &CatalogItem| {
        let tags: Vec<_> = item.tags.iter().map(Name::as_str).collect();
        let mut row = vec![item.name.to_string()];
        row.extend(content(item));
        row.extend([
            item.used_by.to_string(),
            format_age(now.since(item.created_at)),
            item.owner.clone(),
            tags.join(" "),
        ]);
        row
    };
    let rows: Vec<_> = items.iter().map(row).collect();
    let heads: &[&str] = match kind {
        CatalogKind::Volume => &["VOLUME", "SIZE", "WRITERS", "LIMIT"],
        CatalogKind::Template => &["TEMPLATE", "SYSTEM", "MEMORY"],
        CatalogKind::Pool => &["POOL", "READY", "STATE"],
        CatalogKind::Snapshot => &["SNAPSHOT", "BOX", "SIZE"],
        CatalogKind::Image => &["NAME"],
    };
    output::table(
        &[heads, &["USED BY", "AGE", "OWNER", "TAGS"]].concat(),
        &rows,
    )
}

/// The columns of a kind.
fn content(item: &CatalogItem) -> Vec<String> {
    match &item.content {
        ItemContent::Image(_) => Vec::new(),
        ItemContent::Volume(volume) => vec![
            format!("{} MiB", volume.size_mb),
            if volume.shared { "many" } else { "one" }.to_owned(),
            if volume.enforced {
                "kernel"
            } else {
                "measured"
            }
            .to_owned(),
        ],
        ItemContent::Template(template) => vec![
            template.spec.image.clone().unwrap_or_default(),
            template
                .spec
                .memory_mb
                .map_or_else(String::new, |memory| format!("{memory} MiB")),
        ],
        ItemContent::Pool(pool) => vec![
            format!("{} of {}", pool.ready, pool.size),
            item.reason.clone().unwrap_or_else(|| "ready".to_owned()),
        ],
        ItemContent::Snapshot(snapshot) => vec![
            snapshot
                .source_box
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            item.size_bytes.map(mebibytes).unwrap_or_default(),
        ],
    }
}

/// A size in MiB, rounded up.
pub(crate) fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

pub(crate) async fn inspect(cli: &Cli, names: &[String], kind: CatalogKind) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let mut items = Vec::new();
    for name in names {
        items.push(client.item(kind, name).await?);
    }
    // Always JSON, the only format with every field.
    let text = match items.as_slice() {
        [item] => output::json(item)?,
        items => output::json(&items)?,
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn remove(cli: &Cli, names: &[String], kind: CatalogKind) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    for_each_target(cli, names, "deleted", async |name, names| {
        client.delete_item(kind, name).await?;
        names.push(name.to_owned());
        Ok(())
    })
    .await
}

/// The spec of a template: that of a file, overridden by options.
fn spec(args: &TemplateSpec) -> Result<SpecDraft> {
    let options = &args.box_options;
    ensure!(
        options.profile.is_none() && !options.strict,
        "--profile and --strict: not possible in a template; the operator sets policy.profile"
    );
    let mut spec = options.spec(String::new())?;
    spec.box_id = None;
    if !args.env.is_empty() {
        let defaults = spec.defaults.get_or_insert_with(Defaults::default);
        for text in &args.env {
            let (name, value) = values::variable(text)?;
            defaults.env.insert(name, value)?;
        }
    }
    if let Some(path) = &args.spec {
        spec.fill_from(&read_spec(path)?);
    }
    Ok(spec)
}

fn read_spec(path: &Path) -> Result<SpecDraft> {
    let read = |source: &mut dyn std::io::Read| -> std::io::Result<String> {
        let mut text = String::new();
        source.take(SPEC_BYTES + 1).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = if path == Path::new("-") {
        read(&mut std::io::stdin().lock())
    } else {
        std::fs::File::open(path).and_then(|mut file| read(&mut file))
    };
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        text.len() as u64 <= SPEC_BYTES,
        "--spec: longer than {SPEC_BYTES} bytes"
    );
    let spec = serde_json::from_str(&text).map_err(box_protocol::Invalid::from);
    spec.with_context(|| format!("--spec {}", path.display()))
}

pub(crate) fn names(texts: &[String]) -> Result<Vec<Name>> {
    let names = texts.iter().map(|text| Ok(Name::new(text)?));
    names.collect()
}

pub(crate) fn labels(texts: &[String]) -> Result<Labels> {
    let label = |text: &String| match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => bail!("--label {text}: expected NAME=VALUE"),
    };
    texts.iter().map(label).collect()
}
