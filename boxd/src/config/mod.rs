//! The configuration: one TOML file, environment variables, flags. Later sources override earlier ones.
//!
//! 1. `keys`: every key.
//! 2. This file: reads the sources in that order, and records the origin of each value.
//! 3. `network`: the network section.
//! 4. `problem`: describes the problem of a value. `show`: prints the configuration and the example.

mod keys;
mod network;
mod problem;
mod show;

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use box_protocol::BoxError;
use box_runtime::{ImagesConfig, PullRule};
use box_service::ServiceConfig;
use serde::Deserialize;
use toml::{Table, Value};

pub(crate) use self::keys::KEYS;
use self::keys::{Key, TABLE_KEYS};
pub(crate) use self::network::NetworkSection;
pub(crate) use self::show::{example, reference, show};

/// The whole configuration.
#[derive(Debug, Deserialize)]
pub(crate) struct Config {
    pub(crate) server: ServerSection,
    pub(crate) runtime: RuntimeSection,
    pub(crate) policy: ServiceConfig,
    pub(crate) network: NetworkSection,
    pub(crate) images: ImagesSection,
    pub(crate) log: LogSection,
}

impl Config {
    /// Returns the state directory: the configured one, or the default.
    pub(crate) fn state_dir(&self) -> Result<PathBuf> {
        match &self.server.state_dir {
            Some(directory) => Ok(directory.clone()),
            None => crate::connect::default_state_dir(),
        }
    }

    /// Returns the settings of images with a store in this directory.
    pub(crate) fn images(&self, state: &Path) -> Result<ImagesConfig> {
        let mut images = self.images.images(state)?;
        images.proxy = self.network.proxy(|name| std::env::var(name).ok())?;
        Ok(images)
    }
}

/// Listeners and their callers.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ServerSection {
    #[serde(default)]
    pub(crate) listen: Vec<String>,
    pub(crate) http: Option<String>,
    pub(crate) state_dir: Option<PathBuf>,
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) allowed_hosts: Vec<String>,
    pub(crate) allowed_origins: Vec<String>,
    pub(crate) public_url: Option<String>,
    pub(crate) box_domain: Option<String>,
    pub(crate) tls_certificate: Option<PathBuf>,
    pub(crate) tls_key: Option<PathBuf>,
    pub(crate) tls_client_ca: Option<PathBuf>,
    pub(crate) max_connections: usize,
    pub(crate) max_body_mb: NonZeroU64,
    pub(crate) drain_sec: u64,
    pub(crate) keep_boxes: bool,
    pub(crate) calls_per_token: usize,
}

/// Limits of the runtime.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct RuntimeSection {
    pub(crate) backend: BackendChoice,
    pub(crate) idle_ttl_sec: u64,
    pub(crate) command_retention_sec: u64,
    pub(crate) max_boxes: usize,
    pub(crate) max_boxes_per_token: Option<usize>,
    pub(crate) max_volume_mb: Option<u64>,
    pub(crate) max_volumes_mb_per_owner: Option<u64>,
    pub(crate) max_snapshots_mb_per_owner: Option<u64>,
    pub(crate) queued_calls: usize,
    pub(crate) start_timeout_sec: u64,
    pub(crate) stop_timeout_sec: u64,
    pub(crate) spares: usize,
    pub(crate) cgroup_parent: String,
    pub(crate) disk_read_mb_per_s: Option<NonZeroU64>,
    pub(crate) disk_write_mb_per_s: Option<NonZeroU64>,
}

/// The choice of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BackendChoice {
    /// The best available backend; so far native.
    Auto,
    /// Boxes of this machine's kernel.
    Native,
}

/// Images and their root directories.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ImagesSection {
    pub(crate) strict: bool,
    #[serde(default)]
    pub(crate) roots: BTreeMap<String, PathBuf>,
    allow_pull: Vec<String>,
    #[serde(default)]
    mirrors: BTreeMap<String, Vec<String>>,
    insecure_registries: Vec<String>,
    ca_file: Option<PathBuf>,
    max_download_mb: NonZeroU64,
    max_unpacked_mb: NonZeroU64,
    max_entries: NonZeroU64,
}

impl ImagesSection {
    /// Returns the settings of images with a store in this directory.
    fn images(&self, state: &Path) -> Result<ImagesConfig> {
        let bytes = |mb: NonZeroU64| mb.get().saturating_mul(1 << 20);
        let rule = |text: &String| {
            let rule = text.parse::<PullRule>();
            rule.map_err(|error| anyhow!("images.allow_pull: {error}"))
        };
        let mut images = ImagesConfig::in_directory(state);
        images.roots.clone_from(&self.roots);
        images.strict = self.strict;
        images.allow_pull = self.allow_pull.iter().map(rule).collect::<Result<_>>()?;
        images.mirrors.clone_from(&self.mirrors);
        images
            .insecure_registries
            .clone_from(&self.insecure_registries);
        images.ca_files = self.ca_file.iter().cloned().collect();
        images.limits.compressed_bytes = bytes(self.max_download_mb);
        images.limits.decoded_bytes = bytes(self.max_unpacked_mb);
        images.limits.entries = self.max_entries.get();
        Ok(images)
    }
}

/// The log on stderr.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct LogSection {
    pub(crate) level: String,
    pub(crate) format: LogFormat,
}

/// The format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    /// Text.
    Human,
    /// One JSON object per line.
    Json,
}

/// The source of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    Default,
    File(PathBuf),
    Variable(String),
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Variable(name) => f.write_str(name),
            Self::Flag(name) => f.write_str(name),
        }
    }
}

/// A value set by a flag.
#[derive(Debug)]
pub(crate) struct Flag {
    pub(crate) key: &'static str,
    pub(crate) name: &'static str,
    pub(crate) value: Value,
}

/// Values and their sources, by key.
pub(crate) type Values = BTreeMap<String, (Value, Origin)>;

/// The default configuration file.
const DEFAULT_FILE: &str = "/etc/boxd/boxd.toml";

/// Variables that are not keys: settings of a client, tokens, and the configuration file.
const OTHER_VARIABLES: &[&str] = &["BOXD_CONFIG", "BOXD_ENDPOINT", "BOXD_TOKEN", "BOXD_TOKENS"];

/// The start of every variable.
const PREFIX: &str = "BOXD_";

/// The `BOXD_` variables of this process.
pub(crate) fn variables() -> Result<Vec<(String, String)>> {
    let all = std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value));
    all.filter(|(name, _)| name.starts_with(PREFIX))
        .map(|(name, value)| match value.into_string() {
            Ok(value) => Ok((name, value)),
            Err(_) => Err(anyhow!("{name}: not UTF-8")),
        })
        .collect()
}

/// Reads all sources. A given `file` must exist.
pub(crate) fn load(
    file: Option<&Path>,
    variables: impl IntoIterator<Item = (String, String)>,
    flags: Vec<Flag>,
) -> Result<(Config, Values)> {
    let mut values = Values::new();
    for key in KEYS.iter().filter(|key| !key.default.is_empty()) {
        values.insert(key.name.into(), (literal(key.default)?, Origin::Default));
    }
    let default_file = Path::new(DEFAULT_FILE);
    if let Some(path) = file.or_else(|| default_file.exists().then_some(default_file)) {
        read_file(path, &mut values)?;
    }
    for (name, text) in variables {
        if OTHER_VARIABLES.contains(&name.as_str()) {
            continue;
        }
        let Some(key) = KEYS.iter().find(|key| key.variable() == name) else {
            let known = KEYS.iter().map(Key::variable);
            bail!(
                "{name}: unknown variable; {}",
                suggestion(&name, PREFIX, known)
            );
        };
        values.insert(
            key.name.into(),
            (parse_variable(key, &text), Origin::Variable(name)),
        );
    }
    for flag in flags {
        values.insert(flag.key.into(), (flag.value, Origin::Flag(flag.name)));
    }
    let config = deserialize(&values)?;
    Ok((config, values))
}

/// Parses a value in TOML.
fn literal(text: &str) -> Result<Value> {
    let table: Table = format!("v = {text}").parse()?;
    table.get("v").cloned().context("no value")
}

/// Parses a value of the environment: TOML of the right type, a list with commas, or text.
fn parse_variable(key: &Key, text: &str) -> Value {
    let example = literal(key.example).ok();
    match (example, literal(text)) {
        (Some(Value::String(_)), _) => Value::String(text.to_owned()),
        (Some(Value::Array(_)), Ok(Value::Array(list))) => Value::Array(list),
        (Some(Value::Array(_)), _) => {
            let parts = text
                .split(',')
                .map(str::trim)
                .filter(|part| !part.is_empty());
            Value::Array(parts.map(|part| Value::String(part.to_owned())).collect())
        }
        (_, Ok(value)) => value,
        (_, Err(_)) => Value::String(text.to_owned()),
    }
}

fn read_file(path: &Path, values: &mut Values) -> Result<()> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
    let table: Table = text.parse().with_context(|| format!("{shown}: not TOML"))?;
    let mut found = Vec::new();
    flatten("", &table, &mut found);
    for (name, value) in found {
        if !KEYS.iter().any(|key| key.name == name) {
            let known = KEYS.iter().map(|key| key.name.to_owned());
            bail!(
                "{name}: unknown key in {shown}; {}",
                suggestion(&name, "", known)
            );
        }
        values.insert(name, (value, Origin::File(path.to_owned())));
    }
    Ok(())
}

/// Collects the values of a table by full name; a table below a free key is one value.
fn flatten(prefix: &str, table: &Table, found: &mut Vec<(String, Value)>) {
    for (name, value) in table {
        let name = if prefix.is_empty() {
            name.clone()
        } else {
            format!("{prefix}.{name}")
        };
        match value {
            Value::Table(inner) if !TABLE_KEYS.contains(&name.as_str()) => {
                flatten(&name, inner, found);
            }
            _ => found.push((name, value.clone())),
        }
    }
}

/// A similar known name, or the command that lists all names.
///
/// All names begin with `prefix`, which therefore makes no two of them similar.
fn suggestion(name: &str, prefix: &str, known: impl Iterator<Item = String>) -> String {
    /// The minimum similarity of two names.
    const MIN_SIMILARITY: f64 = 0.7;
    let similarity = |known: &str| {
        let rest = |name| str::strip_prefix(name, prefix).unwrap_or(name);
        strsim::jaro_winkler(rest(name), rest(known))
    };
    known
        .map(|known| (similarity(&known), known))
        .filter(|(similarity, _)| *similarity > MIN_SIMILARITY)
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .map_or_else(
            || "see boxd config reference".to_owned(),
            |(_, known)| format!("did you mean {known}?"),
        )
}

/// Returns ` (from ORIGIN)` for a key or a value below it.
fn from_origin(values: &Values, name: &str) -> String {
    let origin = values.iter().find(|(key, _)| {
        let below = name.strip_prefix(key.as_str());
        below.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    });
    origin.map_or_else(String::new, |(_, (_, origin))| format!(" (from {origin})"))
}

/// Describes an error of the policy section, whose message begins with the name of a key.
pub(crate) fn policy_error(error: &BoxError, values: &Values) -> anyhow::Error {
    let message = error.message();
    let (field, problem) = message.split_once(": ").unwrap_or(("", message));
    let name = format!("policy.{field}");
    anyhow!("{name}{}: {problem}", from_origin(values, &name))
}

fn deserialize(values: &Values) -> Result<Config> {
    let mut sections = Table::new();
    for (name, (value, _)) in values {
        let (section, key) = name.split_once('.').context("key without a section")?;
        let table = sections
            .entry(section)
            .or_insert_with(|| Value::Table(Table::new()));
        if let Value::Table(table) = table {
            table.insert(key.into(), value.clone());
        }
    }
    let sections = Value::Table(sections);
    serde_path_to_error::deserialize(sections.clone()).map_err(|error| {
        let name = error.path().to_string();
        let value = problem::value_at(&sections, error.path());
        let problem = problem::describe(error.inner().message(), value);
        anyhow!("{name}{}: {problem}", from_origin(values, &name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    fn error_of(text: &str) -> String {
        let file = file(text);
        format!("{:#}", load(Some(file.path()), [], Vec::new()).unwrap_err())
    }

    #[test]
    fn later_sources_override_and_record_their_origin() {
        let file = file("[runtime]\nmax_boxes = 7\nspares = 1\n[log]\nlevel = \"warn\"\n");
        let variables = [
            ("BOXD_RUNTIME_SPARES".to_owned(), "3".to_owned()),
            (
                "BOXD_POLICY_ALLOWED_HOST_MOUNT_ROOTS".to_owned(),
                "/a, /b".to_owned(),
            ),
            ("BOXD_LOG_LEVEL".to_owned(), "debug".to_owned()),
            ("BOXD_ENDPOINT".to_owned(), "unix:/x".to_owned()),
        ];
        let flag = Flag {
            key: "log.level",
            name: "--log",
            value: "error".into(),
        };
        let (config, values) = load(Some(file.path()), variables, vec![flag]).unwrap();
        assert_eq!((config.runtime.max_boxes, config.runtime.spares), (7, 3));
        assert_eq!(config.runtime.queued_calls, 128);
        assert_eq!(
            config.policy.allowed_host_mount_roots,
            [Path::new("/a"), Path::new("/b")]
        );
        assert_eq!(config.log.level, "error");
        let origin = |key: &str| values[key].1.clone();
        assert_eq!(
            origin("runtime.max_boxes"),
            Origin::File(file.path().into())
        );
        assert_eq!(
            origin("runtime.spares"),
            Origin::Variable("BOXD_RUNTIME_SPARES".into())
        );
        assert_eq!(origin("log.level"), Origin::Flag("--log"));
        assert_eq!(origin("log.format"), Origin::Default);
    }

    #[test]
    fn an_unknown_key_suggests_a_similar_one() {
        let error = error_of("[runtime]\nmax_sesions = 7\n");
        assert!(
            error.starts_with("runtime.max_sesions: unknown key in /"),
            "{error}"
        );
        assert!(
            error.ends_with("did you mean runtime.max_boxes?"),
            "{error}"
        );
        let error = error_of("[[policy.profiles]]\nname = \"x\"\ncpu = 1\n");
        assert!(
            error.starts_with("policy.profiles[0].cpu (from /"),
            "{error}"
        );
        for (name, hint) in [
            ("BOXD_LOG_LEVLE", "did you mean BOXD_LOG_LEVEL?"),
            ("BOXD_FOO", "see boxd config reference"),
        ] {
            let variable = [(name.to_owned(), "x".to_owned())];
            let error = load(None, variable, Vec::new()).unwrap_err().to_string();
            assert_eq!(error, format!("{name}: unknown variable; {hint}"));
        }
    }

    #[test]
    fn an_invalid_value_names_its_key_and_its_file() {
        let error = error_of("[log]\nformat = \"xml\"\n");
        assert!(error.starts_with("log.format (from /"), "{error}");
        let error = error_of("[runtime]\nmax_boxes = \"many\"\n");
        assert!(error.starts_with("runtime.max_boxes"), "{error}");
        assert!(error_of("[log\n").contains(": not TOML"));
    }

    #[test]
    fn defaults_match_the_crates() {
        let (config, _) = load(None, [], Vec::new()).unwrap();
        assert_eq!(config.policy, ServiceConfig::default());
        let runtime = box_runtime::RuntimeConfig::new(Vec::new());
        assert_eq!(config.runtime.max_boxes, runtime.max_boxes);
        assert_eq!(config.runtime.queued_calls, runtime.queued_calls);
        assert_eq!(config.runtime.idle_ttl_sec, runtime.idle_ttl.as_secs());
        assert_eq!(
            config.runtime.command_retention_sec,
            runtime.command_retention.as_secs()
        );
        assert_eq!(
            config.runtime.start_timeout_sec,
            runtime.start_timeout.as_secs()
        );
        assert_eq!(
            config.runtime.stop_timeout_sec,
            runtime.stop_timeout.as_secs()
        );
        let images = config.images(Path::new("/s")).unwrap();
        assert_eq!(images.limits, ImagesConfig::in_directory("/s").limits);
    }
}
