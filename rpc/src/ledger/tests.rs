use super::*;

fn body() -> Body {
    Body::new("{}".into(), 0..2, true)
}

#[test]
fn an_answer_finds_its_call_once() {
    let mut outgoing = Outgoing::default();
    let (id, mut answer) = outgoing.call().unwrap();
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
fn a_forgotten_call_makes_its_answer_late() {
    let mut outgoing = Outgoing::default();
    let (id, _answer) = outgoing.call().unwrap();
    assert!(outgoing.forget(id));
    assert_eq!(
        outgoing.deliver(&CallId::Number(id), Ok(body()), Part::Whole),
        Delivery::Late
    );
}

#[test]
fn more_chunks_than_granted_fail_the_call_and_keep_room_for_the_end() {
    let mut outgoing = Outgoing::default();
    let (id, mut items) = outgoing.stream(2).unwrap();
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
    assert_eq!(outgoing.deliver(&id, Ok(body()), chunk), Delivery::Overrun);
    assert!(matches!(items.try_recv(), Ok(Item::Chunk(_))));
    assert!(matches!(items.try_recv(), Ok(Item::Chunk(_))));
    assert!(matches!(items.try_recv(), Ok(Item::End(Err(_)))));
}

#[test]
fn a_part_that_may_be_either_ends_a_plain_call_and_feeds_a_stream() {
    let mut outgoing = Outgoing::default();
    let (plain, mut answer) = outgoing.call().unwrap();
    let (stream, mut items) = outgoing.stream(2).unwrap();
    let either = Part::Either { index: Some(1) };
    outgoing.deliver(&CallId::Number(plain), Ok(body()), either);
    outgoing.deliver(&CallId::Number(stream), Ok(body()), either);
    assert!(answer.try_recv().is_ok());
    assert!(matches!(items.try_recv(), Ok(Item::Chunk(_))));
    assert_eq!(outgoing.in_flight(), 1);
}

#[test]
fn an_id_is_refused_while_in_flight_and_free_afterwards() {
    let (mut incoming, limits) = (Incoming::default(), Limits::default());
    let id = CallId::Number(7);
    incoming
        .admit(Some(id.clone()), Made::default(), None, &limits)
        .unwrap();
    assert_eq!(
        incoming.admit(Some(id.clone()), Made::default(), None, &limits),
        Err(Refusal::Duplicate)
    );
    assert_eq!(incoming.answered(&id), None);
    incoming
        .admit(Some(id), Made::default(), None, &limits)
        .unwrap();
}

#[test]
fn calls_and_streams_are_counted_apart() {
    let limits = Limits {
        in_flight: 1,
        open_streams: 1,
        ..Limits::default()
    };
    let mut incoming = Incoming::default();
    let credit = || Some(Arc::new(Credit::new(1)));
    incoming
        .admit(None, Made::default(), None, &limits)
        .unwrap();
    assert_eq!(
        incoming.admit(None, Made::default(), None, &limits),
        Err(Refusal::TooManyCalls)
    );
    incoming
        .admit(None, Made::default(), credit(), &limits)
        .unwrap();
    assert_eq!(
        incoming.admit(None, Made::default(), credit(), &limits),
        Err(Refusal::TooManyStreams)
    );
    assert!(!incoming.free(true));
    assert!(incoming.free(false));
}

#[tokio::test]
async fn a_cancel_that_comes_before_the_task_still_ends_it() {
    let (mut incoming, limits) = (Incoming::default(), Limits::default());
    let id = incoming
        .admit(Some(CallId::Number(1)), Made::default(), None, &limits)
        .unwrap();
    assert!(incoming.cancel(&id));
    let task = tokio::spawn(std::future::pending::<()>());
    incoming.runs_as(&id, task.abort_handle());
    assert!(task.await.unwrap_err().is_cancelled());
    assert_eq!(incoming.answered(&id), Some(Ended::Cancelled));
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
