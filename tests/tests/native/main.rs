//! Real boxes on this machine, through the runtime and through the service. Each test runs in root's boxes and in an ordinary
//! user's where the tests run as root.

mod agent;
mod basics;
mod ends;
mod limits;
mod mounts;
mod network;
mod output;
mod service;
mod support;
