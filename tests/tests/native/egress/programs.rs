//! Ordinary programs, which do not know about Box.

use std::path::Path;
use std::process::Command;

use super::*;

fn set_up(config: &mut NativeConfig) {
    let hosts = [
        ("pkg.test", "127.0.0.7"),
        ("tls.test", "127.0.0.7"),
        ("evil.test", "127.0.0.7"),
    ];
    open(config, json!(["pkg.test", "tls.test", "127.0.0.7"]), &hosts);
}

fn run(program: &str, arguments: &[&str], directory: &Path) {
    let ran = Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{program} {arguments:?}: {ran:?}");
}

/// Every file below a directory, with its URL path.
fn served(directory: &Path, under: &str) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        let name = format!("{under}/{}", entry.file_name().to_str().unwrap());
        if entry.path().is_dir() {
            files.extend(served(&entry.path(), &name));
        } else {
            files.push((name, std::fs::read(entry.path()).unwrap()));
        }
    }
    files
}

#[tokio::test]
async fn pip_downloads_packages_and_npm_reads_their_metadata() {
    const WHEEL: &str = "demo-1.2.3-py3-none-any.whl";
    let dir = tempfile::tempdir().unwrap();
    let make = format!(
        "import zipfile; z = zipfile.ZipFile('{WHEEL}', 'w'); z.writestr('demo.py', 'x = 1');
z.writestr('demo-1.2.3.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: demo\\nVersion: 1.2.3\\n');
z.writestr('demo-1.2.3.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n');
z.writestr('demo-1.2.3.dist-info/RECORD', '')"
    );
    run("python3", &["-c", &make], dir.path());
    let page = format!("<html><body><a href=\"/{WHEEL}\">{WHEEL}</a></body></html>");
    let packument = json!({"name": "demo", "dist-tags": {"latest": "4.5.6"}, "versions": {"4.5.6": {"name": "demo", "version": "4.5.6",
        "dist": {"tarball": "http://pkg.test/demo.tgz", "shasum": "0"}}}, "time": {"4.5.6": "2024-01-01T00:00:00.000Z"}});
    let server = Server::files(
        "127.0.0.7",
        vec![
            ("/simple/demo/".to_owned(), page.into_bytes()),
            (
                format!("/{WHEEL}"),
                std::fs::read(dir.path().join(WHEEL)).unwrap(),
            ),
            ("/demo".to_owned(), packument.to_string().into_bytes()),
        ],
    );
    let port = server.port();
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let pip = format!(
            "cd /tmp && python3 -m pip download --no-cache-dir --disable-pip-version-check -q --index-url http://pkg.test:{port}/simple --trusted-host pkg.test demo && ls *.whl"
        );
        assert_eq!(printed(&online(machine, "pip", &pip).await), WHEEL);
        let npm = format!("cd /tmp && HOME=/tmp npm view demo version --registry http://pkg.test:{port}/ --no-update-notifier");
        assert_eq!(printed(&online(machine, "npm", &npm).await), "4.5.6");
    })
    .await;
}

#[tokio::test]
async fn a_repository_is_cloned_over_http() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    std::fs::create_dir(&source).unwrap();
    run("git", &["init", "-q", "."], &source);
    std::fs::write(source.join("file"), "from a repository").unwrap();
    run("git", &["add", "file"], &source);
    run(
        "git",
        &[
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@t.test",
            "commit",
            "-qm",
            "one",
        ],
        &source,
    );
    run(
        "git",
        &["clone", "-q", "--bare", "source", "bare"],
        dir.path(),
    );
    run("git", &["update-server-info"], &dir.path().join("bare"));
    let server = Server::files("127.0.0.7", served(&dir.path().join("bare"), "/repo.git"));
    let clone = format!(
        "cd /tmp && rm -rf repo && git clone -q http://pkg.test:{}/repo.git && cat repo/file",
        server.port()
    );
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        assert_eq!(
            printed(&online(machine, "git", &clone).await),
            "from a repository"
        );
    })
    .await;
}

#[tokio::test]
async fn languages_fetch_and_certificates_are_checked_against_the_name() {
    let http = Server::http("127.0.0.7", "plain");
    let made = rcgen::generate_simple_self_signed(["tls.test".to_owned()]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    // An independent server, which prints its port.
    let serve = "import http.server, ssl, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b'encrypted')
    def log_message(self, *a): pass
s = http.server.ThreadingHTTPServer(('127.0.0.7', 0), H)
c = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); c.load_cert_chain(sys.argv[1], sys.argv[2])
s.socket = c.wrap_socket(s.socket, server_side=True)
print(s.server_address[1], flush=True); s.serve_forever()";
    let mut tls = Command::new("python3")
        .args(["-c", serve])
        .args([&certificate, &key])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(
        &mut std::io::BufReader::new(tls.stdout.take().unwrap()),
        &mut line,
    )
    .unwrap();
    let (port, secure, pem) = (http.port(), line.trim(), made.cert.pem());
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let fetch = |text: String| async move { online(machine, "fetch", &text).await };
        let python = format!("python3 -c \"import urllib.request as u; print(u.urlopen('http://pkg.test:{port}/').read().decode())\"");
        assert_eq!(printed(&fetch(python).await), "plain");
        let node = format!("node -e \"fetch('http://pkg.test:{port}/').then(r => r.text()).then(console.log)\"");
        assert_eq!(printed(&fetch(node).await), "plain");
        let good = format!("cat >/tmp/ca.pem <<'END'\n{pem}END\ncurl -sS --cacert /tmp/ca.pem https://tls.test:{secure}/");
        assert_eq!(printed(&fetch(good).await), "encrypted");
        // The connection has no intermediary: the certificate is the server's own, and is not valid
        // for another name.
        let other = fetch(format!("curl -sS --cacert /tmp/ca.pem https://pkg.test:{secure}/")).await;
        assert_eq!(other.exit_code, Some(60), "{other:?}");
        let unknown = fetch(format!("curl -sS https://tls.test:{secure}/")).await;
        assert_eq!(unknown.exit_code, Some(60), "{unknown:?}");
        let there = fetch("test -s /etc/ssl/certs/ca-certificates.crt && test -s /etc/nsswitch.conf && getent services https | cut -c1-5".to_owned()).await;
        assert_eq!(printed(&there), "https");
    })
    .await;
    tls.kill().unwrap();
    tls.wait().unwrap();
}

#[tokio::test]
async fn a_redirect_to_a_denied_destination_fails() {
    let secret = Server::http("127.0.0.8", "secret");
    let (evil, own) = (
        format!("http://evil.test:{}/", secret.port()),
        format!("http://[::ffff:127.0.0.8]:{}/", secret.port()),
    );
    let turn = |to: String| {
        Server::start("127.0.0.7", move |mut stream| {
            if request(&mut stream).is_some() {
                let _ = write!(
                    stream,
                    "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                );
            }
        })
    };
    let (first, second) = (turn(evil), turn(own));
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        for (server, code) in [(&first, 6), (&second, 7)] {
            let ran = online(
                machine,
                "turn",
                &format!("curl -sSL http://pkg.test:{}/", server.port()),
            )
            .await;
            assert_eq!(ran.exit_code, Some(code), "{ran:?}");
        }
        assert_eq!(secret.taken(), 0);
    })
    .await;
}
