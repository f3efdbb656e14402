def __box_drive():
    import _ast, base64, builtins, json, linecache, os, signal, sys, traceback

    home, own = sys.argv[1], os.getpid()
    sys.argv[:] = [""]
    main = sys.modules["__main__"].__dict__
    del main["__box_drive"]
    busy = False

    def interrupted(*_):
        if busy:
            raise KeyboardInterrupt

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
        rest = b"".join(os.fsencode(field) + b"\0" for field in fields)
        with open(path("done"), "wb", buffering=0) as done:
            while rest:
                rest = rest[done.write(rest):]

    def describe(error):
        trace = error.__traceback__
        # The first frame is the driver itself.
        lines = traceback.format_exception(type(error), error, trace and trace.tb_next)
        sys.stderr.write("".join(lines))
        truncate = lambda text, limit: text if len(text) <= limit else text[:limit] + " [truncated]"
        plain = lambda text, limit: truncate(text, limit).encode("utf-8", "replace").decode("utf-8")
        return {"name": plain(type(error).__name__, 200), "value": plain(str(error), 16000),
                "traceback": [plain(line, 2000) for line in lines[-100:]]}

    shown, room = [], [0]
    kinds = {"html": "text/html", "markdown": "text/markdown", "latex": "text/latex", "json": "application/json",
             "svg": "image/svg+xml", "png": "image/png", "jpeg": "image/jpeg"}

    def text_of(data):
        if isinstance(data, tuple):
            data = data[0]
        if isinstance(data, (bytes, bytearray)):
            return base64.b64encode(data).decode()
        return data if isinstance(data, str) else json.dumps(data)

    # The method names of notebooks, so that the same objects display here.
    def show(value):
        bundle = {"text/plain": repr(value)}
        for name, kind in kinds.items():
            make = getattr(type(value), "_repr_%s_" % name, None)
            try:
                data = make and make(value)
                if data is not None:
                    bundle[kind] = text_of(data)
            except Exception:
                pass
        make = getattr(type(value), "_repr_mimebundle_", None)
        try:
            made = make and make(value)
            made = made[0] if isinstance(made, tuple) else made
            bundle.update({kind: text_of(data) for kind, data in (made or {}).items()})
        except Exception:
            pass
        if sum(map(len, bundle.values())) > room[0]:
            bundle = {"text/plain": bundle["text/plain"][:1000] + " [truncated]"}
        room[0] -= sum(map(len, bundle.values()))
        plain = lambda text: text.encode("utf-8", "replace").decode("utf-8")
        shown.append({kind: plain(data) for kind, data in bundle.items()})

    builtins.display = lambda *values: [show(value) for value in values] and None

    if os.path.exists(path("state")):
        os.environ.clear()
        os.environ.update(load("state"))
    cwd = os.getcwd()
    go = open(path("go"), encoding="utf-8")
    while True:
        number, mode, stdin = go.readline().split()
        join([path("in"), path("out"), path("err")])
        if stdin == "open":
            send(number, "begun", "", "", "")
        code, error, before = 0, None, None
        shown.clear()
        room[0] = 250_000
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
            tree = compile(text, name, "exec", _ast.PyCF_ONLY_AST)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
            exec(compile(tree, name, "exec"), main)
            if last:
                value = eval(compile(_ast.Expression(last.value), name, "eval"), main)
                if value is not None:
                    show(value)
                value = None
        except SystemExit:
            busy = False
            raise
        except BaseException as raised:
            busy = False
            code, error = 1, describe(raised)
        busy = False
        flush()
        # A child forked by the text must not continue the loop.
        if os.getpid() != own:
            os._exit(code)
        join([os.devnull] * 3)
        if before:
            for name, value in before[1].items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            if settings["cwd"]:
                os.chdir(before[0])
        try:
            cwd = os.getcwd()
        except OSError:
            pass
        report = json.dumps({"error": error, "shown": shown}) if error or shown else ""
        send(number, str(code), cwd, report, json.dumps(dict(os.environ)))


__box_drive()
