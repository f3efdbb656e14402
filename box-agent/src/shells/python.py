def drive():
    import _ast, base64, builtins, json, linecache, os, re, select, signal, sys, traceback
    from importlib.machinery import PathFinder

    notebook_source, values_source, home, own = sys.argv[2], sys.argv[3], sys.argv[4], os.getpid()
    sys.argv[:] = [""]
    main = sys.modules["__main__"].__dict__
    # A run begins when its line is there, and is busy with its text after that.
    begun = busy = pending = False

    def interrupted(*_):
        nonlocal pending
        if busy:
            raise KeyboardInterrupt
        pending = begun

    signal.signal(signal.SIGINT, interrupted)

    def path(name):
        return os.path.join(home, name)

    def load(name):
        with open(path(name), encoding="utf-8") as file:
            return json.load(file)

    def join(names):
        for to, name in enumerate(names):
            fd = os.open(name, os.O_RDONLY if to == 0 else os.O_WRONLY)
            os.dup2(fd, to)
            os.close(fd)
        sys.stdin = open(0, closefd=False)
        sys.stdout = open(1, "w", closefd=False, errors="backslashreplace")
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)

    def flush():
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass

    def send(*fields):
        encode = lambda field: field if isinstance(field, bytes) else os.fsencode(field)
        rest = b"".join(encode(field) + b"\0" for field in fields)
        with open(path("done"), "wb", buffering=0) as done:
            while rest:
                rest = rest[done.write(rest):]

    def plain(text):
        return text.encode("utf-8", "replace").decode("utf-8")

    def truncate(text, limit):
        return plain(text if len(text) <= limit else text[:limit] + " [truncated]")

    def describe(error):
        trace = error.__traceback__
        # The first frames are those of the driver.
        while trace and trace.tb_frame.f_code.co_filename == "<string>":
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace)
        if not isinstance(error, SystemExit):
            sys.stderr.write("".join(lines))
        return {"name": truncate(type(error).__name__, 200), "value": truncate(str(error), 16000),
                "traceback": [truncate(line, 2000) for line in lines[-100:]]}

    def exit_code(raised):
        if raised.code is None or isinstance(raised.code, int):
            return (raised.code or 0) & 255
        print(raised.code, file=sys.stderr)
        return 1

    # Displayed values: at most 10 MiB as JSON. The largest formats of a value beyond most of it are omitted, and values
    # beyond all of it dropped.
    LIMIT, RESERVE = (10 << 20) - 8192, 64 << 10
    shown, dropped, room = [], 0, 0
    kinds = {"html": "text/html", "markdown": "text/markdown", "latex": "text/latex", "json": "application/json",
             "javascript": "application/javascript", "pdf": "application/pdf", "svg": "image/svg+xml",
             "png": "image/png", "jpeg": "image/jpeg"}
    CHART, TABLE = "application/vnd.box.chart+json", "application/vnd.box.table+json"

    def text_of(data):
        if isinstance(data, tuple):
            data = data[0]
        if isinstance(data, (bytes, bytearray)):
            return base64.b64encode(data).decode()
        return data if isinstance(data, str) else json.dumps(data, default=str)

    def size(value):
        return len(json.dumps(value, ensure_ascii=False).encode()) + 64

    # A format that is None was too long to be made.
    def add(data, is_main=False):
        nonlocal dropped, room
        omitted = [kind for kind, one in data.items() if one is None]
        data = {kind: plain(text_of(one)) for kind, one in data.items() if one is not None}
        sizes = {kind: size(one) for kind, one in data.items()}
        while sizes and size(data) > room:
            # What the interpreter made of the value goes first.
            kind = max(sizes, key=lambda kind: (kind in (CHART, TABLE), sizes.get(kind)))
            del sizes[kind]
            if kind == "text/plain":
                data[kind] = truncate(data[kind], 1000)
            else:
                omitted.append(kind)
                del data[kind]
        if omitted:
            note = "[%s omitted: the values of a run have at most 10 MiB]" % ", ".join(omitted)
            data["text/plain"] = "\n".join(filter(None, [data.get("text/plain"), truncate(note, 1000)]))
        if size(data) > room + RESERVE and not is_main:
            dropped += 1
            return
        room -= size(data)
        shown.append({"data": data, "main": is_main})

    values = None

    # Adds a value as data, if it can be made.
    def derive(data, kind, make, *arguments):
        nonlocal values
        if values is None:
            values = {}
            exec(compile(values_source, "<string>", "exec"), values)
        try:
            made = values[make](*arguments)
            if made is not None:
                data[kind] = made
        except values["TooLong"]:
            data[kind] = None
        except Exception:
            pass

    # The method names of notebooks, so that the same objects display here.
    def bundle(value):
        if type(value).__module__ == "matplotlib.figure":
            return figure_bundle(value)
        data = ipython_format(value)[0] if ipython_format else format_value(value)
        if isinstance(value, (list, dict)) and "application/json" not in data:
            derive(data, "application/json", "json_of", value)
        # An object that displays itself has no format.
        elif data and isinstance(value, getattr(sys.modules.get("pandas"), "DataFrame", ())):
            derive(data, TABLE, "table_of", value, LIMIT)
        return data

    def format_value(value):
        data = {"text/plain": repr(value)}
        for name, kind in kinds.items():
            make = getattr(type(value), "_repr_%s_" % name, None)
            try:
                made = make and make(value)
                if made is not None:
                    data[kind] = text_of(made)
            except Exception:
                pass
        make = getattr(type(value), "_repr_mimebundle_", None)
        try:
            made = make and make(value)
            made = made[0] if isinstance(made, tuple) else made
            data.update({kind: text_of(one) for kind, one in (made or {}).items()})
        except Exception:
            pass
        return data

    def show(value, is_main=False):
        data = bundle(value)
        if data:
            add(data, is_main)

    def figure_bundle(figure):
        import io

        data, image = {"text/plain": repr(figure)}, io.BytesIO()
        if figure.axes or figure.lines:
            figure.savefig(image, format="png", bbox_inches="tight", facecolor=figure.get_facecolor())
            data["image/png"] = image.getvalue()
            derive(data, CHART, "chart_of", figure, LIMIT)
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot:
            pyplot.close(figure)
        return data

    def show_figures(*_, **__):
        pyplot = sys.modules.get("matplotlib.pyplot")
        for number in pyplot.get_fignums() if pyplot else ():
            show(pyplot.figure(number))

    builtins.display = lambda *values: [show(value) for value in values] and None

    # IPython's own shell starts when a text or a module needs it, because it takes a second to load.
    ipython = ipython_format = notebook = None

    def start_ipython(*_):
        nonlocal ipython, ipython_format
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        # Importing IPython may have started it.
        if ipython is None:
            config = Config()
            config.HistoryManager.enabled = False
            config.InteractiveShell.colors = "NoColor"
            shell = InteractiveShell.instance(user_module=sys.modules["__main__"], config=config)
            shell.display_pub.publish = lambda data, *_, **__: add(data)
            shell.display_pub.clear_output = shell.enable_gui = lambda *_, **__: None

            def system(command):
                flush()
                main["_exit_code"] = call(shell.var_expand(command, depth=1))

            def format(value, include=None, exclude=()):
                data = bundle(value)
                wanted = set(include or data) - set(exclude or ())
                return {kind: one for kind, one in data.items() if kind in wanted}, {}

            shell.system = system
            ipython_format = shell.display_formatter.format
            shell.display_formatter.format = format
            ipython = shell
        return ipython

    def call(command):
        import subprocess

        shell = "/bin/bash" if os.path.exists("/bin/bash") else None
        code = subprocess.call(command, shell=True, executable=shell)
        return code if code >= 0 else 128 - code

    def patch_pyplot(pyplot):
        pyplot.show = show_figures

    def patch_image(module):
        module.Image.show = lambda image, *_, **__: show(image)

    hooks = {"IPython": start_ipython, "matplotlib.pyplot": patch_pyplot, "PIL.Image": patch_image}

    class Importing:
        @staticmethod
        def find_spec(name, path=None, target=None):
            hook = hooks.get(name)
            spec = PathFinder.find_spec(name, path, target) if hook else None
            if spec and spec.loader:
                load = spec.loader.exec_module

                def load_and_hook(module):
                    load(module)
                    hooks.pop(name, None)
                    try:
                        hook(module)
                    except Exception:
                        pass

                spec.loader.exec_module = load_and_hook
            return spec

    sys.meta_path.insert(0, Importing)

    def get_ipython():
        try:
            return start_ipython()
        except Exception:
            raise NameError("name 'get_ipython' is not defined") from None

    if PathFinder.find_spec("IPython"):
        builtins.get_ipython = get_ipython

    # Only texts that are no Python and may have a magic are transformed.
    magical = re.compile(r"^\s*[%!?]|=\s*[%!]|\?\s*$", re.M)

    def transform(text):
        nonlocal notebook
        try:
            return start_ipython().transform_cell(text)
        except Exception:
            pass
        if notebook is None:
            names = {"main": main, "run": run_text, "show": add, "flush": flush, "call": call, "shown": shown}
            exec(compile(notebook_source, "<string>", "exec"), names)
            notebook = builtins.__box_notebook = names["Notebook"]()
        return notebook.transform(text)

    def unindented(text):
        # As IPython does: without the indentation of the first line.
        first = next(filter(str.strip, text.splitlines()), "")
        indent = first[: len(first) - len(first.lstrip())]
        return re.sub("^" + indent, "", text, flags=re.M) if indent else text

    def parse(text, name):
        problem = None
        text = unindented(text)
        try:
            return compile(text, name, "exec", _ast.PyCF_ONLY_AST)
        except SyntaxError as error:
            problem = error
        if not magical.search(text):
            raise problem
        return compile(transform(text), name, "exec", _ast.PyCF_ONLY_AST)

    AWAIT, COROUTINE = getattr(_ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0), 0x80
    loop = None

    def evaluate(tree, name, mode):
        code = compile(tree, name, mode, AWAIT)
        value = eval(code, main)
        return until_complete(value) if code.co_flags & COROUTINE else value

    def until_complete(coroutine):
        nonlocal loop
        import asyncio

        if loop is None or loop.is_closed():
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        finally:
            if not task.done() and not loop.is_closed():
                task.cancel()
                try:
                    loop.run_until_complete(task)
                except BaseException:
                    pass

    def run_text(text, name="<run>"):
        """Runs a text and returns the value of its last expression."""
        tree = parse(text, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        if tree.body:
            evaluate(tree, name, "exec")
        return evaluate(_ast.Expression(last.value), name, "eval") if last else None

    if os.path.exists(path("state")):
        os.environ.clear()
        os.environ.update(load("state"))
    cwd = os.getcwd()
    go = open(path("go"), encoding="utf-8")
    while True:
        # The agent sends no interrupt before the line is read, so the run has begun by then.
        select.select([go], [], [])
        begun = True
        number, mode, stdin = go.readline().split()
        join([path("in"), path("out"), path("err")])
        if stdin == "open":
            send(number, "begun", "", "", "")
        code, error, before = 0, None, None
        shown.clear()
        dropped, room = 0, LIMIT - RESERVE
        try:
            if mode == "set":
                settings = load("before")
                before = (cwd, {name: os.environ.get(name) for name in settings["env"]})
                os.environ.update(settings["env"])
                if settings["cwd"]:
                    os.chdir(settings["cwd"])
            name = "<run %s>" % number
            with open(path("text"), encoding="utf-8") as file:
                text = file.read()
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)
            busy = True
            if pending:
                raise KeyboardInterrupt
            value = run_text(text, name)
            # A semicolon at the end means: do not show the value.
            if value is not None and not text.rstrip().endswith(";"):
                show(value, True)
            value = None
        except SystemExit as raised:
            # A forked child ends, and a kernel lives on.
            busy = False
            if os.getpid() != own:
                raise
            code, error = exit_code(raised), describe(raised)
        except BaseException as raised:
            busy = False
            code, error = 1, describe(raised)
        try:
            busy = True
            if ipython:
                ipython.events.trigger("post_execute")
            show_figures()
        except BaseException as raised:
            busy = False
            code, error = (1, describe(raised)) if error is None else (code, error)
        begun = busy = pending = False
        flush()
        # A child forked by the text must not continue the loop.
        if os.getpid() != own:
            os._exit(code)
        join([os.devnull] * 3)
        if before:
            for name, value in before[1].items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            if settings["cwd"] and not settings["stays"]:
                os.chdir(before[0])
        try:
            cwd = os.getcwd()
        except OSError:
            pass
        if dropped:
            shown.append({"data": {"text/plain": "[%d more values omitted]" % dropped}, "main": False})
        report = json.dumps({"error": error, "shown": shown}, ensure_ascii=False) if error or shown else ""
        send(number, str(code), cwd, report.encode(), json.dumps(dict(os.environ)))


drive()
