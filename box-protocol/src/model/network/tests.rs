use super::*;

fn rule(text: &str) -> NetworkRule {
    text.parse()
        .unwrap_or_else(|invalid| panic!("{text}: {invalid}"))
}

fn host(text: &str) -> Host {
    text.parse()
        .unwrap_or_else(|invalid| panic!("{text}: {invalid}"))
}

#[test]
fn names_ignore_case_and_a_trailing_dot() {
    for same in ["ok.com", "OK.com", "ok.COM.", "Ok.Com."] {
        assert_eq!(host(same), host("ok.com"), "{same}");
    }
}

#[test]
fn invalid_names_are_rejected() {
    for bad in [
        "",
        ".",
        "..",
        "a..b",
        ".a",
        "a.b..",
        "evil\0.ok.com",
        "ok.com\0",
        "ok.com ",
        " ok.com",
        "ok.com/",
        "ok.com:80",
        "ok,com",
        "ок.com",
        "o\u{ad}k.com",
        "ok。com",
        "a@ok.com",
        "%6fk.com",
        "ok.com\n",
        "*.ok.com",
    ] {
        assert!(bad.parse::<Host>().is_err(), "{bad:?}");
    }
    assert!("a".repeat(64).parse::<Host>().is_err());
    assert!(
        ["a".repeat(63).as_str(); 4]
            .join(".")
            .parse::<Host>()
            .is_err()
    );
    assert!("a".repeat(63).parse::<Host>().is_ok());
}

#[test]
fn numbers_are_canonical_addresses_or_rejected() {
    for bad in [
        "2130706433",
        "127.1",
        "127.0.1",
        "0x7f.1",
        "0x7f000001",
        "017700000001",
        "127.0.0.0x1",
        "0177.0.0.1",
        "127.0.0.01",
        "1.2.3.4.",
        "127.0.0.1.5",
        "1.2.3.256",
        "ok.0x1",
        "ok.1",
        "ok.0X",
        "[::1]",
        "::1%lo",
        "1",
        "0x",
    ] {
        assert!(bad.parse::<Host>().is_err(), "{bad:?}");
    }
    assert_eq!(host("::ffff:127.0.0.1"), host("127.0.0.1"));
    assert_eq!(host("::FFFF:7f00:1"), host("127.0.0.1"));
}

#[test]
fn rules_match_only_their_hosts_and_ports() {
    let cases = [
        ("ok.com", "OK.com.", 1, true),
        ("ok.com", "ok.com.evil", 1, false),
        ("ok.com", "notok.com", 1, false),
        ("ok.com", "a.ok.com", 1, false),
        ("*.ok.com", "a.ok.com", 1, true),
        ("*.ok.com", "a.b.ok.com", 1, true),
        ("*.ok.com", "ok.com", 1, false),
        ("*.ok.com", "xok.com", 1, false),
        ("*.ok.com", "a.ok.com.evil", 1, false),
        ("ok.com:443", "ok.com", 443, true),
        ("ok.com:443", "ok.com", 22, false),
        ("ok.com:80-90", "ok.com", 85, true),
        ("ok.com:80-90", "ok.com", 91, false),
        ("xn--bcher-kva.example", "XN--bcher-KVA.example", 1, true),
        ("10.0.0.0/8", "10.255.0.1", 1, true),
        ("10.0.0.0/8", "11.0.0.1", 1, false),
        ("10.0.0.0/8", "::ffff:10.1.1.1", 1, true),
        ("::ffff:10.0.0.0/104", "10.1.1.1", 1, true),
        ("10.1.2.3", "10.1.2.3", 1, true),
        ("10.1.2.3", "10.1.2.4", 1, false),
        ("0.0.0.0/0", "8.8.8.8", 1, true),
        ("0.0.0.0/0", "2001:db8::1", 1, false),
        ("0.0.0.0/0", "ok.com", 1, false),
        ("fd00::/8", "fd12::1", 1, true),
        ("[fd00::/8]:443", "fd12::1", 80, false),
        ("[::1]:443", "::1", 443, true),
        ("::1", "::1", 443, true),
        ("*", "ok.com", 1, true),
        ("*", "::1", 1, true),
        ("*:443", "ok.com", 80, false),
    ];
    for (of, asked, port, expected) in cases {
        assert_eq!(
            rule(of).matches(&host(asked), port),
            expected,
            "{of} {asked}:{port}"
        );
    }
}

#[test]
fn rules_round_trip_through_text() {
    for text in [
        "ok.com",
        "*.ok.com:443",
        "10.0.0.0/8",
        "10.1.2.3:80-90",
        "fd00::/8",
        "[fd00::/8]:443",
        "[::1]:1",
        "*",
        "*:443",
    ] {
        assert_eq!(rule(text).to_string(), text);
    }
    for bad in [
        "",
        ":",
        "ok.com:",
        "ok.com:0",
        "ok.com:65536",
        "ok.com:9-8",
        "ok.com:+1",
        "10.0.0.0/33",
        "10.0.0/8",
        "fd00::/129",
        "[::1",
        "[::1]x",
        "*.",
        "**.com",
        "a.*.com",
        "*.10.0.0.1",
        "http://ok.com",
        "ok.com/8",
        "127.1:80",
    ] {
        assert!(bad.parse::<NetworkRule>().is_err(), "{bad:?}");
    }
}

#[test]
fn an_empty_allow_list_denies_and_an_absent_one_allows() {
    let some = host("ok.com");
    let read = |text: &str| serde_json::from_str::<NetworkPolicy>(text).unwrap();
    assert_eq!(read("{}").verdict(&some, 1), NetworkVerdict::Open);
    assert_eq!(
        read(r#"{"allow":[]}"#).verdict(&some, 1),
        NetworkVerdict::Unlisted
    );
    let mixed = read(r#"{"allow":["*.com"],"deny":["bad.com","ok.com:22"],"default":"allow"}"#);
    assert_eq!(mixed.verdict(&some, 1), NetworkVerdict::Listed);
    assert_eq!(mixed.verdict(&some, 22), NetworkVerdict::Denied);
    assert_eq!(mixed.verdict(&host("bad.com"), 1), NetworkVerdict::Denied);
    assert_eq!(mixed.verdict(&host("other.org"), 1), NetworkVerdict::Open);
    let Host::Name(name) = some else {
        unreachable!()
    };
    assert_eq!(mixed.verdict_of_name(&name), NetworkVerdict::Listed);
    assert!(serde_json::from_str::<NetworkPolicy>(r#"{"allow":["127.1"]}"#).is_err());
    assert!(serde_json::from_str::<NetworkPolicy>(r#"{"alow":[]}"#).is_err());
}
