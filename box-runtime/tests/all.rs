//! The runtime's behaviour, one file a topic.

// Helpers are tests, too.
#![allow(clippy::unwrap_used)]

mod suite {
    pub(crate) mod world;

    mod agents;
    mod contract;
    mod deleting;
    mod door;
    mod executing;
    mod hardening;
    mod isolation;
    mod lifetime;
    mod meeting;
    mod model;
    mod owners;
    mod selecting;
    mod sessions;
    mod shutdown;
    mod slots;
    mod streaming;
    mod timeouts;
    mod updating;
}
