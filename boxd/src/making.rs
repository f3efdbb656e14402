//! Creates the box of `run` and `shell`: temporary, or named and kept.

use anyhow::{Result, bail, ensure};
use box_client::{BoxClient, BoxHandle, ClientError, SpecDraft};
use box_protocol::actions::{BoxUpdate, BoxUpdateParams, EarlierBox};
use box_protocol::{BoxState, DefaultsChange, LifetimeChange, Name, UnixMs, first_conflict};
use box_service::ServiceConfig;

use crate::args::{Arguments, BoxOptions};
use crate::config::{self, Config};
use crate::local::Boxes;
use crate::{boxes, connect, output, signals};

/// Work in a box.
pub(crate) trait Work<T>: AsyncFnOnce(&BoxHandle) -> Result<T> {}

impl<T, F: AsyncFnOnce(&BoxHandle) -> Result<T>> Work<T> for F {}

/// Runs work in a temporary box, of the given server or of this process.
pub(crate) async fn alone<T>(
    arguments: &Arguments,
    options: &BoxOptions,
    work: impl Work<T>,
) -> Result<T> {
    ensure!(
        !options.keep && options.ttl.is_none(),
        "--keep and --ttl require --name"
    );
    let spec = options.draft(fresh_name())?;
    if arguments.endpoint.is_some() {
        let client = server(arguments, options).await?;
        return once(&client, options, spec, work).await;
    }
    // Without a server, the user may mount and connect to everything that the options name.
    let file = options.config.config.as_deref();
    let (mut config, _) = config::load(file, config::variables()?, Vec::new())?;
    config.network.allow(&options.allow);
    // An explicit image must exist.
    config.images.strict |= options.image.is_some();
    let boxes = Boxes::start(&config, None, policy(&config, options))?;
    let (client, _server) = boxes.client().await?;
    once(&client, options, spec, work).await
}

/// Runs work in a new named box, and deletes the box.
pub(crate) async fn briefly<T>(
    arguments: &Arguments,
    options: &BoxOptions,
    name: &str,
    work: impl Work<T>,
) -> Result<T> {
    let spec = spec_of(options, name)?;
    let client = server(arguments, options).await?;
    once(&client, options, spec, work).await
}

/// Creates a named box for `--rm`. Fails if the box exists.
pub(crate) async fn new(
    arguments: &Arguments,
    options: &BoxOptions,
    name: &str,
) -> Result<BoxHandle> {
    let spec = spec_of(options, name)?;
    let client = server(arguments, options).await?;
    let made = match client.create(spec).await {
        Err(error) if error.is_conflict() => {
            bail!("--rm: box {name} already exists; omit --rm, or choose another --name");
        }
        made => made?,
    };
    as_asked(made, options).await
}

/// Finds or creates a named box, which is kept.
pub(crate) async fn named(
    arguments: &Arguments,
    options: &BoxOptions,
    name: &str,
) -> Result<BoxHandle> {
    let spec = spec_of(options, name)?;
    let client = server(arguments, options).await?;
    let there = find_or_make(&client, name, spec).await?;
    if let Some(earlier) = there.earlier() {
        tell_new(arguments.json, name, earlier);
    }
    as_asked(there, options).await
}

/// Prints the fields that the profile changed. Fails if the box lacks a requested feature, and deletes it if it is new.
async fn as_asked(there: BoxHandle, options: &BoxOptions) -> Result<BoxHandle> {
    output::tell_adjusted(there.adjusted());
    if let Err(error) = is_as_asked(&there, options).await {
        if !there.existed() {
            there.delete().await?;
        }
        return Err(error);
    }
    Ok(there)
}

/// Reports that an earlier box of this name has ended.
fn tell_new(json: bool, name: &str, earlier: &EarlierBox) {
    if json {
        let told = serde_json::json!({"new": {"box": name, "earlier": earlier}});
        return output::complain(&told.to_string());
    }
    let ago = boxes::ago(UnixMs::now().since(earlier.ended_at));
    let why = output::visible(&earlier.why);
    output::complain(&format!(
        "boxd: box {name} is new and empty; the previous one ended {ago} ago ({why}); set its lifetime with --ttl or --keep"
    ));
}

/// A unique name for an unnamed box.
pub(crate) fn fresh_name() -> String {
    format!("run-{}", uuid::Uuid::now_v7().simple())
}

async fn server(arguments: &Arguments, options: &BoxOptions) -> Result<BoxClient> {
    ensure!(
        options.profile.is_none(),
        "--profile: not available with a server; the operator sets policy.profile"
    );
    connect::server(arguments).await
}

/// Creates a box, runs work in it and deletes it.
async fn once<T>(
    client: &BoxClient,
    options: &BoxOptions,
    spec: SpecDraft,
    work: impl Work<T>,
) -> Result<T> {
    let made = client.create(spec).await?;
    output::tell_adjusted(made.adjusted());
    let worked = async {
        is_as_asked(&made, options).await?;
        work(&made).await
    };
    let worked = worked.await;
    let deleted = signals::unless_told(made.delete()).await;
    let result = worked?;
    deleted?;
    Ok(result)
}

/// Fails if the box does not use the requested image, or lacks a feature with `--strict`.
///
/// A server may use its own system directories for an unknown image, and a machine may be unable to enforce a limit.
async fn is_as_asked(made: &BoxHandle, options: &BoxOptions) -> Result<()> {
    let info = made.info().await?;
    if let Some(image) = &options.image {
        ensure!(
            info.rootfs.as_deref() != Some("host"),
            "--image: the server has no image {image}; add it to images.roots"
        );
    }
    ensure!(
        !options.strict || info.missing.is_empty(),
        "--strict: this machine lacks {}; see `boxd doctor`",
        info.missing.join(", ")
    );
    if let Some(line) = limits_not_kept(&info.missing) {
        output::complain(&format!("boxd: {line}"));
    }
    Ok(())
}

/// One line with the limits that the machine does not enforce.
fn limits_not_kept(missing: &[String]) -> Option<String> {
    let lacks = |name: &str| missing.iter().any(|missing| missing == name);
    let limits = [
        ("cgroup.cpu", "cpus is not enforced"),
        (
            "cgroup.memory",
            "memory_mb limits each process, not their sum",
        ),
    ];
    let limits = limits.iter().filter(|(name, _)| lacks(name));
    let (names, effects): (Vec<_>, Vec<_>) = limits.copied().unzip();
    (!names.is_empty()).then(|| {
        format!(
            "limits: {}; this machine lacks {}; see `boxd doctor`",
            effects.join(", "),
            names.join(", ")
        )
    })
}

/// Finds or creates the named box. Options given explicitly must match an existing one.
async fn find_or_make(
    client: &BoxClient,
    name: &str,
    mut spec: SpecDraft,
) -> Result<BoxHandle, ClientError> {
    let there = match client.open(name).await {
        Err(error) if error.is_not_found() => return client.get_or_create(spec).await,
        other => other?,
    };
    let info = there.info().await?;
    spec.inherit_unset(&info);
    let network_policy = spec.network_policy.clone();
    let lifetime = spec.lifetime.clone();
    let defaults = spec.defaults.clone();
    // The call counts as use, so the idle time starts again.
    let as_it_is = spec.extra_mounts.is_none() && lifetime.is_none();
    let there = if info.state == BoxState::Running && as_it_is {
        let asked = spec.build()?;
        if let Some(conflict) = first_conflict(&info, &asked) {
            return Err(conflict.into_error(&asked.box_id).into());
        }
        there
    } else {
        client.get_or_create(spec).await?
    };
    if let Some(policy) = network_policy {
        there.set_network_policy(*policy).await?;
    }
    if let Some(lifetime) = lifetime {
        let change = LifetimeChange {
            idle_ms: Some(lifetime.idle_ms),
            ..LifetimeChange::default()
        };
        there.update_lifetime(change).await?;
    }
    if let Some(defaults) = defaults {
        let variables = defaults.env.iter();
        let params = BoxUpdateParams {
            defaults: Some(DefaultsChange {
                env: variables
                    .map(|(name, value)| (name.clone(), Some(value.clone())))
                    .collect(),
                ..DefaultsChange::default()
            }),
            ..BoxUpdateParams::of(there.id().clone())
        };
        client.call::<BoxUpdate>(&params).await?;
    }
    Ok(there)
}

fn policy(config: &Config, options: &BoxOptions) -> ServiceConfig {
    let mut policy = config.policy.clone();
    if let Some(profile) = &options.profile {
        policy.profile.clone_from(profile);
    }
    policy.owner_mounts = true;
    policy
}

/// The spec of a named box. The name is also its host name.
fn spec_of(options: &BoxOptions, name: &str) -> Result<SpecDraft> {
    Ok(options.draft(name.to_owned())?.name(Name::new(name)?))
}
