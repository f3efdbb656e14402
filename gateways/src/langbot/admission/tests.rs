use super::*;

const NOW: UnixMs = UnixMs(1_794_784_697_000);

fn required() -> Admission {
    let admission = Admission::new();
    let value = json!({"admission": {"required": true}});
    let config = Config::default()
        .merged(value.as_object().unwrap().clone())
        .unwrap();
    admission.configure(&config);
    admission
}

fn grant(revision: u64, generation: u64, seconds: u64) -> Grant {
    Grant {
        workspace: "w".to_owned(),
        generation,
        revision,
        expires: Micros((NOW.0 + seconds * 1000) * 1000),
        max_sessions: 1,
        max_managed_processes: 0,
    }
}

fn refusal<T: std::fmt::Debug>(outcome: Result<T, BoxError>) -> String {
    outcome.unwrap_err().message().to_owned()
}

#[test]
fn without_a_policy_grants_are_refused() {
    let off = Admission::new();
    let text = "Sandbox admission enforcement is not enabled";
    assert_eq!(refusal(off.install(&grant(1, 1, 10), 10, NOW)), text);
    assert_eq!(refusal(off.revoke("w", 1, 10)), text);
    assert!(off.required().is_none());
}

#[test]
fn a_grant_is_valid_for_its_placement_until_it_expires() {
    let admission = required();
    let at = |generation| Placement::new("i", "w", generation);
    assert_eq!(
        refusal(admission.grant(&at(1), NOW)),
        "Sandbox admission grant is missing"
    );
    let (_, clear) = admission.install(&grant(1, 1, 10), 10, NOW).unwrap();
    assert!(clear);
    assert!(admission.grant(&at(1), NOW).is_ok());
    assert_eq!(
        refusal(admission.grant(&at(2), NOW)),
        "Sandbox admission grant belongs to another execution generation"
    );
    let later = UnixMs(NOW.0 + 10_000);
    assert_eq!(
        refusal(admission.grant(&at(1), later)),
        "Sandbox admission grant has expired"
    );
    assert_eq!(admission.expired(later), ["w"]);
    assert!(admission.expired(later).is_empty());
}

#[test]
fn revisions_only_increase() {
    let admission = required();
    admission.install(&grant(5, 2, 10), 10, NOW).unwrap();
    let (held, clear) = admission.install(&grant(5, 2, 5), 10, NOW).unwrap();
    assert_eq!((held.expires, clear), (grant(5, 2, 10).expires, false));
    assert_eq!(
        refusal(admission.install(&grant(4, 2, 10), 10, NOW)),
        "Sandbox admission grant revision is stale"
    );
    assert_eq!(
        refusal(admission.install(&grant(6, 1, 10), 10, NOW)),
        "Sandbox admission execution generation is stale"
    );
    let mut other = grant(5, 2, 10);
    other.max_sessions = 0;
    assert_eq!(
        refusal(admission.install(&other, 10, NOW)),
        "Sandbox admission limits changed without a new entitlement revision"
    );
    assert_eq!(
        refusal(admission.revoke("w", 4, 10)),
        "Sandbox admission revocation is stale"
    );
    admission.revoke("w", 5, 10).unwrap();
    assert_eq!(
        refusal(admission.install(&grant(5, 2, 10), 10, NOW)),
        "Sandbox admission grant revision was revoked"
    );
    assert!(admission.install(&grant(6, 2, 10), 10, NOW).is_ok());
}

#[test]
fn a_grant_is_limited_by_the_policy() {
    let admission = required();
    let mut more = grant(1, 1, 10);
    more.max_sessions = 2;
    assert_eq!(
        refusal(admission.install(&more, 10, NOW)),
        "Sandbox admission grant exceeds the session cap"
    );
    let mut processes = grant(1, 1, 10);
    processes.max_managed_processes = 1;
    assert_eq!(
        refusal(admission.install(&processes, 10, NOW)),
        "Sandbox admission grant exceeds the managed-process cap"
    );
    assert_eq!(
        refusal(admission.install(&grant(1, 1, 301), 10, NOW)),
        "Sandbox admission grant lifetime exceeds the configured maximum"
    );
    assert_eq!(
        refusal(admission.install(&grant(1, 1, 0), 10, NOW)),
        "Cannot install an expired sandbox admission grant"
    );
    assert_eq!(
        refusal(admission.install(&grant(1, 1, 10), 0, NOW)),
        RECORDS_FULL
    );
}

#[test]
fn an_invalid_policy_admits_no_caller_and_grants_cannot_be_disabled() {
    let admission = Admission::new();
    let configure = |value: Value| {
        let config = Config::default()
            .merged(value.as_object().unwrap().clone())
            .unwrap();
        admission.configure(&config);
    };
    configure(json!({"admission": {"required": false, "surprise": 1}}));
    assert!(admission.required().is_some());
    assert!(admission.fault().is_some());
    let refused = refusal(admission.install(&grant(1, 1, 10), 10, NOW));
    assert!(
        refused.starts_with("Invalid sandbox admission configuration: "),
        "{refused}"
    );
    configure(json!({"admission": {"required": true}}));
    assert!(admission.fault().is_none());
    configure(json!({}));
    assert!(admission.required().is_some());
    assert!(admission.fault().unwrap().contains("cannot be disabled"));
}

#[test]
fn times_round_trip() {
    for (text, expected) in [
        (
            "2026-11-15T23:18:17.977162Z",
            "2026-11-15T23:18:17.977162+00:00",
        ),
        ("2026-11-15T23:18:17+00:00", "2026-11-15T23:18:17+00:00"),
        (
            "2026-11-16T07:18:17.5+08:00",
            "2026-11-15T23:18:17.500000+00:00",
        ),
        ("2026-11-15T20:18:17-03:00", "2026-11-15T23:18:17+00:00"),
    ] {
        assert_eq!(Micros::from_text(text).unwrap().to_text(), expected);
    }
    for bad in [
        "",
        "2026-11-15T23:18:17",
        "2026-11-15T23:18:17.Z",
        "x+00:00",
        "2026-11-15T23:18:17*08:00",
    ] {
        assert_eq!(Micros::from_text(bad), None, "{bad}");
    }
}
