//! Version information.

/// Version and commit.
pub(crate) const SHORT: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("BUILT_FROM_COMMIT"),
    ")"
);

/// Version, commit and features.
pub(crate) const LONG: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("BUILT_FROM_COMMIT"),
    ")\nfeatures: ",
    env!("BUILT_WITH_FEATURES")
);

/// Version information as JSON.
pub(crate) fn json() -> serde_json::Value {
    let features: Vec<&str> = env!("BUILT_WITH_FEATURES").split(", ").collect();
    serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": env!("BUILT_FROM_COMMIT"),
        "features": features,
        "agent_contract": box_agent::CONTRACT,
    })
}
