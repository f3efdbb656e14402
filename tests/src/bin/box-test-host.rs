//! A fork server of real boxes for tests, as `boxd` is one.
//!
//! `box-test-host hold {…}` is also a runtime that a test can kill: it reads calls as lines of JSON
//! and answers each with one line. `box-test-host serve {…}` is a runtime that its boxes outlive,
//! and it serves the contract on a Unix socket, as `boxd serve` does.

use std::error::Error;
use std::io::{BufRead as _, stdin};

use box_protocol::HostName;
use box_rpc::Options;
use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use box_transports::server::Server;
use box_transports::{Endpoint, ListenOptions};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    box_sys::serve_if_asked(held);
    let args: Vec<String> = std::env::args().collect();
    if let [program, word, how] = args.as_slice() {
        let how = serde_json::from_str(how)?;
        return match word.as_str() {
            "hold" => hold(program, &how),
            "serve" => serve(program, &how),
            _ => Err("hold or serve".into()),
        };
    }
    Ok(())
}

/// The agent. In a box with a pipe `hold` in its workspace, it first reads that pipe to its end.
///
/// By then the runtime knows that the box is made, and no client can reach the agent yet.
fn held() -> Box<dyn FnOnce(box_sys::Init)> {
    let agent = box_agent::prepare();
    Box::new(|init| {
        let _ = std::fs::read("/workspace/hold");
        agent(init);
    })
}

fn config(program: &str, how: &Value) -> Result<NativeConfig, Box<dyn Error>> {
    let mut config = NativeConfig::new(program);
    let user: Option<u32> = serde_json::from_value(how["user"].clone())?;
    config.run_as = user.map(|user| (user, user));
    config.cgroup_parent = serde_json::from_value(how["parent"].clone())?;
    config.state_dir = serde_json::from_value(how["state"].clone())?;
    if how["network"].is_object() {
        config.egress.policy = serde_json::from_value(how["network"]["policy"].clone())?;
        let hosts = how["network"]["hosts"].as_object().into_iter().flatten();
        for (name, addresses) in hosts {
            let addresses = serde_json::from_value(addresses.clone())?;
            config.egress.hosts.insert(HostName::new(name)?, addresses);
        }
    }
    Ok(config)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn serve(program: &str, how: &Value) -> Result<(), Box<dyn Error>> {
    let mut config = config(program, how)?;
    config.outlive = true;
    let state_dir = config.state_dir.clone();
    let mut runtime = RuntimeConfig::with(NativeBackend::new(config));
    runtime.state_dir = state_dir;
    let runtime = BoxRuntime::start(runtime);
    let adopted = runtime.adopt().await;
    println!("{}", adopted.map_err(|error| error.message().to_owned())?);
    let endpoint: Endpoint = how["endpoint"].as_str().ok_or("no endpoint")?.parse()?;
    let listener = endpoint.listen(&ListenOptions::default()).await;
    // Dropping the runtime would end the boxes, which the next runtime adopts.
    let listener = listener.unwrap_or_else(|_| std::process::exit(1));
    let _server = Server::start(listener, runtime.router(), |_| Options::new(Caller::Local));
    runtime.exit_requested().await;
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn hold(program: &str, how: &Value) -> Result<(), Box<dyn Error>> {
    let backend = NativeBackend::new(config(program, how)?);
    let runtime = BoxRuntime::start(RuntimeConfig::with(backend));
    for line in stdin().lock().lines() {
        let mut call: Value = serde_json::from_str(&line?)?;
        let caller = Caller::Local;
        let answer = if call["exec"].is_object() {
            let asked = serde_json::from_value(call["exec"].take())?;
            let ran = runtime.exec(&caller, asked).await;
            serde_json::to_value(ran.map_err(|error| error.message().to_owned())?)?
        } else {
            let asked = serde_json::from_value(call["delete"].take())?;
            let deleted = runtime.delete(&caller, asked).await;
            deleted.map_err(|error| error.message().to_owned())?;
            json!("deleted")
        };
        println!("{answer}");
    }
    Ok(())
}
