//! A program that can be the fork server of real boxes, as `boxd` is. As `box-test-host hold {…}` it also is a runtime that a
//! test can kill: it reads calls as lines of JSON and answers each with one.

use std::error::Error;
use std::io::{BufRead as _, stdin};

use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    box_sys::serve_if_asked(box_agent::prepare);
    let args: Vec<String> = std::env::args().collect();
    if let [program, word, how] = args.as_slice()
        && word == "hold"
    {
        return hold(program, &serde_json::from_str(how)?);
    }
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn hold(program: &str, how: &Value) -> Result<(), Box<dyn Error>> {
    let mut config = NativeConfig::new(program);
    let user: Option<u32> = serde_json::from_value(how["user"].clone())?;
    config.run_as = user.map(|user| (user, user));
    config.cgroup_parent = serde_json::from_value(how["parent"].clone())?;
    config.state_dir = serde_json::from_value(how["state"].clone())?;
    let runtime = BoxRuntime::start(RuntimeConfig::with(NativeBackend::new(config)));
    for line in stdin().lock().lines() {
        let mut call: Value = serde_json::from_str(&line?)?;
        let caller = Caller::local();
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
