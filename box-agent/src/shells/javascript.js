(() => {
  const fs = require("fs"), net = require("net"), util = require("util"), vm = require("vm");
  const { Console } = require("console"), { Writable } = require("stream");
  const { O_RDONLY, O_WRONLY, O_RDWR, O_NONBLOCK } = fs.constants;
  const home = process.argv[1];
  process.argv.splice(1);
  Object.assign(globalThis, { require, module, exports });
  const path = (name) => home + "/" + name;
  const load = (name) => JSON.parse(fs.readFileSync(path(name), "utf8"));
  const write = (fd, bytes) => {
    for (let rest = Buffer.from(bytes); rest.length; ) rest = rest.subarray(fs.writeSync(fd, rest));
  };
  const stream = (fd) =>
    Object.assign(
      new Writable({
        decodeStrings: true,
        write(chunk, _, done) {
          try { write(fd, chunk); done(); } catch (error) { done(error); }
        },
      }),
      { fd, isTTY: false },
    );
  const out = stream(1), err = stream(2);
  for (const broken of [out, err]) broken.on("error", () => {});
  let input = null;
  const own = { stdout: () => out, stderr: () => err, stdin: () => (input ??= fs.createReadStream(null, { fd: 0, autoClose: false })) };
  for (const [name, get] of Object.entries(own)) Object.defineProperty(process, name, { get, configurable: true });
  globalThis.console = new Console({ stdout: out, stderr: err });

  // open() returns the lowest free descriptor.
  const join = (names) => {
    [0, 1, 2].forEach((fd) => fs.closeSync(fd));
    names.forEach((name, fd) => fs.openSync(name, fd ? O_WRONLY : O_RDONLY));
    input = null;
  };
  const describe = (raised) => {
    const stack = String(raised?.stack ?? raised);
    err.write(stack + "\n");
    const truncate = (text, limit) => text.length <= limit ? text : text.slice(0, limit) + " [truncated]";
    return { name: truncate(String(raised?.name ?? typeof raised), 200), value: truncate(String(raised?.message ?? raised), 16000),
      traceback: stack.split("\n").slice(-100).map(line => truncate(line, 2000)) };
  };

  // The method name of notebooks, so that the same objects display here.
  let shown = [], room = 0;
  const show = (value) => {
    let bundle = { "text/plain": util.inspect(value) };
    try {
      const made = value?.[Symbol.for("Jupyter.display")]?.() ?? {};
      for (const [kind, data] of Object.entries(made)) bundle[kind] = typeof data === "string" ? data : JSON.stringify(data) ?? "";
    } catch {}
    const size = () => Object.values(bundle).reduce((sum, data) => sum + data.length, 0);
    if (size() > room) bundle = { "text/plain": bundle["text/plain"].slice(0, 1000) + " [truncated]" };
    room -= size();
    shown.push(bundle);
  };
  globalThis.display = (...values) => values.forEach(show);

  if (fs.existsSync(path("state"))) {
    for (const name of Object.keys(process.env)) delete process.env[name];
    Object.assign(process.env, load("state"));
  }
  let interrupt = () => {}, failed = null;
  process.on("SIGINT", () => interrupt(new Error("interrupted")));
  const onUncaught = (raised) => (failed ? failed(raised) : describe(raised));
  process.on("uncaughtException", onUncaught);
  process.on("unhandledRejection", onUncaught);
  let cwd = process.cwd();

  const send = (...fields) => {
    const done = fs.openSync(path("done"), O_WRONLY);
    write(done, fields.map((field) => field + "\0").join(""));
    fs.closeSync(done);
  };
  const run = async (number, mode, stdin) => {
    join([path("in"), path("out"), path("err")]);
    if (stdin === "open") send(number, "begun", "", "", "");
    let code = 0, error = null, settings = null, before = {};
    shown = [];
    room = 250000;
    try {
      if (mode === "set") {
        settings = load("before");
        for (const name of Object.keys(settings.env)) before[name] = process.env[name];
        Object.assign(process.env, settings.env);
        if (settings.cwd) process.chdir(settings.cwd);
      }
      const stopped = new Promise((_, reject) => (interrupt = failed = reject));
      stopped.catch(() => {});
      const text = fs.readFileSync(path("text"), "utf8");
      let value = vm.runInThisContext(text, { filename: `<run ${number}>`, breakOnSigint: true });
      if (typeof value?.then === "function") value = await Promise.race([value, stopped]);
      if (value !== undefined) show(value);
    } catch (raised) {
      code = 1;
      error = describe(raised);
    }
    interrupt = () => {};
    failed = null;
    join(["/dev/null", "/dev/null", "/dev/null"]);
    for (const [name, value] of Object.entries(before)) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
    if (settings?.cwd) process.chdir(cwd);
    try { cwd = process.cwd(); } catch {}
    const report = error || shown.length ? JSON.stringify({ error, shown }) : "";
    send(number, code, cwd, report, JSON.stringify(process.env));
  };

  let line = "", turn = Promise.resolve();
  const go = new net.Socket({ fd: fs.openSync(path("go"), O_RDWR | O_NONBLOCK), writable: false });
  go.on("data", (bytes) => {
    line += bytes;
    for (let end; (end = line.indexOf("\n")) >= 0; line = line.slice(end + 1)) {
      const [number, mode, stdin] = line.slice(0, end).split(" ");
      turn = turn.then(() => run(number, mode, stdin));
    }
  });
})();
