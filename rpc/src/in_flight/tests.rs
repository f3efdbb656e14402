use super::*;

fn body() -> Body {
    Body::new("{}".into(), 0..2, true)
}

#[test]
fn a_response_is_delivered_once() {
    let mut outgoing = Outgoing::default();
    let (id, mut answer) = outgoing.register_call().unwrap();
    let id = CallId::Number(id);
    assert_eq!(
        outgoing.deliver(&id, Ok(body()), Part::Whole),
        Delivery::Delivered
    );
    assert!(answer.try_recv().unwrap().is_ok());
    assert_eq!(
        outgoing.deliver(&id, Ok(body()), Part::Whole),
        Delivery::Late
    );
}

#[test]
fn the_response_to_a_removed_call_is_late() {
    let mut outgoing = Outgoing::default();
    let (id, _answer) = outgoing.register_call().unwrap();
    assert!(outgoing.remove(id));
    assert_eq!(
        outgoing.deliver(&CallId::Number(id), Ok(body()), Part::Whole),
        Delivery::Late
    );
}

#[test]
fn chunks_beyond_the_credit_fail_the_call() {
    let mut outgoing = Outgoing::default();
    let (id, mut items) = outgoing.register_stream(2).unwrap();
    let id = CallId::Number(id);
    let chunk = Part::Chunk { index: None };
    assert_eq!(
        outgoing.deliver(&id, Ok(body()), chunk),
        Delivery::Delivered
    );
    assert_eq!(
        outgoing.deliver(&id, Ok(body()), chunk),
        Delivery::Delivered
    );
    assert_eq!(
        outgoing.deliver(&id, Ok(body()), chunk),
        Delivery::CreditExceeded
    );
    assert!(matches!(items.try_recv(), Ok(StreamItem::Chunk(_))));
    assert!(matches!(items.try_recv(), Ok(StreamItem::Chunk(_))));
    assert!(matches!(items.try_recv(), Ok(StreamItem::End(Err(_)))));
}

#[test]
fn an_ambiguous_part_ends_a_plain_call_and_is_a_chunk_of_a_stream() {
    let mut outgoing = Outgoing::default();
    let (plain, mut answer) = outgoing.register_call().unwrap();
    let (stream, mut items) = outgoing.register_stream(2).unwrap();
    let either = Part::Either { index: Some(1) };
    outgoing.deliver(&CallId::Number(plain), Ok(body()), either);
    outgoing.deliver(&CallId::Number(stream), Ok(body()), either);
    assert!(answer.try_recv().is_ok());
    assert!(matches!(items.try_recv(), Ok(StreamItem::Chunk(_))));
    assert_eq!(outgoing.in_flight(), 1);
}

#[test]
fn an_id_is_refused_while_in_flight_and_free_afterwards() {
    let (mut incoming, limits) = (Incoming::default(), Limits::default());
    let id = CallId::Number(7);
    incoming
        .admit(Some(id.clone()), CallInfo::default(), None, &limits)
        .unwrap();
    assert_eq!(
        incoming.admit(Some(id.clone()), CallInfo::default(), None, &limits),
        Err(Refusal::Duplicate)
    );
    assert_eq!(incoming.complete(&id), None);
    incoming
        .admit(Some(id), CallInfo::default(), None, &limits)
        .unwrap();
}

#[test]
fn calls_and_streams_have_separate_limits() {
    let limits = Limits {
        in_flight: 1,
        open_streams: 1,
        ..Limits::default()
    };
    let mut incoming = Incoming::default();
    let credit = || Some(Arc::new(Credit::new(1)));
    incoming
        .admit(None, CallInfo::default(), None, &limits)
        .unwrap();
    assert_eq!(
        incoming.admit(None, CallInfo::default(), None, &limits),
        Err(Refusal::TooManyCalls)
    );
    incoming
        .admit(None, CallInfo::default(), credit(), &limits)
        .unwrap();
    assert_eq!(
        incoming.admit(None, CallInfo::default(), credit(), &limits),
        Err(Refusal::TooManyStreams)
    );
    assert!(!incoming.release(true));
    assert!(incoming.release(false));
}

#[tokio::test]
async fn a_cancel_before_the_task_is_set_aborts_the_task() {
    let (mut incoming, limits) = (Incoming::default(), Limits::default());
    let id = incoming
        .admit(Some(CallId::Number(1)), CallInfo::default(), None, &limits)
        .unwrap();
    assert!(incoming.cancel(&id));
    let task = tokio::spawn(std::future::pending::<()>());
    incoming.set_task(&id, task.abort_handle());
    assert!(task.await.unwrap_err().is_cancelled());
    assert_eq!(incoming.complete(&id), Some(EndReason::Cancelled));
}

#[tokio::test(start_paused = true)]
async fn a_stream_sends_no_more_than_its_credit() {
    let credit = Credit::new(1);
    assert_eq!(credit.take().await, 1);
    let wait = std::time::Duration::from_secs(1);
    assert!(tokio::time::timeout(wait, credit.take()).await.is_err());
    assert!(credit.add(Grant::More(1)));
    assert_eq!(credit.take().await, 2);
    assert!(
        !credit.add(Grant::UpTo { read: 9, window: 8 }),
        "chunks that were never sent cannot have been read"
    );
    assert!(credit.add(Grant::UpTo { read: 2, window: 8 }));
    assert_eq!(credit.take().await, 3);
}
