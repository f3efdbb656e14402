//! Interpreters that are not shells.

use box_protocol::ExitWhy;
use serde_json::json;

use super::{run, try_run, with_shell};

#[tokio::test]
async fn python_keeps_its_state_and_reports_its_errors() {
    with_shell("python", async |machine| {
        run(machine, "s", "import os\nos.chdir('/usr'); os.environ['E'] = 'e'\nx = 41\ndef f(n):\n    return n + x\n").await;
        let ran = run(machine, "s", "x += 1\nf(0)\nprint(f(0), os.getcwd())").await;
        assert_eq!((ran.text(), ran.code()), ("42 /usr", Some(0)));
        let ran = run(machine, "s", "print('before')\nraise ValueError('no ü')").await;
        assert_eq!((ran.text(), ran.code()), ("before", Some(1)));
        let error = ran.info.error.clone().unwrap();
        assert_eq!((&*error.name, &*error.value), ("ValueError", "no ü"));
        let trace = error.traceback.concat();
        assert!(trace.contains("raise ValueError") && !trace.contains("box"), "{trace}");
        assert!(String::from_utf8_lossy(&ran.stderr).contains("ValueError"));
        for text in ["x = 'open", "f(", "def"] {
            let ran = run(machine, "s", text).await;
            assert_eq!((ran.code(), ran.info.error.unwrap().name.as_str()), (Some(1), "SyntaxError"));
        }
        let big = format!("y = '{}'\nprint(len(y), end='')", "y".repeat(200_000));
        assert_eq!(run(machine, "s", &big).await.text(), "200000");
        let ran = run(machine, "s", "import sys\nsys.stdout.buffer.write(bytes(range(256)))\ninput()").await;
        assert_eq!(ran.info.error.unwrap().name, "EOFError");
        assert_eq!(ran.stdout, (0..=255).collect::<Vec<u8>>());
        run(machine, "s", "if os.fork() == 0:\n    pass").await;
        assert_eq!(run(machine, "s", "print(x)").await.text(), "42", "the output of a forked child is not a result of the shell");
        for text in ["while True: pass", "import time; time.sleep(60)", "os.system('sleep 60'); print('after')"] {
            let ran = try_run(machine, "s", text, json!({"timeout_ms": 200})).await.unwrap();
            assert_eq!(ran.info.exit.unwrap().why, ExitWhy::Timeout, "{text}");
            let ran = run(machine, "s", "print(x)").await;
            assert_eq!((ran.text(), ran.info.shell_replaced), ("42", false), "{text}");
        }
        for (text, code) in [("print('out'); sys.exit(3)", 3), ("print('out'); exit()", 0), ("print('out'); sys.exit('why')", 1)] {
            let ran = run(machine, "s", text).await;
            assert_eq!((ran.text(), ran.code()), ("out", Some(code)), "{text}");
            assert_eq!(ran.info.error.unwrap().name, "SystemExit");
            let ran = run(machine, "s", "print(x)").await;
            assert_eq!((ran.text(), ran.info.shell_replaced), ("42", false), "a kernel survives {text}");
        }
        run(machine, "s", "os.environ['PYTHONPATH'] = '/tmp/own'").await;
        assert_eq!(run(machine, "s", "os._exit(3)").await.code(), Some(3));
        let ran = run(machine, "s", "import sys; print('/tmp/own' in sys.path, end='')").await;
        assert_eq!((ran.text(), ran.info.shell_replaced), ("True", true), "variables that Python reads at its start");
        run(machine, "s", "import os; os._exit(3)").await;
        let ran = run(machine, "s", "import os; print(os.getcwd(), os.environ['E'], 'x' in globals())").await;
        assert_eq!((ran.text(), ran.info.shell_replaced), ("/usr e False", true));
    })
    .await;
}

#[tokio::test]
async fn javascript_keeps_its_state_and_reports_its_errors() {
    with_shell("javascript", async |machine| {
        run(machine, "s", "process.chdir('/usr'); process.env.E = 'e'; let x = 41; function f(n) { return n + x; }").await;
        let ran = run(machine, "s", "x += 1; f(0); console.log(f(0), process.cwd())").await;
        assert_eq!((ran.text(), ran.code()), ("42 /usr", Some(0)));
        let ran = run(machine, "s", "console.error('e'); throw new TypeError('no ü')").await;
        assert_eq!(ran.code(), Some(1));
        let error = ran.info.error.clone().unwrap();
        assert_eq!((&*error.name, &*error.value), ("TypeError", "no ü"));
        assert!(ran.stderr.starts_with(b"e\n"), "{ran:?}");
        for text in ["let y = 'open", "if (", "}"] {
            let ran = run(machine, "s", text).await;
            assert_eq!((ran.code(), ran.info.error.unwrap().name.as_str()), (Some(1), "SyntaxError"));
        }
        let big = format!("var z = '{}'; process.stdout.write(String(z.length))", "y".repeat(200_000));
        assert_eq!(run(machine, "s", &big).await.text(), "200000");
        let ran = run(machine, "s", "new Promise(done => setTimeout(() => { console.log('later'); done(); }, 50))").await;
        assert_eq!(ran.text(), "later");
        let ran = run(machine, "s", "process.stdout.write(Buffer.from(Array.from({length: 256}, (_, n) => n)))").await;
        assert_eq!(ran.stdout, (0..=255).collect::<Vec<u8>>());
        let ran = run(machine, "s", "console.log(require('fs').readFileSync(0, 'utf8').length)").await;
        assert_eq!(ran.text(), "0");
        for text in ["for (;;);", "new Promise(() => {})"] {
            let ran = try_run(machine, "s", text, json!({"timeout_ms": 200})).await.unwrap();
            assert_eq!(ran.info.exit.unwrap().why, ExitWhy::Timeout, "{text}");
            let ran = run(machine, "s", "console.log(x)").await;
            assert_eq!((ran.text(), ran.info.shell_replaced), ("42", false), "{text}");
        }
        let ran = run(machine, "s", "console.log('out'); process.exit(3)").await;
        assert_eq!((ran.text(), ran.code()), ("out", Some(3)));
        let ran = run(machine, "s", "console.log(process.cwd(), process.env.E, typeof x)").await;
        assert_eq!((ran.text(), ran.info.shell_replaced), ("/usr e undefined", true));
    })
    .await;
}

#[tokio::test]
async fn a_huge_error_is_cut_and_the_shell_keeps_its_state() {
    for (language, fill, text, ask) in [
        (
            "python",
            "x = 41",
            "raise ValueError('y' * 3_000_000)",
            "print(x)",
        ),
        (
            "javascript",
            "let x = 41",
            "throw new TypeError('y'.repeat(3_000_000))",
            "console.log(x)",
        ),
    ] {
        with_shell(language, async |machine| {
            run(machine, "s", fill).await;
            let ran = run(machine, "s", text).await;
            assert_eq!(ran.code(), Some(1), "{language}");
            let error = ran.info.error.unwrap();
            let bytes = error.value.len() + error.traceback.concat().len();
            assert!(
                error.value.starts_with("yyy") && bytes < 100_000,
                "{language}: {bytes}"
            );
            assert_eq!(
                run(machine, "s", ask).await.text().trim(),
                "41",
                "{language}"
            );
        })
        .await;
    }
}

/// Writes a forged result in place of the interpreter's loop.
const FORGED: &str = r#"
import glob, json
large = "x" * 1_000_000
answer = [b"2", b"0", large.encode(), json.dumps({"error": {"name": "E", "value": large, "traceback": [large]}}).encode(), b""]
with open(glob.glob("/tmp/.box-shell-*")[0] + "/done", "wb", buffering=0) as done:
    rest = b"".join(field + b"\0" for field in answer)
    while rest:
        rest = rest[done.write(rest):]
"#;

#[tokio::test]
async fn forged_messages_of_a_guest_are_truncated() {
    with_shell("python", async |machine| {
        run(machine, "s", "import os; os.chdir('/usr')").await;
        let ran = run(machine, "s", FORGED).await;
        let error = ran.info.error.unwrap();
        let bytes = error.value.len() + error.traceback.concat().len();
        assert!(
            error.name == "E" && bytes < 100_000,
            "{} {bytes}",
            error.name
        );
        assert_eq!(super::list(machine).await[0].cwd, "/usr");
    })
    .await;
}

fn plain(ran: &super::Ran) -> Vec<&str> {
    let shown = ran.shown.iter();
    shown.map(|one| one.data["text/plain"].as_str()).collect()
}

#[tokio::test]
async fn python_shows_its_last_value_and_displayed_values() {
    with_shell("python", async |machine| {
        let ran = run(machine, "s", "x = 41\nprint('out')\nx + 1").await;
        assert_eq!((ran.text(), plain(&ran)), ("out", vec!["42"]));
        for text in ["y = 1", "None", "print('no')", "if True:\n    5", ""] {
            assert_eq!(plain(&run(machine, "s", &format!("{text}\n#")).await), [""; 0], "{text}");
        }
        let class = "class Page:\n    def _repr_html_(self): return '<b>hi</b>'\n    def _repr_png_(self): return b'\\x89PNG'\n    \
            def _repr_json_(self): raise RuntimeError\n    def __repr__(self): return 'a page'\n\
            display(Page(), 7)\nPage()";
        let ran = run(machine, "s", class).await;
        assert_eq!(plain(&ran), ["a page", "7", "a page"]);
        let shown = &ran.shown[0].data;
        assert_eq!((&*shown["text/html"], &*shown["image/png"]), ("<b>hi</b>", "iVBORw=="));
        assert!(!shown.contains_key("application/json"));
        // A later reader sees it too, and a reader without chunks does not.
        let id = ran.info.command_id.to_string();
        let later = super::read_again(machine, &id, "text").await;
        assert_eq!(later.len(), 3);
        assert_eq!(super::read_again(machine, &id, "none").await.len(), 0);
        // An error while a value is formatted is the error of the run, and earlier displays stay.
        let ran = run(machine, "s", "class Bad:\n    def __repr__(self): raise KeyError('no')\ndisplay(1)\nBad()").await;
        assert_eq!((ran.code(), plain(&ran)), (Some(1), vec!["1"]));
        assert_eq!(ran.info.error.unwrap().name, "KeyError");
        // Ten MiB fit. A longer value is cut, and does not end the shell.
        let ran = run(machine, "s", "'x' * 10_000_000").await;
        assert_eq!(plain(&ran)[0].len(), 10_000_002);
        let ran = run(machine, "s", "'x' * 11_000_000").await;
        let cut = plain(&ran);
        assert!(cut[0].len() < 2000 && cut[0].ends_with("[truncated]"), "{}", cut[0].len());
        let ran = run(machine, "s", "[display('y' * 2_080_000) for _ in range(500)] and None").await;
        let shown = plain(&ran);
        assert_eq!((shown[4].len(), shown[9].len()), (2_080_002, 1012), "five fit, then they are cut");
        assert!(shown.len() < 300 && shown.last().unwrap().ends_with("more values omitted]"), "{}", shown.len());
        // A format that does not fit is omitted, and the others stay.
        let page = "class Page:\n    def _repr_png_(self): return bytes(9_000_000)\n    \
            def _repr_html_(self): return '<b>hi</b>'\n    def __repr__(self): return 'a page'\nPage()";
        let ran = run(machine, "s", page).await;
        let note = "a page\n[image/png omitted: the values of a run have at most 10 MiB]";
        let kept = [("text/html", "<b>hi</b>"), ("text/plain", note)];
        let kept = kept.map(|(kind, text)| (kind.to_owned(), text.to_owned()));
        assert_eq!(ran.shown[0].data, kept.into());
        assert_eq!(run(machine, "s", "x").await.shown[0].data["text/plain"], "41");
    })
    .await;
}

#[tokio::test]
async fn python_shows_lists_and_dictionaries_as_json() {
    with_shell("python", async |machine| {
        for (text, json) in [
            ("[1, 'a', None]", Some("[1, \"a\", null]")),
            (
                "{'a': [float('nan'), 2.5], 3: True}",
                Some("{\"a\": [null, 2.5], \"3\": true}"),
            ),
            (
                "import datetime; [datetime.date(2024, 1, 2)]",
                Some("[\"2024-01-02\"]"),
            ),
            ("[object()]", None),
            ("{(1, 2): 3}", None),
            ("x = []; x.append(x); x", None),
            ("'text'", None),
        ] {
            let ran = run(machine, "s", text).await;
            let shown = &ran.shown[0].data;
            assert_eq!(
                shown.get("application/json").map(String::as_str),
                json,
                "{text}"
            );
            assert!(shown.contains_key("text/plain"), "{text}");
        }
    })
    .await;
}

#[tokio::test]
async fn javascript_shows_its_last_value_and_displayed_values() {
    with_shell("javascript", async |machine| {
        let ran = run(machine, "s", "let x = 41; console.log('out'); x + 1").await;
        assert_eq!((ran.text(), plain(&ran)), ("out", vec!["42"]));
        for text in ["let y = 1", "undefined", "console.log('no')"] {
            assert_eq!(plain(&run(machine, "s", text).await), [""; 0], "{text}");
        }
        let ran = run(machine, "s", "Promise.resolve({a: 'b'})").await;
        assert_eq!(plain(&ran), ["{ a: 'b' }"]);
        let page = "display({[Symbol.for('Jupyter.display')]: () => ({'text/html': '<b>hi</b>'})})";
        let ran = run(machine, "s", page).await;
        assert_eq!(ran.shown[0].data["text/html"], "<b>hi</b>");
        let ran = run(machine, "s", "'x'.repeat(10000000)").await;
        assert_eq!(plain(&ran)[0].len(), 10_000_002);
        let ran = run(machine, "s", "'x'.repeat(11000000)").await;
        assert!(plain(&ran)[0].len() < 20_000);
        let large = "display({[Symbol.for('Jupyter.display')]: () => ({'text/html': 'h', 'x/y': 'y'.repeat(11000000)})})";
        let ran = run(machine, "s", large).await;
        let shown = &ran.shown[0].data;
        assert_eq!((shown.get("x/y"), &*shown["text/html"]), (None, "h"));
        assert!(
            shown["text/plain"].ends_with("[x/y omitted: the values of a run have at most 10 MiB]"),
            "{}",
            shown["text/plain"]
        );
        let ran = run(
            machine,
            "s",
            "for (let n = 0; n < 1000; n++) display('y'.repeat(90000))",
        )
        .await;
        let shown = plain(&ran);
        assert!(shown[99].len() > 90_000 && shown[120].ends_with("[truncated]"));
        assert!(
            shown.len() < 300 && shown.last().unwrap().ends_with("more values omitted]"),
            "{}",
            shown.len()
        );
    })
    .await;
}
