use std::time::Duration;

use super::*;

fn halves(capacity: usize) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
    let (near, far) = pair(capacity);
    let (send, _) = Box::new(near).split();
    let (_, receive) = Box::new(far).split();
    (send, receive)
}

#[tokio::test]
async fn messages_arrive_in_order_in_both_directions() {
    let (near, far) = pair(4);
    let (mut send, mut receive) = Box::new(near).split();
    let (mut send_back, mut receive_there) = Box::new(far).split();
    let sender = tokio::spawn(async move {
        let mut batch: VecDeque<String> = (0..100).map(|number| number.to_string()).collect();
        send.send_all(&mut batch).await.unwrap();
        assert!(batch.is_empty());
        for number in 100..200 {
            send.send(number.to_string()).await.unwrap();
        }
        send.close().await.unwrap();
    });
    let mut received = Vec::new();
    while let Some(message) = receive_there.receive().await.unwrap() {
        received.push(message);
        while let Some(message) = receive_there.receive_ready() {
            received.push(message);
        }
    }
    let expected: Vec<String> = (0..200).map(|number| number.to_string()).collect();
    assert_eq!(received, expected);
    sender.await.unwrap();
    send_back.send("back".to_owned()).await.unwrap();
    assert_eq!(receive.receive().await.unwrap().as_deref(), Some("back"));
}

#[tokio::test]
async fn a_full_queue_makes_the_sender_wait() {
    let (mut send, mut receive) = halves(2);
    let mut batch: VecDeque<String> = (0..3).map(|number| number.to_string()).collect();
    let waiting = tokio::time::timeout(Duration::from_millis(5), send.send_all(&mut batch)).await;
    assert!(waiting.is_err());
    assert_eq!(batch, ["2"], "what did not fit is still the sender's");
    assert_eq!(receive.receive().await.unwrap().as_deref(), Some("0"));
    send.send_all(&mut batch).await.unwrap();
    assert_eq!(receive.receive_ready().as_deref(), Some("1"));
    assert_eq!(receive.receive().await.unwrap().as_deref(), Some("2"));
}

#[tokio::test]
async fn dropping_an_end_ends_the_other() {
    let (near, far) = pair(2);
    let (mut send, mut receive) = Box::new(near).split();
    drop(far);
    assert!(receive.receive().await.unwrap().is_none());
    assert!(matches!(
        send.send(String::new()).await,
        Err(ConnectionError::Closed)
    ));
}

#[tokio::test]
async fn dropping_the_receiver_wakes_a_sender_that_waits() {
    let (mut send, receive) = halves(1);
    send.send(String::new()).await.unwrap();
    let waiting = tokio::spawn(async move { send.send(String::new()).await });
    tokio::task::yield_now().await;
    drop(receive);
    assert!(matches!(
        waiting.await.unwrap(),
        Err(ConnectionError::Closed)
    ));
}

#[tokio::test]
async fn messages_sent_before_the_end_are_received() {
    let (mut send, mut receive) = halves(8);
    send.send("a".to_owned()).await.unwrap();
    send.send("b".to_owned()).await.unwrap();
    drop(send);
    assert_eq!(receive.receive().await.unwrap().as_deref(), Some("a"));
    assert_eq!(receive.receive().await.unwrap().as_deref(), Some("b"));
    assert_eq!(receive.receive().await.unwrap(), None);
}

#[tokio::test]
async fn a_name_has_one_listener_and_is_free_again_after_it() {
    let listener = QueueListener::bind("queue-tests").unwrap();
    assert!(QueueListener::bind("queue-tests").is_none());
    assert!(connect("queue-tests").is_ok());
    drop(listener);
    assert!(connect("queue-tests").is_err());
    assert!(QueueListener::bind("queue-tests").is_some());
}
