//! The network section of the configuration.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use box_protocol::{HostName, NetworkDefault, NetworkPolicy, NetworkRule};
use box_runtime::egress::{EgressConfig, Proxy};
use percent_encoding::percent_decode_str;
use serde::Deserialize;

/// Destinations, proxy and limits of boxes with a network.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct NetworkSection {
    pub(crate) allow: Option<Vec<NetworkRule>>,
    pub(crate) deny: Vec<NetworkRule>,
    pub(crate) default: Option<NetworkDefault>,
    #[serde(default)]
    hosts: BTreeMap<String, Vec<IpAddr>>,
    proxy: Option<String>,
    no_proxy: Vec<NetworkRule>,
    connections: usize,
    connections_per_sec: u32,
    bytes_per_box: u64,
    audit: bool,
}

/// Environment variables with a proxy; the first that is set counts.
const VARIABLES: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"];

/// Environment variables with destinations without a proxy.
const EXCEPTIONS: [&str; 2] = ["NO_PROXY", "no_proxy"];

impl NetworkSection {
    /// The operator's network policy.
    pub(crate) fn policy(&self) -> NetworkPolicy {
        NetworkPolicy {
            allow: self.allow.clone(),
            deny: self.deny.clone(),
            default: self.default,
        }
    }

    /// Adds destinations to `allow`, and keeps the rule for all others.
    pub(crate) fn allow(&mut self, rules: &[NetworkRule]) {
        if rules.is_empty() {
            return;
        }
        let rest = match self.allow {
            Some(_) => NetworkDefault::Deny,
            None => NetworkDefault::Allow,
        };
        self.default.get_or_insert(rest);
        self.allow
            .get_or_insert_default()
            .extend(rules.iter().cloned());
    }

    /// The configuration for the runtime. `variable` reads the environment.
    pub(crate) fn egress(&self, variable: impl Fn(&str) -> Option<String>) -> Result<EgressConfig> {
        let mut egress = EgressConfig::default();
        egress.policy = self.policy();
        for (name, addresses) in &self.hosts {
            let name = HostName::new(name).with_context(|| format!("network.hosts.{name}"))?;
            egress.hosts.insert(name, addresses.clone());
        }
        egress.proxy = self.proxy(variable)?;
        egress.connections = self.connections;
        egress.connections_per_sec = self.connections_per_sec;
        egress.bytes = self.bytes_per_box;
        egress.audit = self.audit;
        Ok(egress)
    }

    /// The proxy of the configuration, or of the environment.
    pub(crate) fn proxy(&self, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Proxy>> {
        let first = |names: &'static [&'static str]| {
            let set = names
                .iter()
                .filter_map(|name| Some((*name, variable(name)?)));
            set.into_iter().find(|(_, value)| !value.trim().is_empty())
        };
        let (origin, url) = match &self.proxy {
            Some(word) if word == "none" => return Ok(None),
            Some(url) => ("network.proxy", url.clone()),
            None => match first(&VARIABLES) {
                Some(found) => found,
                None => return Ok(None),
            },
        };
        // Without the address, which may contain a password.
        let mut proxy =
            parse(url.trim()).with_context(|| format!("{origin}: invalid proxy address"))?;
        proxy.except.clone_from(&self.no_proxy);
        if let Some((_, list)) = first(&EXCEPTIONS).filter(|_| self.proxy.is_none()) {
            proxy.except.extend(exceptions(&list));
        }
        Ok(Some(proxy))
    }
}

/// `http://[NAME:PASSWORD@]HOST[:PORT]`.
fn parse(url: &str) -> Result<Proxy> {
    let rest = match url.split_once("://") {
        Some(("http", rest)) => rest,
        Some(_) => bail!("must begin with http://"),
        None => url,
    };
    let rest = rest.trim_end_matches('/');
    let (login, host_port) = rest
        .rsplit_once('@')
        .map_or((None, rest), |(login, host_port)| (Some(login), host_port));
    let (host, port) = match host_port.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().context("invalid port")?),
        _ => (host_port, 80),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() || host.contains(['/', ' ']) {
        bail!("missing host");
    }
    let mut proxy = Proxy::new(host, port);
    proxy.authorization = login.map(|login| {
        let login: Vec<u8> = percent_decode_str(login).collect();
        format!(
            "Basic {}",
            base64::engine::general_purpose::STANDARD.encode(login)
        )
    });
    Ok(proxy)
}

/// Parses a `NO_PROXY` list: a name covers itself and its subdomains. Skips unsupported entries.
fn exceptions(list: &str) -> Vec<NetworkRule> {
    let words = list
        .split(',')
        .map(str::trim)
        .filter(|word| !word.is_empty());
    let rules = words.flat_map(|word| {
        let word = word.trim_start_matches("*.").trim_start_matches('.');
        [word.to_owned(), format!("*.{word}")]
    });
    rules.filter_map(|rule| rule.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(text: &str) -> NetworkSection {
        let rest = "deny = []\nno_proxy = []\nconnections = 1\nconnections_per_sec = 0\nbytes_per_box = 0\naudit = false\n";
        toml::from_str(&format!("{text}\n{rest}")).unwrap()
    }

    fn proxy(text: &str, variables: &[(&str, &str)]) -> Result<Option<Proxy>> {
        section(text).proxy(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_proxy_comes_from_the_file_or_the_environment() {
        let set = [
            ("HTTP_PROXY", "http://me:p%40ss@proxy.test:3128/"),
            ("NO_PROXY", "localhost, .corp.test,10.0.0.0/8"),
        ];
        let found = proxy("", &set).unwrap().unwrap();
        assert_eq!((found.host.as_str(), found.port), ("proxy.test", 3128));
        assert_eq!(found.authorization.as_deref(), Some("Basic bWU6cEBzcw=="));
        let except: Vec<_> = found.except.iter().map(ToString::to_string).collect();
        assert_eq!(
            except,
            [
                "localhost",
                "*.localhost",
                "corp.test",
                "*.corp.test",
                "10.0.0.0/8"
            ]
        );
        assert!(
            !format!("{found:?}").contains("bWU6"),
            "its password is not shown"
        );
        assert_eq!(proxy("proxy = \"none\"", &set).unwrap(), None);
        assert_eq!(
            proxy("proxy = \"http://[::1]:8080\"", &set)
                .unwrap()
                .unwrap()
                .host,
            "::1"
        );
        assert_eq!(proxy("", &[]).unwrap(), None);
        let error = proxy("proxy = \"socks5://u:secret@x\"", &[]).unwrap_err();
        assert!(!format!("{error:#}").contains("secret"), "{error:#}");
    }

    #[test]
    fn allowed_destinations_are_added_and_the_default_stays() {
        let rules = ["127.0.0.1:80".parse().unwrap()];
        let mut open = section("");
        open.allow(&rules);
        assert_eq!(open.policy().default, Some(NetworkDefault::Allow));
        let mut narrow = section("allow = [\"ok.com\"]");
        narrow.allow(&rules);
        assert_eq!(narrow.policy().default, Some(NetworkDefault::Deny));
        assert_eq!(narrow.policy().allow.unwrap().len(), 2);
    }
}
