//! A timed-out exec ends its command, or its box before the answer, and reports which.

use box_protocol::actions::OnTimeout;
use box_protocol::{BoxState, ExecStatus, ExecutionStatus, Killed};
use box_runtime::fake::{InjectedFault, Reply};
use tokio::time::Instant;

use super::fixture::{exec_of, fixture, seconds, spec};

#[tokio::test(start_paused = true)]
async fn a_timeout_is_a_result_and_removes_the_box() {
    let w = fixture();
    w.backend.on_command("sleep", Reply::hang());
    w.backend.next_stop(InjectedFault::Slow(seconds(1)));
    let begun = Instant::now();
    let result = w
        .exec_spec(spec("s", "sleep").timeout_sec(3))
        .await
        .unwrap();
    assert_eq!(begun.elapsed(), seconds(4));
    assert_eq!(
        (result.status, result.exit_code),
        (ExecutionStatus::TimedOut, None)
    );
    assert_eq!(result.stderr, "Command timed out after 3 seconds.");
    assert_eq!(result.killed, Some(Killed::Box));
    assert_eq!(w.ids().await, [""; 0]);
    assert_eq!(w.backend.stops(), ["s"]);
    assert_eq!(w.backend.killed(), ["sleep"]);
}

#[tokio::test(start_paused = true)]
async fn partial_output_is_kept() {
    let w = fixture();
    w.backend.next_command(Reply::hang().stderr("half"));
    let result = w.exec_spec(spec("s", "job").timeout_sec(1)).await.unwrap();
    assert_eq!(result.stderr, "half");
    w.backend
        .next_command(Reply::stdout("some").takes(seconds(60)));
    let result = w.exec_spec(spec("s", "job").timeout_sec(1)).await.unwrap();
    assert_eq!(result.stdout, "some");
    assert_eq!(result.stderr, "Command timed out after 1 seconds.");
}

#[tokio::test(start_paused = true)]
async fn a_persistent_box_is_dropped_as_well() {
    let w = fixture();
    w.backend.next_command(Reply::hang());
    w.exec_spec(spec("s", "job").timeout_sec(1).persistent(true))
        .await
        .unwrap();
    assert_eq!(w.ids().await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_ends_only_the_command_by_default() {
    let w = fixture();
    w.backend.next_command(Reply::hang());
    let mut params = exec_of(spec("s", "sleep").timeout_sec(3));
    params.on_timeout = OnTimeout::default();
    let result = w.runtime.exec(&w.caller, params).await.unwrap();
    assert_eq!(result.status, ExecutionStatus::TimedOut);
    assert_eq!(result.killed, Some(Killed::Command));
    assert_eq!(w.get("s").await.unwrap().status, ExecStatus::Idle);
    w.exec("s", "next").await.unwrap();
    assert_eq!(w.backend.starts(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_does_not_end_its_command_loses_its_box() {
    let w = fixture();
    w.backend
        .next_command(Reply::hang().ignores_timeout().lingers(seconds(3600)));
    let mut params = exec_of(spec("s", "sleep").timeout_sec(3));
    params.on_timeout = OnTimeout::Kill;
    let begun = Instant::now();
    let result = w.runtime.exec(&w.caller, params).await.unwrap();
    assert_eq!(begun.elapsed(), seconds(15));
    assert_eq!(result.status, ExecutionStatus::TimedOut);
    assert_eq!(result.stderr, "Command timed out after 3 seconds.");
    assert_eq!(result.killed, Some(Killed::Box));
    let left = w.get("s").await.unwrap();
    assert_eq!(left.state, BoxState::Failed, "and the box has failed");
    assert!(left.reason.is_some());
    assert_eq!(w.backend.stops(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_is_slow_to_end_a_command_keeps_its_box() {
    let w = fixture();
    w.backend
        .next_command(Reply::hang().ignores_timeout().lingers(seconds(6)));
    let mut params = exec_of(spec("s", "sleep").timeout_sec(3));
    params.on_timeout = OnTimeout::Kill;
    let result = w.runtime.exec(&w.caller, params).await.unwrap();
    assert_eq!(result.status, ExecutionStatus::TimedOut);
    w.exec("s", "next").await.unwrap();
    assert_eq!(w.backend.starts(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn calls_that_waited_behind_a_timeout_run_in_a_new_box() {
    let w = fixture();
    w.backend.on_command("sleep", Reply::hang());
    let slow = w.exec_spec(spec("s", "sleep").timeout_sec(3));
    let (slow, next) = tokio::join!(slow, w.exec("s", "next"));
    assert_eq!(slow.unwrap().status, ExecutionStatus::TimedOut);
    assert_eq!(next.unwrap().stdout, "executed: next");
    assert_eq!(w.backend.starts(), ["s", "s"]);
}
