//! The runtime's behaviour, one file a topic.

mod suite {
    pub(crate) mod world;

    mod agents;
    mod contract;
    mod deleting;
    mod executing;
    mod isolation;
    mod lifetime;
    mod model;
    mod owners;
    mod selecting;
    mod sessions;
    mod shutdown;
    mod streaming;
    mod timeouts;
}
