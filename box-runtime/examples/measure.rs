#![allow(missing_docs)]
use box_protocol::SpecDraft;
use box_protocol::actions::*;
use box_rpc::*;
use box_runtime::fake::*;
use box_runtime::*;
use box_transports::queue;
use std::sync::Arc;
use std::time::Instant;
fn rss() -> usize {
    let s = std::fs::read_to_string("/proc/self/statm").unwrap();
    s.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}
struct Echo;
struct Server;
impl Action for Echo {
    const NAME: &'static str = "echo";
    type Params = BoxGetParams;
    type Result = BoxGetParams;
    type Chunk = Never;
}
impl Handle<Echo> for Server {
    async fn handle(&self, p: BoxGetParams, _: Call<Echo>) -> Result<BoxGetParams, RpcError> {
        Ok(p)
    }
}
fn exec(i: usize) -> BoxExecParams {
    BoxExecParams {
        spec: SpecDraft::new(format!("session-{i}")).cmd("echo hello"),
        on_timeout: OnTimeout::DropBox,
        on_disconnect: OnDisconnect::Kill,
        attach: None,
    }
}
async fn go() {
    let fake = FakeBackend::new();
    let mut c = RuntimeConfig::with(fake.clone());
    c.max_sessions = 20_000;
    fake.forget_commands();
    let rt = BoxRuntime::start(c);
    let me = Caller::local();
    let (a, b) = queue::pair(64);
    let _s = Session::start(a, rt.router(), Options::default());
    let cl = Session::start(b, Router::empty(), Options::default());
    let (a, b) = queue::pair(64);
    let _s2 = Session::start(
        a,
        Router::builder(Arc::new(Server)).on::<Echo>().build(),
        Options::default(),
    );
    let ec = Session::start(b, Router::empty(), Options::default());
    let n = 3000;
    let p = BoxGetParams {
        session_id: box_protocol::SessionId::new("session-1").unwrap(),
        guest: false,
    };
    let echo = async || {
        let t = Instant::now();
        for _ in 0..n {
            ec.peer().call::<Echo>(&p).await.unwrap();
        }
        t.elapsed() / n
    };
    let direct = async |k: usize| {
        let t = Instant::now();
        for i in 0..n as usize {
            rt.exec(&me, exec(i * 7919 % k)).await.unwrap();
        }
        t.elapsed() / n
    };
    let remote = async |k: usize| {
        let t = Instant::now();
        for i in 0..n as usize {
            cl.peer()
                .call::<BoxExec>(&exec(i * 7919 % k))
                .await
                .unwrap();
        }
        t.elapsed() / n
    };
    let get = async || {
        let t = Instant::now();
        for _ in 0..n {
            rt.get(&me, &p.session_id).await.unwrap();
        }
        t.elapsed() / n
    };
    for i in 0..10 {
        rt.exec(&me, exec(i)).await.unwrap();
    }
    for _ in 0..3 {
        println!(
            "echo {:?} direct(10) {:?} remote(10) {:?} get {:?}",
            echo().await,
            direct(10).await,
            remote(10).await,
            get().await
        );
    }
    let before = rss();
    for i in 10..10_000 {
        rt.exec(&me, exec(i)).await.unwrap();
    }
    println!(
        "per session with agent both ends: {} B",
        (rss() - before) / 9_990
    );
    for _ in 0..3 {
        println!(
            "echo {:?} direct(10k) {:?} remote(10k) {:?} get {:?}",
            echo().await,
            direct(10_000).await,
            remote(10_000).await,
            get().await
        );
    }
    let t = Instant::now();
    let l = rt.list(&me, &BoxListParams::default()).await.unwrap();
    println!("list {} {:?}", l.total, t.elapsed());
    let t = Instant::now();
    let e = rt
        .shutdown(&me, SystemShutdownParams::default())
        .await
        .unwrap();
    println!("shutdown {} {:?}", e.ended, t.elapsed());
}
fn main() {
    let kind = std::env::args().nth(1).unwrap_or_default();
    let rt = if kind == "multi" {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
    } else {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
    }
    .unwrap();
    rt.block_on(async { tokio::spawn(go()).await.unwrap() });
    // connections alone
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    rt.block_on(async {
        let before = rss();
        let r = Router::builder(Arc::new(Server)).on::<Echo>().build();
        let e = Router::empty();
        let mut keep = vec![];
        for _ in 0..10_000 {
            let (a, b) = queue::pair(16);
            let s = Session::start(a, r.clone(), Options::default());
            let c = Session::start(b, e.clone(), Options::default());
            c.peer()
                .call::<Echo>(&BoxGetParams {
                    session_id: box_protocol::SessionId::new("s").unwrap(),
                    guest: false,
                })
                .await
                .unwrap();
            keep.push((s, c));
        }
        println!(
            "connection pair alone (both ends): {} B",
            (rss() - before) / 10_000
        );
    });
}
