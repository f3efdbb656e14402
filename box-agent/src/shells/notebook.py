# The common magics of notebooks, for boxes without IPython. The driver compiles this file when a text needs it.
import io, os, re, shlex, subprocess, sys, time

PROGRAMS = {"bash", "sh", "python", "python3", "perl", "ruby", "node"}
COMMANDS = {"ls", "ll", "cat", "cp", "mv", "rm", "mkdir", "rmdir", "conda", "mamba", "uv"}
MEDIA = {"html": "text/html", "markdown": "text/markdown", "latex": "text/latex", "svg": "image/svg+xml",
         "javascript": "application/javascript", "js": "application/javascript"}
# They configure a front end that a box does not have.
IGNORED = {"matplotlib", "config", "load_ext", "reload_ext", "autoreload", "autoawait", "colors"}

ASSIGNED = re.compile(r"(?P<to>[\w\s.,\[\]'\"()*]+=)\s*(?P<kind>[%!])(?P<rest>.*)", re.S)
HELP = re.compile(r"\?{0,2}\s*(?P<name>[\w.]+)\s*\?{0,2}")


class UsageError(Exception):
    pass


class Captured:
    def __init__(self):
        self.stdout, self.stderr, self.outputs = "", "", []

    def __call__(self):
        self.show()

    def show(self):
        sys.stdout.write(self.stdout)
        sys.stderr.write(self.stderr)
        for one in self.outputs:
            show(one["data"])


class Notebook:
    def __init__(self):
        self.previous = os.getcwd()

    # Changes the lines that the compiler rejects, until it accepts the text or rejects a line of Python.
    def transform(self, text):
        lines = text.split("\n")
        first = next((at for at, line in enumerate(lines) if line.strip()), 0)
        if lines[first].startswith("%%"):
            name, _, rest = lines[first][2:].strip().partition(" ")
            body = "\n".join(lines[first + 1:])
            return "\n" * first + "__box_notebook.cell(%r, %r, %r)" % (name, rest.strip(), body)
        for _ in range(len(lines)):
            try:
                compile("\n".join(lines), "<run>", "exec", 0x400)
            except SyntaxError as error:
                for at in range(min(error.lineno or 1, len(lines)) - 1, -1, -1):
                    if self.change(lines, at):
                        break
                else:
                    break
            else:
                break
        return "\n".join(lines)

    # Changes a line that has a magic.
    def change(self, lines, at):
        line = lines[at].strip()
        indent = lines[at][:len(lines[at]) - len(lines[at].lstrip())]
        last = at
        while lines[last].endswith("\\") and last + 1 < len(lines):
            last += 1
            line = line[:-1].rstrip() + " " + lines[last].strip()
        assigned = ASSIGNED.fullmatch(line)
        if line.startswith("!!"):
            code = "__box_notebook.getoutput(%r)" % line[2:]
        elif line.startswith("!"):
            code = "__box_notebook.system(%r)" % line[1:]
        elif line.startswith("%"):
            code = "__box_notebook.line(%r, %r)" % split(line[1:])
        elif assigned and assigned["kind"] == "!":
            code = "%s __box_notebook.getoutput(%r)" % (assigned["to"], assigned["rest"])
        elif assigned:
            code = "%s __box_notebook.line(%r, %r)" % ((assigned["to"],) + split(assigned["rest"]))
        elif "?" in line and HELP.fullmatch(line):
            code = "__box_notebook.help(%r)" % HELP.fullmatch(line)["name"]
        else:
            return False
        lines[at] = indent + code
        lines[at + 1:last + 1] = [""] * (last - at)
        return True

    def system(self, command):
        main["_exit_code"] = system(expand(command))

    def getoutput(self, command):
        flush()
        made = subprocess.run(expand(command), shell=True, stdout=subprocess.PIPE, universal_newlines=True)
        return made.stdout.splitlines()

    def help(self, name):
        import inspect

        value = eval(name, main)
        try:
            print("Signature: %s%s" % (name, inspect.signature(value)))
        except (TypeError, ValueError):
            print("Type: %s" % type(value).__name__)
        print("Docstring: %s" % (inspect.getdoc(value) or "<no docstring>"))

    def line(self, name, text):
        if name in IGNORED:
            return None
        if name in COMMANDS:
            main["_exit_code"] = system(expand("%s %s" % ("ls -l" if name == "ll" else name, text)))
            return None
        do = getattr(self, "line_" + name, None)
        if do is None:
            raise UsageError("Line magic function `%%%s` not found." % name)
        # The code of these magics is Python.
        return do(text if name in ("time", "timeit") else expand(text))

    def cell(self, name, text, body):
        if name in PROGRAMS:
            return script([sys.executable if name.startswith("python") else name] + shlex.split(expand(text)), body)
        if name in MEDIA:
            return show({MEDIA[name]: body, "text/plain": body})
        do = getattr(self, "cell_" + name, None)
        if do is None:
            raise UsageError("Cell magic `%%%%%s` not found." % name)
        return do(expand(text), body)

    def line_pip(self, text):
        main["_exit_code"] = system("%s -m pip %s" % (shlex.quote(sys.executable), text))

    def line_pwd(self, _):
        return os.getcwd()

    def line_cd(self, text):
        text = text.strip().strip("'\"") or "~"
        to = self.previous if text == "-" else os.path.expanduser(text)
        before = os.getcwd()
        os.chdir(to)
        self.previous = before
        print(os.getcwd())

    def line_env(self, text):
        name, sign, value = text.partition("=") if "=" in text else text.strip().partition(" ")
        name = name.strip()
        if not name:
            return dict(os.environ)
        if not sign:
            if name not in os.environ:
                raise UsageError("Environment does not have key: %s" % name)
            return os.environ[name]
        os.environ[name] = value.strip()
        print("env: %s=%s" % (name, value.strip()))

    line_set_env = line_env

    def line_time(self, text):
        before, began = os.times(), time.time()
        value = run(text)
        after, ended = os.times(), time.time()
        user, kernel = after.user - before.user, after.system - before.system
        print("CPU times: user %s, sys: %s, total: %s" % (duration(user), duration(kernel), duration(user + kernel)))
        print("Wall time: %s" % duration(ended - began))
        return value

    def cell_time(self, _, body):
        return self.line_time(body)

    def line_timeit(self, text, body=None):
        import timeit

        options, number, repeat = text.split(), 0, 7
        while options and options[0][:2] in ("-n", "-r"):
            word = options.pop(0)
            count = int(word[2:] or options.pop(0))
            number, repeat = (count, repeat) if word[1] == "n" else (number, count)
        rest = text if not text.startswith("-") else " ".join(options)
        timer = timeit.Timer(rest if body is None else body, rest if body is not None else "pass", globals=main)
        number = number or timer.autorange()[0]
        each = [total / number for total in timer.repeat(repeat, number)]
        mean = sum(each) / len(each)
        deviation = (sum((one - mean) ** 2 for one in each) / len(each)) ** 0.5
        print("%s ± %s per loop (mean ± std. dev. of %d runs, %s loops each)"
              % (duration(mean), duration(deviation), repeat, format(number, ",")))

    def cell_timeit(self, text, body):
        self.line_timeit(text, body)

    def line_run(self, text):
        import runpy

        words = shlex.split(text)
        if not words:
            raise UsageError("%run needs the name of a file")
        before, sys.argv = sys.argv, words
        try:
            names = runpy.run_path(words[0], run_name="__main__")
        finally:
            sys.argv = before
        main.update({name: value for name, value in names.items() if not name.startswith("__")})

    def line_who(self, _):
        print("\t".join(sorted(visible())) or "Interactive namespace is empty.")

    def line_whos(self, _):
        for name in sorted(visible()):
            print("%-12s %-12s %s" % (name, type(main[name]).__name__, repr(main[name])[:60]))

    def line_reset(self, _):
        for name in visible():
            del main[name]

    def cell_script(self, text, body):
        return script(shlex.split(text), body)

    def cell_writefile(self, text, body):
        words = shlex.split(text)
        appends = "-a" in words
        names = [word for word in words if word != "-a"]
        if len(names) != 1:
            raise UsageError("%%writefile needs the name of a file")
        name = os.path.expanduser(names[0])
        done = "Overwriting" if os.path.exists(name) else "Writing"
        print("%s %s" % ("Appending to" if appends else done, name))
        with open(name, "a" if appends else "w", encoding="utf-8") as file:
            file.write(body if body.endswith("\n") else body + "\n")

    def cell_capture(self, text, body):
        import contextlib

        captured, out, err, count = Captured(), io.StringIO(), io.StringIO(), len(shown)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                value = run(body)
                if value is not None:
                    display(value)
        finally:
            captured.stdout, captured.stderr, captured.outputs = out.getvalue(), err.getvalue(), shown[count:]
            del shown[count:]
            names = [word for word in text.split() if not word.startswith("-")]
            if names:
                main[names[0]] = captured


def split(text):
    name, _, rest = text.strip().partition(" ")
    return name, rest.strip()


def visible():
    hidden = type(sys)
    return [name for name, value in main.items() if not name.startswith("_") and not isinstance(value, hidden)]


# Replaces {expression} and $name by values of the caller; the rest is for the shell.
def expand(text):
    frame = sys._getframe(1)
    while frame and frame.f_globals is not main:
        frame = frame.f_back
    scope = frame.f_locals if frame else main

    def value(match):
        if match[0] == "$$":
            return "$"
        try:
            return str(eval(match[1] or match[2], main, scope))
        except Exception:
            return match[0]

    return re.sub(r"\{([^{}]+)\}|\$\$|\$([A-Za-z_]\w*)", value, text)


def system(command):
    flush()
    return call(command)


def script(argv, body):
    flush()
    code = subprocess.run(argv, input=body.encode()).returncode
    if code:
        raise subprocess.CalledProcessError(code, argv)


def duration(seconds):
    for unit, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return "%.3g %s" % (seconds / size, unit)
    return "%.3g ns" % (seconds / 1e-9)
