//! Interpreters that are no shells.

use box_protocol::ExitWhy;
use serde_json::json;

use super::{run, try_run, with_shell};

#[tokio::test]
async fn python_keeps_its_state_and_tells_its_errors() {
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
        assert_eq!(run(machine, "s", "print(x)").await.text(), "42", "a forked child does not speak for the shell");
        for text in ["while True: pass", "import time; time.sleep(60)", "os.system('sleep 60'); print('after')"] {
            let ran = try_run(machine, "s", text, json!({"timeout_ms": 200})).await.unwrap();
            assert_eq!(ran.info.exit.unwrap().why, ExitWhy::Timeout, "{text}");
            let ran = run(machine, "s", "print(x)").await;
            assert_eq!((ran.text(), ran.info.shell_replaced), ("42", false), "{text}");
        }
        let ran = run(machine, "s", "print('out'); sys.exit(3)").await;
        assert_eq!((ran.text(), ran.code()), ("out", Some(3)));
        let ran = run(machine, "s", "import os; print(os.getcwd(), os.environ['E'], 'x' in globals())").await;
        assert_eq!((ran.text(), ran.info.shell_replaced), ("/usr e False", true));
    })
    .await;
}

#[tokio::test]
async fn javascript_keeps_its_state_and_tells_its_errors() {
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
