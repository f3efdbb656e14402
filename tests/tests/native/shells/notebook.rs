//! What users of notebooks expect of Python and JavaScript: rich values, `await`, `!` and magics.

use box_protocol::ExitWhy;
use serde_json::json;

use super::{Ran, list, run, try_run, with_shell};

/// The text of each displayed value, and whether it is the value of the last expression.
fn shown(ran: &Ran) -> Vec<(&str, bool)> {
    let each = ran.shown.iter();
    each.map(|one| (one.data["text/plain"].as_str(), one.main))
        .collect()
}

fn error(ran: &Ran) -> String {
    ran.info.error.clone().map_or(String::new(), |it| it.name)
}

#[tokio::test]
async fn the_value_of_the_last_expression_is_marked_and_runs_are_counted() {
    for language in ["python", "javascript"] {
        with_shell(language, async |machine| {
            let before = list(machine).await[0].executions;
            let ran = run(machine, "s", "display(1); display(2)\n3").await;
            assert_eq!(shown(&ran), [("1", false), ("2", false), ("3", true)]);
            let ran = run(machine, "s", "display(4)").await;
            assert_eq!(shown(&ran), [("4", false)], "{language}");
            run(machine, "s", "nothing_of_this_name").await;
            assert_eq!(list(machine).await[0].executions, before + 3);
        })
        .await;
    }
}

#[tokio::test]
async fn a_result_of_900_kilobytes_is_whole() {
    for (language, text) in [
        ("python", "'x' * 900_000"),
        ("javascript", "'x'.repeat(900_000)"),
    ] {
        with_shell(language, async |machine| {
            let ran = run(machine, "s", text).await;
            let [(value, true)] = shown(&ran)[..] else {
                panic!("{language}: {}", ran.shown.len());
            };
            assert_eq!(value.len(), 900_002, "{language}");
        })
        .await;
    }
}

#[tokio::test]
async fn indented_python_runs() {
    with_shell("python", async |machine| {
        let text = "\n    x = 1\n    if x:\n        x += 1\n    x\n";
        assert_eq!(shown(&run(machine, "s", text).await), [("2", true)]);
        let ran = run(machine, "s", "  x = 1\n    x = 2").await;
        assert_eq!(error(&ran), "IndentationError");
    })
    .await;
}

#[tokio::test]
async fn python_awaits_outside_of_functions() {
    with_shell("python", async |machine| {
        let text = "import asyncio\nawait asyncio.sleep(0.001)\nx = await asyncio.sleep(0, 41)\nx + await asyncio.sleep(0, 1)";
        assert_eq!(shown(&run(machine, "s", text).await), [("42", true)]);
        let text = "async def numbers():\n    yield 1\n    yield 2\n[n async for n in numbers()]";
        assert_eq!(shown(&run(machine, "s", text).await), [("[1, 2]", true)]);
        // One loop serves all runs.
        run(machine, "s", "later = asyncio.get_event_loop().create_task(asyncio.sleep(0, 'done'))").await;
        assert_eq!(shown(&run(machine, "s", "await later").await), [("'done'", true)]);
        let ran = run(machine, "s", "await asyncio.sleep(0)\nraise KeyError('k')").await;
        assert_eq!(error(&ran), "KeyError");
        let limit = json!({"timeout_ms": 300});
        let ran = try_run(machine, "s", "await asyncio.sleep(600)", limit).await.unwrap();
        assert_eq!(ran.info.exit.unwrap().why, ExitWhy::Timeout);
        let ran = run(machine, "s", "await asyncio.sleep(0, x)").await;
        assert_eq!((shown(&ran), ran.info.shell_replaced), (vec![("41", true)], false));
    })
    .await;
}

#[tokio::test]
async fn javascript_awaits_outside_of_functions() {
    with_shell("javascript", async |machine| {
        let ran = run(machine, "s", "const x = await Promise.resolve(41); x + 1").await;
        assert_eq!(shown(&ran), [("42", true)]);
        assert_eq!(shown(&run(machine, "s", "x").await), [("41", true)]);
        let text = "for (const n of [1, 2]) { await 0; console.log(n) }";
        assert_eq!(run(machine, "s", text).await.text(), "1\n2");
        let text = "const {sep} = await import('path'); sep";
        assert_eq!(shown(&run(machine, "s", text).await), [("'/'", true)]);
        let ran = run(machine, "s", "await Promise.reject(new RangeError('no'))").await;
        assert_eq!((ran.code(), error(&ran).as_str()), (Some(1), "RangeError"));
        assert!(
            !String::from_utf8_lossy(&ran.stderr).contains("eval"),
            "{ran:?}"
        );
        let limit = json!({"timeout_ms": 300});
        let ran = try_run(machine, "s", "await new Promise(() => {})", limit)
            .await
            .unwrap();
        assert_eq!(ran.info.exit.unwrap().why, ExitWhy::Timeout);
        let ran = run(machine, "s", "await x").await;
        assert_eq!(
            (shown(&ran), ran.info.shell_replaced),
            (vec![("41", true)], false)
        );
    })
    .await;
}

/// Runs a test with `IPython`, if the box has it, and with the agent's own magics.
async fn with_and_without_ipython(test: impl AsyncFn(&box_tests::machine::Machine)) {
    for hide in ["", "import sys; sys.modules['IPython'] = None"] {
        with_shell("python", async |machine| {
            run(machine, "s", &format!("{hide}\n#")).await;
            test(machine).await;
        })
        .await;
    }
}

#[tokio::test]
async fn shell_commands_run_between_lines_of_python() {
    with_and_without_ipython(async |machine| {
        let ran = run(machine, "s", "x = 'v'\nprint('a')\n!echo {x} $x\nprint('c')").await;
        assert_eq!(ran.text(), "a\nv v\nc", "{ran:?}");
        let ran = run(machine, "s", "lines = !printf 'one\\ntwo\\n'\nprint(list(lines))").await;
        assert_eq!(ran.text(), "['one', 'two']", "{ran:?}");
        let ran = run(machine, "s", "!exit 5\nprint(_exit_code)").await;
        assert_eq!((ran.text(), ran.code()), ("5", Some(0)));
        let text = "def f(q):\n    for n in range(2):\n        !echo {q}{n}\nf('l')\ns = '''\n!not\n%nor\n'''\nprint(len(s))";
        assert_eq!(run(machine, "s", text).await.text(), "l0\nl1\n11");
        let ran = run(machine, "s", "!echo one \\\n  two\nprint('end')").await;
        assert_eq!(ran.text(), "one two\nend");
        let ran = run(machine, "s", "!echo err >&2").await;
        assert_eq!((ran.text(), &*ran.stderr), ("", &b"err\n"[..]));
        let limit = json!({"timeout_ms": 300});
        let ran = try_run(machine, "s", "!sleep 600", limit).await.unwrap();
        assert_eq!(ran.info.exit.unwrap().why, ExitWhy::Timeout);
        assert_eq!(run(machine, "s", "print(x)").await.text(), "v");
    })
    .await;
}

#[tokio::test]
async fn the_common_magics_work() {
    with_and_without_ipython(async |machine| {
        let ran = run(machine, "s", "%cd /usr\n%pwd").await;
        assert_eq!(
            (ran.text(), shown(&ran)),
            ("/usr", vec![("'/usr'", true)]),
            "{ran:?}"
        );
        assert_eq!(list(machine).await[0].cwd, "/usr");
        run(machine, "s", "%env A=b").await;
        let ran = run(machine, "s", "!echo $A\n%env A").await;
        assert_eq!(
            (ran.text(), shown(&ran)),
            ("b", vec![("'b'", true)]),
            "{ran:?}"
        );
        let ran = run(machine, "s", "%%bash\nfor n in 1 2; do echo $n; done").await;
        assert_eq!((ran.text(), ran.code()), ("1\n2", Some(0)), "{ran:?}");
        let ran = run(machine, "s", "%%bash\nexit 3").await;
        assert_eq!(
            (ran.code(), error(&ran).as_str()),
            (Some(1), "CalledProcessError")
        );
        let ran = run(machine, "s", "%time 20 + 1").await;
        assert!(ran.text().contains("Wall time: "), "{ran:?}");
        assert_eq!(shown(&ran), [("21", true)]);
        let ran = run(machine, "s", "%%time\ny = 6\ny * 7").await;
        assert_eq!(
            (ran.text().contains("CPU times"), shown(&ran)),
            (true, vec![("42", true)])
        );
        let ran = run(machine, "s", "%timeit -n 2 -r 2 pass").await;
        assert!(ran.text().contains(" per loop"), "{ran:?}");
        let ran = run(
            machine,
            "s",
            "%%writefile /tmp/of_magic.py\nz = 5\nprint('ran')",
        )
        .await;
        assert!(ran.text().ends_with("of_magic.py"), "{ran:?}");
        let ran = run(machine, "s", "%run /tmp/of_magic.py\nz").await;
        assert_eq!(
            (ran.text(), shown(&ran)),
            ("ran", vec![("5", true)]),
            "{ran:?}"
        );
        let ran = run(machine, "s", "%%capture out\nprint('hidden')").await;
        assert_eq!(ran.text(), "");
        assert_eq!(
            run(machine, "s", "print(out.stdout)").await.text(),
            "hidden"
        );
        let ran = run(machine, "s", "%%html\n<b>x</b>").await;
        assert_eq!(ran.shown[0].data["text/html"].trim(), "<b>x</b>");
        let ran = run(machine, "s", "%pip --version").await;
        assert!(format!("{ran:?}").contains("pip"), "{ran:?}");
        let ran = run(machine, "s", "len?").await;
        assert!(ran.text().contains("number of items"), "{ran:?}");
        let ran = run(machine, "s", "%nothing_of_this_name").await;
        assert_eq!((ran.code(), error(&ran).as_str()), (Some(1), "UsageError"));
        let ran = run(machine, "s", "a = = 1\n# 100% of it").await;
        assert_eq!(error(&ran), "SyntaxError", "a wrong text stays wrong");
    })
    .await;
}

/// A package with the interface of matplotlib that the agent uses.
const FIGURES: &str = r#"
import os
os.makedirs("/tmp/matplotlib", exist_ok=True)
open("/tmp/matplotlib/__init__.py", "w").close()
with open("/tmp/matplotlib/figure.py", "w") as file:
    file.write('''
class Figure:
    lines = []
    def __init__(self, number):
        self.number, self.axes = number, [1]
    def __repr__(self):
        return "figure %d" % self.number
    def get_facecolor(self):
        return "white"
    def savefig(self, to, format, **options):
        assert format == "png" and options["facecolor"] == "white"
        to.write(b"png%d" % self.number)
''')
with open("/tmp/matplotlib/pyplot.py", "w") as file:
    file.write('''
from .figure import Figure
open_figures = {}
def get_fignums():
    return sorted(open_figures)
def figure(number=None):
    number = number or len(open_figures) + 1
    return open_figures.setdefault(number, Figure(number))
def close(one):
    del open_figures[one.number]
def show():
    raise RuntimeError("no window")
''')
"#;

#[tokio::test]
async fn open_figures_are_shown_at_the_end_of_a_run() {
    with_shell("python", async |machine| {
        let made = run(machine, "s", FIGURES).await;
        assert_eq!(made.code(), Some(0), "{made:?}");
        // The real package, if the box has it, must not come first.
        run(machine, "s", "import sys; sys.path.insert(0, '/tmp')").await;
        let text = "import matplotlib.pyplot as plt\nfirst, second = plt.figure(), plt.figure()\nprint('out')\n7";
        let ran = run(machine, "s", text).await;
        let figures = [("7", true), ("figure 1", false), ("figure 2", false)];
        assert_eq!((ran.text(), shown(&ran)), ("out", figures.to_vec()));
        assert_eq!(ran.shown[1].data["image/png"], "cG5nMQ==");
        assert_eq!(shown(&run(machine, "s", "1").await), [("1", true)], "shown once");
        let ran = run(machine, "s", "plt.figure(); plt.show(); display('after')").await;
        assert_eq!(shown(&ran), [("figure 1", false), ("'after'", false)]);
        let ran = run(machine, "s", "f = plt.figure()\nf").await;
        assert_eq!(shown(&ran), [("figure 1", true)], "a figure that is the value is shown once");
        let ran = run(machine, "s", "plt.figure();").await;
        assert_eq!(shown(&ran), [("figure 1", false)], "a semicolon hides the value");
        let ran = run(machine, "s", "plt.figure()\nraise ValueError").await;
        assert_eq!((error(&ran).as_str(), shown(&ran)), ("ValueError", vec![("figure 1", false)]));
    })
    .await;
}

#[tokio::test]
async fn a_guest_can_redefine_every_builtin_name() {
    with_shell("python", async |machine| {
        let text = "open = print = len = str = isinstance = getattr = compile = eval = type = 5\n1";
        assert_eq!(shown(&run(machine, "s", text).await), [("1", true)]);
        assert_eq!(shown(&run(machine, "s", "open + 1").await), [("6", true)]);
        run(
            machine,
            "s",
            "del open, print, len, str, isinstance, getattr, compile, eval, type",
        )
        .await;
    })
    .await;
}
