//! Environment variables of LangBot's own runtime, which boxd replaces.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use box_gateways::langbot::{
    CONFIG_VARIABLE, INSTANCE_VARIABLE, LangBot, PORT, SOFT_STORAGE_VARIABLE, Settings,
    TOKEN_CHARS, TOKEN_VARIABLE, is_instance,
};
use box_rpc::Caller;
use serde_json::{Map, Value};

use crate::config::{Config, Origin, Values};
use crate::embedded::EmbeddedServer;

/// The caller name of LangBot's token.
pub(crate) const OWNER: &str = "langbot";

/// The maximum number of boxes that LangBot may request.
const MAX_BOXES: usize = 5_000;

/// LangBot's token, if one is set.
pub(crate) fn token() -> Result<Option<String>> {
    let Some(token) = variable(TOKEN_VARIABLE) else {
        return Ok(None);
    };
    ensure!(
        token.chars().count() >= TOKEN_CHARS && !token.contains(char::is_whitespace),
        "{TOKEN_VARIABLE}: must have at least {TOKEN_CHARS} characters and no whitespace"
    );
    Ok(Some(token))
}

/// The token set of a listener for LangBot.
pub(crate) fn tokens(token: &str) -> box_rpc::Tokens {
    box_rpc::Tokens::new([(OWNER.to_owned(), token.to_owned())])
}

/// The owner of the boxes of a LangBot that started this process.
pub(crate) fn owner(token: Option<&str>) -> Caller {
    match token {
        Some(_) => Caller::token(OWNER),
        None => Caller::Loopback,
    }
}

/// The only LangBot instance to serve, if one is set.
pub(crate) fn instance() -> Result<Option<String>> {
    let instance = variable(INSTANCE_VARIABLE);
    if let Some(instance) = &instance {
        ensure!(
            is_instance(instance),
            "{INSTANCE_VARIABLE}: must be a letter or digit, followed by up to 127 letters, digits or . _ : -"
        );
    }
    Ok(instance)
}

/// Creates the LangBot gateway with the settings of the environment.
///
/// `trusted_caller` is the caller that decides about host paths and limits. `guarded` means that every caller has a token or a pipe.
pub(crate) fn start(
    config: &Config,
    embedded: &EmbeddedServer,
    trusted_caller: Option<Caller>,
    guarded: bool,
) -> Result<Arc<LangBot>> {
    // Never log the text, which may contain keys of other services.
    let parsed = variable(CONFIG_VARIABLE)
        .map(|text| serde_json::from_str::<Map<String, Value>>(&text).ok());
    if let Some(None) = parsed {
        tracing::warn!("{CONFIG_VARIABLE}: not a JSON object; ignored");
    }
    let is_true = |text: String| ["1", "true", "yes", "on"].contains(&text.to_lowercase().as_str());
    let parsed = parsed.flatten().unwrap_or_default();
    ensure!(
        guarded || parsed.get("backend").and_then(Value::as_str) != Some("host"),
        "{CONFIG_VARIABLE}: WebSocket-controlled host backend requires {TOKEN_VARIABLE}"
    );
    let policy = &config.policy;
    let settings = Settings {
        instance: instance()?,
        config: parsed,
        trusted_caller,
        allowed_roots: policy
            .allowed_host_mount_roots
            .iter()
            .chain(&policy.shared_host_root)
            .cloned()
            .collect(),
        private: policy.private.clone(),
        soft_storage: variable(SOFT_STORAGE_VARIABLE).is_some_and(is_true),
    };
    if settings.soft_storage {
        tracing::warn!(
            "{SOFT_STORAGE_VARIABLE} is set: workspaces without a hard quota are allowed"
        );
    }
    let langbot = LangBot::new(embedded.runtime.clone(), embedded.service.clone(), settings);
    let langbot = langbot.context(CONFIG_VARIABLE)?;
    Ok(Arc::new(langbot))
}

/// Raises the limit of boxes unless the operator sets it, because LangBot has its own limit.
pub(crate) fn raise_box_limit(config: &mut Config, values: &Values) {
    let origin = values.get("runtime.max_boxes").map(|(_, origin)| origin);
    if origin.is_none_or(|origin| *origin == Origin::Default) {
        config.runtime.max_boxes = MAX_BOXES;
    }
}

/// The default address of the listener for LangBot.
pub(crate) fn default_address(token: Option<&str>) -> String {
    let host = if token.is_some() {
        "0.0.0.0"
    } else {
        "127.0.0.1"
    };
    format!("{host}:{PORT}")
}

fn variable(name: &str) -> Option<String> {
    let value = std::env::var_os(name)?;
    // A value that is not UTF-8 still counts: a token with replacement characters matches no caller.
    let value = value.to_string_lossy();
    let value = value.trim();
    (!value.is_empty()).then(|| value.to_owned())
}
