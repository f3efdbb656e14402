//! The network policy of a sandbox: of the lifecycle API, and of the egress sidecar of the reference.
//!
//! The rules of the protocol apply in order; in a box, a `deny` rule wins. A list of rules is refused if the two differ: if
//! an `allow` rule comes before a `deny` rule that it overlaps.

use std::net::IpAddr;

use axum::Router;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{any, get as get_route};
use box_protocol::actions::BoxUpdateParams;
use box_protocol::{BoxId, BoxInfo, Network, NetworkDefault, NetworkPolicy, NetworkRule};
use box_rpc::Turn;
use serde_json::{Value, json};

use super::GATEWAY;
use super::error::{Error, InPath};
use super::lifecycle::box_id;
use super::model::{Action, Policy, Rule};
use crate::http::body::Json;
use crate::http::context::{Context, InBox};
use crate::http::refusal::json_response;

/// Returns the routes of the sidecar, for requests with [`InBox`].
pub(super) fn egress_routes() -> Router {
    Router::new()
        .route(
            "/policy",
            get_route(get_inside)
                .post(put_inside)
                .put(put_inside)
                .patch(patch_inside)
                .delete(delete_inside),
        )
        .route("/credential-vault", any(no_vault))
        .route("/credential-vault/{*path}", any(no_vault))
        .route("/healthz", get_route(healthy))
}

async fn healthy() -> StatusCode {
    StatusCode::OK
}

async fn no_vault() -> Error {
    Error::unsupported("credential-vault: not supported by this server; use environment variables")
}

/// Returns the policy of a request.
pub(super) fn from_request(policy: &Policy) -> Result<NetworkPolicy, Error> {
    let rules = policy.egress.as_deref().unwrap_or_default();
    let rules: Vec<(Action, NetworkRule)> = rules
        .iter()
        .map(|rule| Ok((rule.action, parsed(&rule.target)?)))
        .collect::<Result<_, Error>>()?;
    for (at, (action, allowed)) in rules.iter().enumerate() {
        for (later, denied) in &rules[at + 1..] {
            if *action == Action::Allow && *later == Action::Deny && overlap(allowed, denied) {
                let message = format!(
                    "egress: allow {allowed} before deny {denied}: here a deny rule wins; put it first, or remove one"
                );
                return Err(Error::invalid(message));
            }
        }
    }
    let targets = |wanted: Action| -> Vec<NetworkRule> {
        let rules = rules.iter().filter(|(action, _)| *action == wanted);
        rules.map(|(_, rule)| rule.clone()).collect()
    };
    let default = match policy.default_action {
        Some(Action::Allow) => NetworkDefault::Allow,
        Some(Action::Deny) | None => NetworkDefault::Deny,
    };
    Ok(NetworkPolicy {
        allow: Some(targets(Action::Allow)),
        deny: targets(Action::Deny),
        default: Some(default),
    })
}

/// Parses a target. Targets of different texts may be the same rule.
fn parsed(target: &str) -> Result<NetworkRule, Error> {
    Ok(target.trim().parse()?)
}

/// The hosts of a rule.
enum Hosts {
    All,
    Name(String),
    Below(String),
    Range(IpAddr, u8),
}

/// Returns the hosts of a rule, and its ports if it names some.
fn hosts(rule: &NetworkRule) -> (Hosts, Option<(u16, u16)>) {
    // The text of a parsed rule has one form.
    let text = rule.to_string();
    let (target, ports) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once("]:").unwrap_or((rest, "")),
        None if text.matches(':').count() == 1 => text.split_once(':').unwrap_or((&text, "")),
        None => (text.as_str(), ""),
    };
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let ports = first.parse().ok().zip(last.parse().ok());
    if target == "*" {
        return (Hosts::All, ports);
    }
    if let Some(name) = target.strip_prefix("*.") {
        return (Hosts::Below(name.to_owned()), ports);
    }
    let (start, bits) = target.split_once('/').unwrap_or((target, "128"));
    let hosts = match (start.parse::<IpAddr>(), bits.parse()) {
        (Ok(start), Ok(bits)) => Hosts::Range(start, bits),
        _ => Hosts::Name(target.to_owned()),
    };
    (hosts, ports)
}

/// Returns whether two rules may match the same host and port.
fn overlap(one: &NetworkRule, other: &NetworkRule) -> bool {
    let ((one, one_ports), (other, other_ports)) = (hosts(one), hosts(other));
    let all = (0, u16::MAX);
    let (ports, others) = (one_ports.unwrap_or(all), other_ports.unwrap_or(all));
    if ports.0 > others.1 || others.0 > ports.1 {
        return false;
    }
    let is_below = |name: &str, parent: &str| {
        let above = name.strip_suffix(parent);
        above.is_some_and(|above| above.ends_with('.'))
    };
    match (one, other) {
        (Hosts::All, _) | (_, Hosts::All) => true,
        (Hosts::Name(one), Hosts::Name(other)) => one == other,
        (Hosts::Name(name), Hosts::Below(parent)) | (Hosts::Below(parent), Hosts::Name(name)) => {
            is_below(&name, &parent)
        }
        (Hosts::Below(one), Hosts::Below(other)) => {
            one == other || is_below(&one, &other) || is_below(&other, &one)
        }
        (Hosts::Range(one, one_bits), Hosts::Range(other, other_bits)) => {
            let bits = one_bits.min(other_bits);
            same_prefix(one, other, bits)
        }
        _ => false,
    }
}

fn same_prefix(one: IpAddr, other: IpAddr, bits: u8) -> bool {
    match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => {
            let differs = one.to_bits() ^ other.to_bits();
            differs.leading_zeros() >= u32::from(bits.min(32))
        }
        (IpAddr::V6(one), IpAddr::V6(other)) => {
            let differs = one.to_bits() ^ other.to_bits();
            differs.leading_zeros() >= u32::from(bits.min(128))
        }
        _ => false,
    }
}

/// Returns the policy of a sandbox. Its `deny` rules come first, as they win.
fn to_response(info: &BoxInfo) -> Policy {
    let Some(policy) = &info.network_policy else {
        return Policy {
            default_action: Some(Action::Allow),
            egress: Some(Vec::new()),
        };
    };
    let rules = |action: Action, rules: &[NetworkRule]| -> Vec<Rule> {
        let rule = |rule: &NetworkRule| Rule {
            action,
            target: rule.to_string(),
        };
        rules.iter().map(rule).collect()
    };
    let mut egress = rules(Action::Deny, &policy.deny);
    egress.extend(rules(
        Action::Allow,
        policy.allow.as_deref().unwrap_or_default(),
    ));
    let default = match (policy.default, &policy.allow) {
        (Some(NetworkDefault::Allow), _) | (None, None) => Action::Allow,
        _ => Action::Deny,
    };
    Policy {
        default_action: Some(default),
        egress: Some(egress),
    }
}

fn policy_json(info: &BoxInfo) -> Value {
    let policy = to_response(info);
    let has_rules = policy
        .egress
        .as_ref()
        .is_some_and(|rules| !rules.is_empty());
    let mode = match policy.default_action {
        Some(Action::Allow) if !has_rules => "allow_all",
        Some(Action::Deny) if !has_rules => "deny_all",
        _ => "enforcing",
    };
    let has_network =
        info.network == Network::On && !info.degraded.iter().any(|it| it == "network");
    let mut answer = json!({
        "status": "ok",
        "mode": mode,
        "enforcementMode": "proxy",
        "policy": policy,
    });
    if !has_network {
        answer["reason"] = "the sandbox has no network".into();
    }
    answer
}

async fn answer(context: &Context, id: &BoxId) -> Result<Response, Error> {
    let info = context.get(id).await?;
    Ok(json_response(StatusCode::OK, &policy_json(&info)))
}

/// Waits for the turn of a request that changes the policy: no other one changes it after this one has read it.
async fn turn(context: &Context, id: &BoxId) -> Result<Turn<String>, Error> {
    Ok(context.turn(id, "policy").await?)
}

async fn set(context: &Context, id: BoxId, policy: &Policy) -> Result<Response, Error> {
    let policy = from_request(policy)?;
    let _turn = turn(context, &id).await?;
    store(context, id, policy).await
}

async fn store(context: &Context, id: BoxId, policy: NetworkPolicy) -> Result<Response, Error> {
    let params = BoxUpdateParams {
        network_policy: Some(policy),
        ..BoxUpdateParams::of(id)
    };
    let info = context.update(&GATEWAY, params).await?;
    Ok(json_response(StatusCode::OK, &policy_json(&info)))
}

/// Puts rules before the others; they replace those of the same target.
async fn merge(context: &Context, id: BoxId, mut rules: Vec<Rule>) -> Result<Response, Error> {
    let _turn = turn(context, &id).await?;
    let mut policy = to_response(&context.get(&id).await?);
    let mut seen: Vec<NetworkRule> = Vec::new();
    let mut merged = Vec::new();
    rules.extend(policy.egress.take().unwrap_or_default());
    for rule in rules {
        let target = parsed(&rule.target)?;
        if !seen.contains(&target) {
            seen.push(target);
            merged.push(rule);
        }
    }
    policy.egress = Some(merged);
    store(context, id, from_request(&policy)?).await
}

/// Removes the rules of targets.
async fn remove(context: &Context, id: BoxId, targets: &[String]) -> Result<Response, Error> {
    let _turn = turn(context, &id).await?;
    let mut policy = to_response(&context.get(&id).await?);
    // No rule has an invalid target.
    let targets = targets.iter().filter_map(|target| parsed(target).ok());
    let targets: Vec<NetworkRule> = targets.collect();
    if let Some(rules) = &mut policy.egress {
        rules.retain(|rule| parsed(&rule.target).is_ok_and(|rule| !targets.contains(&rule)));
    }
    store(context, id, from_request(&policy)?).await
}

pub(super) async fn get(context: Context, InPath(id): InPath<String>) -> Result<Response, Error> {
    answer(&context, &box_id(&id)?).await
}

pub(super) async fn put(
    context: Context,
    InPath(id): InPath<String>,
    Json(policy): Json<Policy>,
) -> Result<Response, Error> {
    set(&context, box_id(&id)?, &policy).await
}

pub(super) async fn patch(
    context: Context,
    InPath(id): InPath<String>,
    Json(rules): Json<Vec<Rule>>,
) -> Result<Response, Error> {
    merge(&context, box_id(&id)?, rules).await
}

pub(super) async fn delete(
    context: Context,
    InPath(id): InPath<String>,
    Json(targets): Json<Vec<String>>,
) -> Result<Response, Error> {
    remove(&context, box_id(&id)?, &targets).await
}

async fn get_inside(context: Context, InBox(id): InBox) -> Result<Response, Error> {
    answer(&context, &id).await
}

async fn put_inside(
    context: Context,
    InBox(id): InBox,
    Json(policy): Json<Policy>,
) -> Result<Response, Error> {
    set(&context, id, &policy).await
}

async fn patch_inside(
    context: Context,
    InBox(id): InBox,
    Json(rules): Json<Vec<Rule>>,
) -> Result<Response, Error> {
    merge(&context, id, rules).await
}

async fn delete_inside(
    context: Context,
    InBox(id): InBox,
    Json(targets): Json<Vec<String>>,
) -> Result<Response, Error> {
    remove(&context, id, &targets).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &[(Action, &str)]) -> Result<NetworkPolicy, Error> {
        let rules = rules.iter().map(|(action, target)| Rule {
            action: *action,
            target: (*target).to_owned(),
        });
        from_request(&Policy {
            default_action: Some(Action::Deny),
            egress: Some(rules.collect()),
        })
    }

    #[test]
    fn an_order_that_matters_is_refused() {
        use Action::{Allow, Deny};
        for (allowed, denied) in [
            ("pypi.org", "pypi.org"),
            ("api.example.com", "*.example.com"),
            ("*.example.com", "api.example.com"),
            ("*.a.example.com", "*.example.com"),
            ("10.1.0.0/16", "10.0.0.0/8"),
            ("10.1.2.3", "10.0.0.0/8"),
            ("*", "pypi.org"),
            ("::ffff:1.2.3.4", "1.2.3.4"),
            ("A.example.", "a.example"),
            ("a.example:443", "a.example"),
            ("[::1]:80-90", "[::1]:85"),
        ] {
            let in_order = policy(&[(Deny, denied), (Allow, allowed)]);
            assert!(in_order.is_ok(), "{allowed} {denied}");
            let reversed = policy(&[(Allow, allowed), (Deny, denied)]);
            assert!(reversed.is_err(), "{allowed} {denied}");
        }
        for (allowed, denied) in [
            ("pypi.org", "example.com"),
            ("example.com", "*.example.com"),
            ("notexample.com", "*.example.com"),
            ("10.0.0.0/8", "11.0.0.0/8"),
            ("10.0.0.1", "example.com"),
            ("a.example:443", "a.example:80"),
        ] {
            assert!(
                policy(&[(Allow, allowed), (Deny, denied)]).is_ok(),
                "{allowed} {denied}"
            );
        }
    }
}
