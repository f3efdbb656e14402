//! Real boxes on this machine, through the runtime and through the service. Each test runs as root's boxes and as an ordinary
//! user's where the tests run as root.

mod basics;
mod support;
