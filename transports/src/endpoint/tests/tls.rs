//! Certificates of servers and clients.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::*;
use crate::tls::{ClientTls, Identity, Pem, ServerTls};

/// A certificate authority that signs test certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> Pem {
        Pem::Bytes(self.0.pem().into_bytes())
    }

    fn identity(&self, name: &str) -> Identity {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Identity {
            certificates: Pem::Bytes(certificate.pem().into_bytes()),
            key: Pem::Bytes(key.serialize_pem().into_bytes()),
        }
    }
}

/// Whether a client with `tls` gets a response from a listener with `server`.
async fn is_served(text: &str, server: &ServerTls, tls: ClientTls) -> Option<PeerInfo> {
    let options = ListenOptions {
        tls: Some(server.clone()),
        ..ListenOptions::default()
    };
    let mut listener = endpoint(text).listen(&options).await.unwrap();
    let local = listener.local_endpoint().clone();
    let server = tokio::spawn(async move {
        let accepted = listener.accept().await.unwrap();
        let (mut send, _receive) = accepted.connection.split();
        send.send("{}".to_owned()).await.unwrap();
        send.close().await.unwrap();
        accepted.peer
    });
    let connect = ConnectOptions {
        tls,
        ..ConnectOptions::default()
    };
    // With TLS 1.3 a client learns about a refusal only from its first read.
    let answer = match local.connect(&connect).await {
        Ok(connection) => connection.split().1.receive().await,
        Err(error) => Err(error),
    };
    if matches!(&answer, Ok(Some(message)) if message == "{}") {
        return Some(server.await.unwrap());
    }
    server.abort();
    None
}

#[tokio::test]
async fn tls_verifies_the_server_and_optionally_the_client() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let client = |ca: &Authority, identity| ClientTls {
        ca: Some(ca.pem()),
        identity,
        server_name: None,
    };
    let open = ServerTls {
        identity: ours.identity("localhost"),
        client_ca: None,
    };
    let mutual = ServerTls {
        client_ca: Some(ours.pem()),
        ..open.clone()
    };
    for (text, transport) in [
        ("tls://localhost:0", Transport::Tls),
        ("wss://localhost:0/rpc/ws", Transport::WebSocket),
    ] {
        let peer = is_served(text, &open, client(&ours, None)).await.unwrap();
        assert_eq!(
            (peer.transport, peer.client_certificate),
            (transport, false)
        );
        assert!(
            is_served(text, &open, client(&theirs, None))
                .await
                .is_none()
        );
        let other_name = ClientTls {
            server_name: Some("elsewhere".to_owned()),
            ..client(&ours, None)
        };
        assert!(is_served(text, &open, other_name).await.is_none());

        let known = Some(ours.identity("client"));
        let peer = is_served(text, &mutual, client(&ours, known))
            .await
            .unwrap();
        assert!(peer.client_certificate);
        assert!(
            is_served(text, &mutual, client(&ours, None))
                .await
                .is_none()
        );
        let other_user = Some(theirs.identity("client"));
        assert!(
            is_served(text, &mutual, client(&ours, other_user))
                .await
                .is_none()
        );
    }
}

#[tokio::test]
async fn tls_errors_name_the_problem_and_show_no_key() {
    let at = endpoint("tls://127.0.0.1:0");
    let none = at.listen(&ListenOptions::default()).await;
    assert!(matches!(none, Err(ListenError::NoCertificate)));
    let identity = Identity {
        certificates: Pem::Bytes(b"nonsense".to_vec()),
        key: Pem::Path("/nonexistent/key".into()),
    };
    let options = ListenOptions {
        tls: Some(ServerTls {
            identity,
            client_ca: None,
        }),
        ..ListenOptions::default()
    };
    let error = at.listen(&options).await.unwrap_err();
    assert_eq!(error.to_string(), "certificate: no PEM item found");
    assert!(!format!("{options:?}").contains("nonsense"));
    let connect = ConnectOptions {
        headers: vec![("Authorization".to_owned(), "Bearer secret".to_owned())],
        ..ConnectOptions::default()
    };
    assert!(!format!("{connect:?}").contains("secret"));
}
