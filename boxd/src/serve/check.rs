//! A check whether a server could start with a configuration.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use box_rpc::Router;
use box_service::BoxService;
use box_service::connector::InProcess;

use super::http::{self, pages::Origins};
use super::listeners;
use super::tokens::Tokens;
use crate::config::{self, Config, ServerSection, Values};
use crate::log;

/// Reads everything that a server reads before it listens, and returns its errors.
pub(crate) fn check(config: &Config, values: &Values) -> Result<()> {
    log::filter(&config.log)?;
    let server = &config.server;
    let tokens = Tokens::read(server.token_file.as_deref())?;
    tokens.check_policy(&config.policy)?;
    for text in &server.listen {
        listeners::check(text, server, &tokens)?;
    }
    if let Some(text) = &server.http {
        check_http(text, &tokens).context("server.http")?;
    }
    Origins::new(&server.allowed_origins, !tokens.is_empty())?;
    check_files(server)?;
    config.network.egress(|name| std::env::var(name).ok())?;
    BoxService::with_connector(config.policy.clone(), InProcess::new(Router::empty()))
        .map_err(|error| config::policy_error(&error, values))?;
    Ok(())
}

fn check_http(text: &str, tokens: &Tokens) -> Result<()> {
    let address = http::address(text)?;
    let is_remote = |address: IpAddr| !address.is_loopback();
    ensure!(
        !tokens.is_empty() || !address.host.parse().is_ok_and(is_remote),
        "{text} is not a loopback address; configure tokens (server.token_file, --token-file or BOXD_TOKENS)"
    );
    Ok(())
}

/// Checks that certificates and keys exist and are readable.
fn check_files(server: &ServerSection) -> Result<()> {
    for (key, path) in [
        ("server.tls_certificate", &server.tls_certificate),
        ("server.tls_key", &server.tls_key),
        ("server.tls_client_ca", &server.tls_client_ca),
    ] {
        if let Some(path) = path {
            std::fs::read(path).with_context(|| format!("{key}: {}", path.display()))?;
        }
    }
    Ok(())
}
