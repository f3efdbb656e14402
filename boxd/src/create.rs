//! Creates the box of `run` and `shell`: temporary, or named and kept.

use anyhow::{Context as _, Result, bail, ensure};
use box_client::{BoxClient, BoxHandle, ClientError, SpecDraft};
use box_protocol::actions::{BoxUpdate, BoxUpdateParams, EarlierBox};
use box_protocol::error::Subject;
use box_protocol::{
    BoxState, DefaultsChange, HOST_IMAGE, Name, PullPolicy, UnixMs, first_conflict,
};
use box_service::ServiceConfig;

use crate::args::{Action, BoxOptions, Cli, Pull};
use crate::config::{self, Config};
use crate::embedded::EmbeddedServer;
use crate::{boxes, connect, image, output, signals};

/// Name that a box lists as missing if it cannot be paused.
const FREEZE: &str = "cgroup.freeze";

/// Work in a box.
pub(crate) trait Work<T>: AsyncFnOnce(&BoxHandle) -> Result<T> {}

impl<T, F: AsyncFnOnce(&BoxHandle) -> Result<T>> Work<T> for F {}

/// Runs work in a temporary box, of the given server or of this process.
pub(crate) async fn in_temporary_box<T>(
    cli: &Cli,
    options: &BoxOptions,
    work: impl Work<T>,
) -> Result<T> {
    if let Some(option) = options.lifetime_option() {
        bail!("{option}: requires --name; add --name NAME");
    }
    let spec = options.spec(generated_name())?;
    if cli.endpoint.is_some() || options.needs_server() {
        let client = connect(cli, options).await?;
        return run_and_delete(&client, options, spec, work).await;
    }
    // Without a server, the user may mount and connect to everything that the options name.
    let file = options.config.config.as_deref();
    let (mut config, _) = config::load(file, config::variables()?, Vec::new())?;
    config.network.allow(&options.allow);
    if options.image.is_some() {
        config.state_dir().context("--image")?;
    }
    let embedded = EmbeddedServer::start(&config, None, policy(&config, options))?;
    let (client, _server) = embedded.client().await?;
    run_and_delete(&client, options, spec, work).await
}

/// Runs work in a new named box, and deletes the box.
pub(crate) async fn in_new_box<T>(
    cli: &Cli,
    options: &BoxOptions,
    name: &str,
    work: impl Work<T>,
) -> Result<T> {
    let spec = named_spec(options, name)?;
    let client = connect(cli, options).await?;
    run_and_delete(&client, options, spec, work).await
}

/// Creates a named box for `--rm`. Fails if the box exists.
pub(crate) async fn create_new(cli: &Cli, options: &BoxOptions, name: &str) -> Result<BoxHandle> {
    let spec = named_spec(options, name)?;
    let client = connect(cli, options).await?;
    let created = with_image(options, &client, spec, async |spec| {
        client.create(spec).await
    });
    let created = match created.await {
        Err(error) if error.is_conflict() => {
            bail!("--rm: box {name} already exists; omit --rm, or choose another --name");
        }
        created => created?,
    };
    verified(created, options).await
}

/// Finds or creates a named box, which is kept.
pub(crate) async fn open_named(cli: &Cli, options: &BoxOptions, name: &str) -> Result<BoxHandle> {
    let spec = named_spec(options, name)?;
    let client = connect(cli, options).await?;
    let create = async |spec| find_or_create(&client, options, name, spec).await;
    let handle = with_image(options, &client, spec, create).await?;
    if let Some(earlier) = handle.earlier() {
        report_recreated(cli.json, name, earlier);
    }
    verified(handle, options).await
}

/// Prints the fields that the profile changed. Fails if the box lacks a requested feature, and deletes it if it is new.
async fn verified(handle: BoxHandle, options: &BoxOptions) -> Result<BoxHandle> {
    output::report_adjusted(handle.adjusted());
    if let Err(error) = check_features(&handle, options).await {
        if !handle.existed() {
            handle.delete().await?;
        }
        return Err(error);
    }
    Ok(handle)
}

/// Reports that an earlier box of this name has ended.
fn report_recreated(json: bool, name: &str, earlier: &EarlierBox) {
    if json {
        let report = serde_json::json!({"new": {"box": name, "earlier": earlier}});
        return output::eprintln(&report.to_string());
    }
    let age = boxes::format_age(UnixMs::now().since(earlier.ended_at));
    let why = output::visible(&earlier.why);
    output::eprintln(&format!(
        "boxd: box {name} is new and empty; the previous one ended {age} ago ({why}); set its lifetime with --ttl or --keep"
    ));
}

/// A unique name for an unnamed box.
pub(crate) fn generated_name() -> String {
    format!("run-{}", uuid::Uuid::now_v7().simple())
}

/// Connects to the server of a box with these options.
pub(crate) async fn connect(cli: &Cli, options: &BoxOptions) -> Result<BoxClient> {
    ensure!(
        options.profile.is_none(),
        "--profile: not available with a server; the operator sets policy.profile"
    );
    connect::server(cli).await
}

/// Creates a box. Pulls its image first if the server does not have it, and shows the progress.
async fn with_image(
    options: &BoxOptions,
    client: &BoxClient,
    mut spec: SpecDraft,
    create: impl AsyncFn(SpecDraft) -> Result<BoxHandle, ClientError>,
) -> Result<BoxHandle, ClientError> {
    let Some(image) = options.image.as_ref().filter(|image| *image != HOST_IMAGE) else {
        return create(spec).await;
    };
    let images = client.images();
    spec.pull = Some(PullPolicy::Never);
    // A pull catches signals, so they must end what follows.
    if options.pull == Some(Pull::Always) {
        image::pull_shown(&images, image, PullPolicy::Always, options.quiet).await?;
        return signals::or_exit(Box::pin(create(spec))).await;
    }
    match create(spec.clone()).await {
        Err(error) if options.pulls_missing() && lacks_image(&error) => {
            image::pull_shown(&images, image, PullPolicy::Missing, options.quiet).await?;
            signals::or_exit(Box::pin(create(spec))).await
        }
        created => created,
    }
}

/// Whether the server does not have the image of a new box.
fn lacks_image(error: &ClientError) -> bool {
    error.is_not_found() && error.detail().subject == Some(Subject::Image)
}

/// Creates a box, runs work in it and deletes it.
async fn run_and_delete<T>(
    client: &BoxClient,
    options: &BoxOptions,
    spec: SpecDraft,
    work: impl Work<T>,
) -> Result<T> {
    let create = async |spec| client.create(spec).await;
    let created = with_image(options, client, spec, create).await?;
    output::report_adjusted(created.adjusted());
    let work = async {
        check_features(&created, options).await?;
        work(&created).await
    };
    let result = work.await;
    let deleted = signals::finish_before_exit(created.delete()).await;
    let result = result?;
    deleted?;
    Ok(result)
}

/// Fails if the box lacks a feature with `--strict`.
///
/// Prints limits that the machine does not enforce, and why a box is not from its pool.
async fn check_features(created: &BoxHandle, options: &BoxOptions) -> Result<()> {
    let info = created.info().await?;
    ensure!(
        !options.strict || info.missing.is_empty(),
        "--strict: this machine lacks {}; see `boxd doctor`",
        info.missing.join(", ")
    );
    let pauses = [
        ("--on-idle", options.on_idle),
        ("--on-expiry", options.on_expiry),
    ];
    for (option, action) in pauses {
        ensure!(
            action != Some(Action::Pause) || !info.missing.iter().any(|name| name == FREEZE),
            "{option}: this machine cannot pause a box ({FREEZE}); use stop"
        );
    }
    if options.pool.is_some()
        && !created.existed()
        && let Some(why) = &info.pool_missed
    {
        let why = output::visible(why);
        output::eprintln(&format!("boxd: not from the pool: {why}"));
    }
    if let Some(line) = unenforced_limits(&info.missing) {
        output::eprintln(&format!("boxd: {line}"));
    }
    Ok(())
}

/// One line with the limits that the machine does not enforce.
fn unenforced_limits(missing: &[String]) -> Option<String> {
    let lacks = |name: &str| missing.iter().any(|missing| missing == name);
    let limits = [
        ("cgroup.cpu", "cpus is not enforced"),
        (
            "cgroup.memory",
            "memory_mb limits each process, not their sum",
        ),
        (
            "disk.limit",
            "the runtime ends a box that exceeds disk_mb instead of failing its writes",
        ),
        (
            "volume.limit",
            "the runtime ends a box that exceeds the size of a volume instead of failing its writes",
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
async fn find_or_create(
    client: &BoxClient,
    options: &BoxOptions,
    name: &str,
    mut spec: SpecDraft,
) -> Result<BoxHandle, ClientError> {
    let handle = match client.open(name).await {
        Err(error) if error.is_not_found() => return client.get_or_create(spec).await,
        other => other?,
    };
    let info = handle.info().await?;
    spec.inherit_unset(&info);
    let network_policy = spec.network_policy.clone();
    let lifetime = spec.lifetime.clone();
    let defaults = spec.defaults.clone();
    // The call counts as use, so the idle time starts again.
    let is_unchanged = spec.extra_mounts.is_none() && lifetime.is_none();
    let handle = if info.state == BoxState::Running && is_unchanged {
        let requested = spec.build()?;
        if let Some(conflict) = first_conflict(&info, &requested) {
            return Err(conflict.into_error(&requested.box_id).into());
        }
        handle
    } else {
        client.get_or_create(spec).await?
    };
    if let Some(policy) = network_policy {
        handle.set_network_policy(*policy).await?;
    }
    if lifetime.is_some() {
        handle.update_lifetime(options.lifetime_change()).await?;
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
            ..BoxUpdateParams::of(handle.id().clone())
        };
        client.call::<BoxUpdate>(&params).await?;
    }
    Ok(handle)
}

/// The policy of a process without a server: its user may mount everything.
pub(crate) fn policy(config: &Config, options: &BoxOptions) -> ServiceConfig {
    let mut policy = config.policy.clone();
    if let Some(profile) = &options.profile {
        policy.profile.clone_from(profile);
    }
    policy.owner_mounts = true;
    policy
}

/// The spec of a named box. The name is also its host name.
pub(crate) fn named_spec(options: &BoxOptions, name: &str) -> Result<SpecDraft> {
    Ok(options.spec(name.to_owned())?.name(Name::new(name)?))
}
