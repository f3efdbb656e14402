//! Images made in memory, and a registry that follows a script.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use box_image::{Digest, Limits, Registry, RegistryOptions, Store};
use box_test_wait::blocking::eventually;
use serde_json::{Value, json};

pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Compression of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Packed {
    Plain,
    Gzip,
    Zstd,
}

/// Makes an archive of files.
pub(crate) fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_mtime(1);
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, path, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

pub(crate) fn pack(tar: &[u8], packed: Packed) -> Vec<u8> {
    match packed {
        Packed::Plain => tar.to_vec(),
        Packed::Zstd => zstd::encode_all(tar, 3).unwrap(),
        Packed::Gzip => {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(tar).unwrap();
            encoder.finish().unwrap()
        }
    }
}

/// Bytes that do not compress.
pub(crate) fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// An image in memory.
#[derive(Debug, Clone)]
pub(crate) struct TestImage {
    pub(crate) manifest: Value,
    pub(crate) config: Value,
    /// The compressed layers.
    pub(crate) layers: Vec<Vec<u8>>,
}

impl TestImage {
    pub(crate) fn new(layers: &[(Vec<u8>, Packed)]) -> Self {
        let host = box_image::Platform::host();
        let diff_ids: Vec<_> = layers
            .iter()
            .map(|(tar, _)| Digest::of(tar).to_string())
            .collect();
        let config = json!({
            "architecture": host.architecture, "os": "linux",
            "config": {
                "Env": ["PATH=/bin", "A=1"], "User": "1000:1000", "WorkingDir": "/srv",
                "Entrypoint": ["/bin/sh"], "Cmd": null, "ExposedPorts": {"80/tcp": {}},
                "Labels": {"k": "v"}
            },
            "rootfs": {"type": "layers", "diff_ids": diff_ids}
        });
        let layers = layers
            .iter()
            .map(|(tar, packed)| pack(tar, *packed))
            .collect();
        let mut image = Self {
            manifest: Value::Null,
            config,
            layers,
        };
        image.describe();
        image
    }

    /// An image with one file in one layer.
    pub(crate) fn small() -> Self {
        Self::new(&[(tar(&[("etc/hello", b"world")]), Packed::Gzip)])
    }

    /// An image whose layer takes many reads.
    pub(crate) fn large() -> Self {
        Self::new(&[(tar(&[("big", &noise(3 << 20))]), Packed::Gzip)])
    }

    /// Writes the manifest for the current content.
    pub(crate) fn describe(&mut self) {
        let config = self.config_bytes();
        let layers: Vec<_> = self
            .layers
            .iter()
            .map(|layer| json!({"mediaType": OCI_LAYER, "digest": Digest::of(layer), "size": layer.len()}))
            .collect();
        self.manifest = json!({
            "schemaVersion": 2, "mediaType": OCI_MANIFEST,
            "config": {"mediaType": OCI_CONFIG, "digest": Digest::of(&config), "size": config.len()},
            "layers": layers
        });
    }

    pub(crate) fn config_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(&self.config).unwrap()
    }

    pub(crate) fn manifest_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(&self.manifest).unwrap()
    }

    pub(crate) fn digest(&self) -> Digest {
        Digest::of(&self.manifest_bytes())
    }

    pub(crate) fn layer_path(&self, number: usize) -> String {
        format!("/v2/app/blobs/{}", Digest::of(&self.layers[number]))
    }
}

/// A request as the registry received it.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: String,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// An answer of the registry.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Sends only so many bytes of the body, and closes.
    pub(crate) cut: Option<usize>,
    /// Repeats the body until the client has enough.
    pub(crate) endless: bool,
    /// Stops after the cut without closing.
    pub(crate) stall: bool,
}

pub(crate) fn reply(status: u16, headers: &[(&str, &str)], body: impl Into<Vec<u8>>) -> Reply {
    let headers = headers
        .iter()
        .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()));
    Reply {
        status,
        headers: headers.collect(),
        body: body.into(),
        ..Reply::default()
    }
}

type Hook = Box<dyn Fn(&Request) -> Option<Reply> + Send + Sync>;

#[derive(Default)]
struct Script {
    content: Mutex<HashMap<String, (String, Vec<u8>)>>,
    hooks: Mutex<Vec<Hook>>,
    requests: Mutex<Vec<Request>>,
}

/// A registry without TLS on this machine.
pub(crate) struct Scripted {
    pub(crate) authority: String,
    script: Arc<Script>,
}

impl Scripted {
    pub(crate) fn start() -> Self {
        Self::on("127.0.0.1:0")
    }

    pub(crate) fn on(address: &str) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let authority = listener.local_addr().unwrap().to_string();
        let script = Arc::new(Script::default());
        let shared = Arc::clone(&script);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let script = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &script));
            }
        });
        Self { authority, script }
    }

    /// Offers an image under `app:TAG`, by its digest, with its content.
    pub(crate) fn offer(&self, image: &TestImage, tag: &str) {
        let manifest = image.manifest_bytes();
        self.put(
            &format!("/v2/app/manifests/{tag}"),
            OCI_MANIFEST,
            manifest.clone(),
        );
        self.put(
            &format!("/v2/app/manifests/{}", Digest::of(&manifest)),
            OCI_MANIFEST,
            manifest,
        );
        for blob in image.layers.iter().cloned().chain([image.config_bytes()]) {
            self.put(
                &format!("/v2/app/blobs/{}", Digest::of(&blob)),
                "application/octet-stream",
                blob,
            );
        }
    }

    pub(crate) fn put(&self, path: &str, kind: &str, content: Vec<u8>) {
        self.script
            .content
            .lock()
            .unwrap()
            .insert(path.to_owned(), (kind.to_owned(), content));
    }

    /// Adds a hook that may answer before the content does.
    pub(crate) fn hook(&self, hook: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static) {
        self.script.hooks.lock().unwrap().push(Box::new(hook));
    }

    /// Answers requests for a path with these replies, one after the other.
    pub(crate) fn once(&self, path: &str, replies: Vec<Reply>) {
        let (path, replies) = (path.to_owned(), Mutex::new(replies));
        self.hook(move |request| {
            let mut replies = replies.lock().unwrap();
            (request.path == path && !replies.is_empty()).then(|| replies.remove(0))
        });
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.script.requests.lock().unwrap().clone()
    }

    pub(crate) fn requests_of(&self, path: &str) -> Vec<Request> {
        let mut requests = self.requests();
        requests.retain(|request| request.path == path);
        requests
    }

    pub(crate) fn name(&self, tag: &str) -> String {
        format!("{}/app:{tag}", self.authority)
    }
}

fn serve(stream: TcpStream, script: &Script) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    while let Some(request) = read_request(&mut reader) {
        script.requests.lock().unwrap().push(request.clone());
        let hooked = script
            .hooks
            .lock()
            .unwrap()
            .iter()
            .find_map(|hook| hook(&request));
        let answer = hooked.unwrap_or_else(|| from_content(script, &request));
        if !write_reply(&mut stream, &answer) {
            break;
        }
    }
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    // A client that tries TLS first is refused by closing.
    if *reader.fill_buf().ok()?.first()? == 0x16 {
        return None;
    }
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.insert(name.to_lowercase(), value.to_owned()),
            None => break,
        };
    }
    let length = headers
        .get("content-length")
        .and_then(|length| length.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    let body = String::from_utf8_lossy(&body).into_owned();
    Some(Request {
        method,
        path,
        headers,
        body,
    })
}

fn from_content(script: &Script, request: &Request) -> Reply {
    let content = script.content.lock().unwrap();
    let Some((kind, body)) = content.get(&request.path) else {
        return reply(404, &[], "{}");
    };
    let start = request.header("range").and_then(|range| {
        range
            .strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse::<usize>()
            .ok()
    });
    match start {
        Some(start) => {
            let range = format!("bytes {start}-{}/{}", body.len() - 1, body.len());
            reply(
                206,
                &[("content-type", kind), ("content-range", &range)],
                &body[start..],
            )
        }
        None => reply(200, &[("content-type", kind)], body.clone()),
    }
}

/// Returns whether the connection can be used again.
fn write_reply(stream: &mut TcpStream, answer: &Reply) -> bool {
    let length = format!("content-length: {}", answer.body.len());
    let stated = answer
        .headers
        .iter()
        .any(|(name, _)| name == "content-length");
    let mut head = vec![format!("HTTP/1.1 {} X", answer.status)];
    let headers = answer.headers.iter();
    head.extend(headers.map(|(name, value)| format!("{name}: {value}")));
    if answer.endless {
        head.push("transfer-encoding: chunked".to_owned());
    } else if !stated {
        head.push(length);
    }
    let head = head.join("\r\n") + "\r\n\r\n";
    if stream.write_all(head.as_bytes()).is_err() {
        return false;
    }
    if answer.endless {
        let chunk = [
            format!("{:x}\r\n", answer.body.len()).as_bytes(),
            &answer.body,
            b"\r\n",
        ]
        .concat();
        while stream.write_all(&chunk).is_ok() {}
        return false;
    }
    let body = &answer.body[..answer.cut.unwrap_or(answer.body.len())];
    let written = stream.write_all(body).is_ok();
    if answer.stall {
        // Until the client closes.
        let _ = stream.read(&mut [0]);
    }
    written && answer.cut.is_none()
}

/// Returns a client without credentials and with short waits.
pub(crate) fn options() -> RegistryOptions {
    let mut options = RegistryOptions::default();
    options.docker_config = None;
    options.retry_wait = Duration::from_millis(1);
    options.retry_wait_max = Duration::from_secs(5);
    options
}

pub(crate) fn registry() -> Registry {
    Registry::new(options()).unwrap()
}

/// A store in a temporary directory.
pub(crate) struct TestStore {
    folder: tempfile::TempDir,
    pub(crate) store: Store,
}

impl TestStore {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("store"), Limits::default()).unwrap();
        Self { folder, store }
    }

    pub(crate) fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("store")
    }

    /// Asserts that no operation left anything.
    pub(crate) fn assert_clean(&self) {
        for folder in ["work", "pulls", "leases", "partial"] {
            assert_clean_folder(&self.path(), folder);
        }
    }

    pub(crate) fn assert_empty(&self) {
        assert!(self.store.list().unwrap().is_empty());
        assert_clean_folder(&self.path(), "images");
        assert_clean_folder(&self.path(), "tags");
    }
}

pub(crate) fn names(path: &Path, folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(path.join(folder)).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// The thread of a pull may still remove its directory after the pull has ended.
pub(crate) fn assert_clean_folder(path: &Path, folder: &str) {
    eventually(&format!("{folder} is empty"), || {
        names(path, folder).is_empty()
    });
}
