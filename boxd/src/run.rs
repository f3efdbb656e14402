//! `run` and `exec`: one command, on this terminal or these pipes.

use std::process::ExitCode;

use anyhow::{Result, anyhow, ensure};
use box_client::{
    BoxClient, BoxHandle, ClientError, CommandBuilder, Exit, Network, NetworkPolicy, SpecDraft,
};
use box_protocol::{BoxSessionInfo, BoxState, first_conflict};
use box_service::ServiceConfig;

use crate::args::{Arguments, ExecArguments, Manner, Program, RunArguments, Switch};
use crate::attached::{self, MADE_WITH_MORE, code_of, explain};
use crate::config::{self, Config};
use crate::local::Boxes;
use crate::{connect, output, said, signals, values};

/// `boxd run`.
pub(crate) async fn run(arguments: &Arguments, asked: &RunArguments) -> Result<ExitCode> {
    let mut spec = spec(asked)?;
    if asked.session.is_some() || arguments.endpoint.is_some() {
        ensure!(
            asked.profile.is_none(),
            "--profile is for a run without a server; a server's boxes have the profile of its operator (policy.profile)"
        );
        let client = connect::server(arguments).await?;
        if let Some(session) = &asked.session {
            spec.session_id = Some(session.clone());
            let made = named(&client, session, spec).await?;
            if let Err(error) = is_as_asked(&made, asked).await {
                if !made.existed() {
                    made.delete().await?;
                }
                return Err(error);
            }
            return go(arguments, &made, asked).await;
        }
        return once(arguments, &client, spec, asked).await;
    }
    // What a person names for a run of their own may be mounted, and connected to.
    let file = asked.config.config.as_deref();
    let (mut config, _) = config::load(file, config::variables()?, Vec::new())?;
    config.network.allow(&asked.allow);
    // Whoever names an image wants that one.
    config.images.strict |= asked.image.is_some();
    let boxes = Boxes::start(&config, None, policy(&config, asked, &spec))?;
    let (client, _server) = boxes.client().await?;
    once(arguments, &client, spec, asked).await
}

/// In a box that goes with the command.
async fn once(
    arguments: &Arguments,
    client: &BoxClient,
    spec: SpecDraft,
    asked: &RunArguments,
) -> Result<ExitCode> {
    let made = client.create(spec).await?;
    let ran = async {
        is_as_asked(&made, asked).await?;
        go(arguments, &made, asked).await
    };
    let ran = ran.await;
    let deleted = signals::unless_told(made.delete()).await;
    let code = ran?;
    deleted?;
    Ok(code)
}

/// Whether the box is of the image that was named, and has what was asked for: a server may take its own machine's system for an
/// image it does not know, and a machine may lack what enforces a limit.
async fn is_as_asked(made: &BoxHandle, asked: &RunArguments) -> Result<()> {
    let info = made.info().await?;
    if let Some(image) = &asked.image {
        ensure!(
            info.rootfs.as_deref() != Some("host"),
            "there is no image {image} at the server, whose own system the box has; images.roots says which there are"
        );
    }
    ensure!(
        !asked.strict || info.missing.is_empty(),
        "--strict: this machine lacks {}; `boxd doctor` says what each is for",
        info.missing.join(", ")
    );
    if let Some(line) = limits_not_kept(&info.missing) {
        output::complain(&format!("boxd: {line}"));
    }
    Ok(())
}

/// Which limits of a box are not enforced because of what its machine lacks, in one line.
fn limits_not_kept(missing: &[String]) -> Option<String> {
    let lacks = |name: &str| missing.iter().any(|missing| missing == name);
    let limits = [
        ("cgroup.cpu", "cpus is not enforced"),
        ("cgroup.memory", "memory_mb holds for each process alone"),
    ];
    let limits = limits.iter().filter(|(name, _)| lacks(name));
    let (names, effects): (Vec<_>, Vec<_>) = limits.copied().unzip();
    (!names.is_empty()).then(|| {
        format!(
            "limits: {}; this machine lacks {}, see `boxd doctor`",
            effects.join(", "),
            names.join(", ")
        )
    })
}

/// The box of this name: the one that is there, as it is unless something was said that it is not, or a new one.
async fn named(
    client: &BoxClient,
    session: &str,
    spec: SpecDraft,
) -> Result<BoxHandle, ClientError> {
    let there = match client.open(session).await {
        Err(error) if error.is_not_found() => return client.get_or_create(spec).await,
        other => other?,
    };
    let info = there.info().await?;
    let spec = unsaid_as_it_is(spec, &info);
    let network_policy = spec.extras.network_policy.clone();
    let there = if info.state == BoxState::Running && spec.extra_mounts.is_none() {
        let asked = spec.build()?;
        if let Some(conflict) = first_conflict(&info, &asked) {
            return Err(conflict.into_error(&asked.session_id).into());
        }
        there
    } else {
        client.get_or_create(spec).await?
    };
    if let Some(policy) = network_policy {
        there.set_network_policy(*policy).await?;
    }
    Ok(there)
}

/// What was not said is as it is.
fn unsaid_as_it_is(mut spec: SpecDraft, info: &BoxSessionInfo) -> SpecDraft {
    if spec.host_path.is_none() {
        spec.host_path.clone_from(&info.host_path);
        spec.host_path_mode = Some(info.host_path_mode);
    }
    spec.network.get_or_insert(info.network);
    spec.image.get_or_insert_with(|| info.image.clone());
    spec.mount_path
        .get_or_insert_with(|| info.mount_path.clone());
    spec.persistent.get_or_insert(info.persistent);
    spec.cpus.get_or_insert(info.cpus);
    spec.memory_mb.get_or_insert(info.memory_mb);
    spec.pids_limit.get_or_insert(info.pids_limit);
    spec.read_only_rootfs.get_or_insert(info.read_only_rootfs);
    spec.workspace_quota_mb
        .get_or_insert(info.workspace_quota_mb);
    spec
}

fn policy(config: &Config, asked: &RunArguments, spec: &SpecDraft) -> ServiceConfig {
    let mut policy = config.policy.clone();
    if let Some(profile) = &asked.profile {
        policy.profile.clone_from(profile);
    }
    let mounts = spec
        .extra_mounts
        .iter()
        .flatten()
        .map(|mount| &mount.host_path);
    let named = spec.host_path.iter().chain(mounts);
    policy
        .allowed_host_mount_roots
        .extend(named.map(Into::into));
    policy
}

fn spec(asked: &RunArguments) -> Result<SpecDraft> {
    let mut spec = SpecDraft::new(format!("run-{}", uuid::Uuid::now_v7().simple()));
    if let Some(workspace) = &asked.workspace {
        let (path, mode) = values::workspace(workspace)?;
        spec = spec.host_path(path).host_path_mode(mode);
    }
    let mounts: Vec<_> = asked
        .mount
        .iter()
        .map(|mount| values::mount(mount))
        .collect::<Result<_>>()?;
    if !mounts.is_empty() {
        spec = spec.extra_mounts(mounts);
    }
    spec.network = asked.network.map(|network| match network {
        Switch::On => Network::On,
        Switch::Off => Network::Off,
    });
    if !asked.allow.is_empty() {
        if spec.network == Some(Network::Off) {
            return Err(anyhow!("--allow is for a box with a network"));
        }
        spec.network = Some(Network::On);
        spec.extras.network_policy = Some(Box::new(NetworkPolicy {
            allow: Some(asked.allow.clone()),
            ..NetworkPolicy::default()
        }));
    }
    spec.cpus = asked.cpus;
    spec.memory_mb = asked.memory_mb;
    spec.pids_limit = asked.pids;
    spec.workspace_quota_mb = asked.quota_mb;
    spec.image.clone_from(&asked.image);
    spec.read_only_rootfs = asked.writable.then_some(false);
    Ok(spec)
}

/// `boxd exec`.
pub(crate) async fn exec(arguments: &Arguments, asked: &ExecArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let there = client.open(&asked.session).await?;
    let mut command = command(&there, &asked.program, &asked.manner)?;
    if let Some(id) = &asked.id {
        command = command.id(id);
    }
    if let Some(user) = &asked.user {
        command = command.user(user);
    }
    if asked.detach {
        let started = command.detached().start().await?;
        let name = format!("{}/{}", there.id(), started.id());
        output::say_or_json(
            arguments.json,
            &format!("{name}\n"),
            &serde_json::json!({"command": name}),
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    let exit = attached::run(command, &asked.manner, arguments.json).await?;
    ended(arguments, &exit, MADE_WITH_MORE)
}

async fn go(arguments: &Arguments, there: &BoxHandle, asked: &RunArguments) -> Result<ExitCode> {
    let command = command(there, &asked.program, &asked.manner)?;
    let exit = attached::run(command, &asked.manner, arguments.json).await?;
    let more_memory = if there.existed() {
        MADE_WITH_MORE
    } else {
        "; --memory-mb gives it more"
    };
    ended(arguments, &exit, more_memory)
}

fn ended(arguments: &Arguments, exit: &Exit, more_memory: &str) -> Result<ExitCode> {
    if arguments.json {
        said::line(&serde_json::json!({"exit": exit}))?;
    } else {
        explain(exit, "; --timeout gives it more", more_memory);
    }
    Ok(code_of(exit))
}

/// The command that was asked for.
fn command(there: &BoxHandle, program: &Program, manner: &Manner) -> Result<CommandBuilder> {
    let mut command = match &program.text {
        Some(text) => there.command(text),
        None if program.argv.is_empty() => return Err(anyhow!("nothing to run")),
        None => there.program(program.argv.clone()),
    };
    for text in &manner.env {
        let (name, value) = values::variable(text)?;
        command = command.env(name, value);
    }
    if let Some(workdir) = &manner.workdir {
        command = command.cwd(workdir);
    }
    if let Some(timeout) = manner.timeout {
        command = command.timeout(timeout);
    }
    Ok(command)
}
