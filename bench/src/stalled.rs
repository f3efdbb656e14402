//! A healthy client of `boxd serve`, with and without a thousand stalled clients.

use std::io::Write;
use std::net::TcpStream;
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::boxd::Boxd;
use crate::boxes::bar;
use crate::http_client::Client;
use crate::process;
use crate::statistics::median;

/// The number of stalled clients per listener.
const STALLED: usize = 1000;
/// The healthy client's calls per round.
const CALLS: usize = 5000;
/// The data of stalled HTTP clients.
///
/// It is nothing, half a line, half a head, or a head without its body.
const HALF_REQUESTS: [&str; 4] = [
    "",
    "GET /hea",
    "GET /healthz HTTP/1.1\r\nHost: local",
    "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
];
/// The data of stalled RPC clients.
const HALF_MESSAGES: [&str; 4] = [
    "",
    "{",
    r#"{"jsonrpc":"2.0","id":1,"#,
    r#"{"jsonrpc":"2.0","id":1,"method":"system.hea"#,
];

/// Measures both listeners and prints their bars.
pub(crate) fn run(rounds: u32) -> Result<()> {
    // Set the limit before the server starts, because the server inherits it.
    process::raise_open_files()?;
    let server = Boxd::start()?;
    crate::report::heading();
    let get = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    compare("HTTP", &server.http, rounds, &HALF_REQUESTS, |client| {
        client.write(get.as_bytes())?;
        let answer = client.answer()?;
        ensure!(answer.status == 200, "the server is not well");
        Ok(())
    })?;
    let call = concat!(
        r#"{"jsonrpc":"2.0","id":1,"method":"system.health","params":{}}"#,
        "\n"
    );
    compare(
        "RPC over TCP",
        &server.tcp,
        rounds,
        &HALF_MESSAGES,
        |client| {
            client.write(call.as_bytes())?;
            client.line().map(drop)
        },
    )
}

/// Compares the 99th percentiles with and without stalled clients, in turn.
fn compare(
    name: &str,
    address: &str,
    rounds: u32,
    said: &[&str; 4],
    call: impl Fn(&mut Client) -> Result<()>,
) -> Result<()> {
    let (mut alone, mut among, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        alone.push(slowest(address, &call)?);
        let stalled: Vec<TcpStream> = (0..STALLED)
            .map(|number| {
                let mut stream = TcpStream::connect(address)?;
                stream.write_all(said[number % said.len()].as_bytes())?;
                Ok(stream)
            })
            .collect::<Result<_>>()?;
        among.push(slowest(address, &call)?);
        drop(stalled);
        ratios.push(among[among.len() - 1] / alone[alone.len() - 1]);
    }
    let (alone, among) = (median(&mut alone), median(&mut among));
    let title = format!("{name}, 99th percentile of a healthy client among {STALLED} stalled");
    let (ours, beside) = (format!("{among:.0} us"), format!("{alone:.0} us alone"));
    bar(&title, &ours, &beside, &mut ratios, 2.0, None);
    Ok(())
}

/// Returns the 99th percentile of a client's calls, in microseconds.
fn slowest(address: &str, call: &impl Fn(&mut Client) -> Result<()>) -> Result<f64> {
    let mut client = Client::to(address)?;
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let since = Instant::now();
        call(&mut client)?;
        times.push(since.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[CALLS * 99 / 100])
}
