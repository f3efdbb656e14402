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
  const truncate = (text, limit) => text.length <= limit ? text : text.slice(0, limit) + " [truncated]";
  const describe = (raised) => {
    const lines = String(raised?.stack ?? raised).split("\n");
    // The last frames are those of the driver.
    const driver = lines.findIndex((line) => /^ +at .*(\[eval\]|node:(inspector|vm):)/.test(line));
    const stack = (driver < 0 ? lines : lines.slice(0, driver)).join("\n");
    err.write(stack + "\n");
    return { name: truncate(String(raised?.name ?? typeof raised), 200), value: truncate(String(raised?.message ?? raised), 16000),
      traceback: stack.split("\n").slice(-100).map(line => truncate(line, 2000)) };
  };

  // The method name of notebooks, so that the same objects display here.
  // Displayed values: at most 10 MiB as JSON. The largest formats of a value beyond most of it are omitted, and values
  // beyond all of it dropped.
  const LIMIT = 10 * 2 ** 20 - 8192, RESERVE = 2 ** 16;
  let shown = [], dropped = 0, room = 0;
  const show = (value, main) => {
    // Other values show the first part of their strings.
    const whole = typeof value === "string" ? { maxStringLength: Infinity } : {};
    const data = { "text/plain": util.inspect(value, whole) };
    try {
      const made = value?.[Symbol.for("Jupyter.display")]?.() ?? {};
      for (const [kind, one] of Object.entries(made)) data[kind] = typeof one === "string" ? one : JSON.stringify(one) ?? "";
    } catch {}
    const size = (one = data) => Buffer.byteLength(JSON.stringify(one)) + 64;
    const omitted = [], sizes = Object.entries(data).map(([kind, one]) => [size(one), kind]).sort((a, b) => a[0] - b[0]);
    while (size() > room && sizes.length) {
      const [, kind] = sizes.pop();
      if (kind === "text/plain") {
        data[kind] = truncate(data[kind], 1000);
      } else {
        omitted.push(kind);
        delete data[kind];
      }
    }
    if (omitted.length) {
      const note = `[${omitted.join(", ").slice(0, 1000)} omitted: the values of a run have at most 10 MiB]`;
      data["text/plain"] = [data["text/plain"], note].filter(Boolean).join("\n");
    }
    if (size() > room + RESERVE && !main) return void dropped++;
    room -= size();
    shown.push({ data, main });
  };
  globalThis.display = (...values) => values.forEach((value) => show(value, false));

  const modules = vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER;
  const importModule = (name) => vm.runInThisContext("(name) => import(name)", { importModuleDynamically: modules })(name);
  // V8's own mode for consoles accepts `await` outside of functions. Only texts that need it pay for it.
  let inspector = null, taken;
  const evaluate = async (text) => {
    if (!inspector) {
      inspector = new (require("inspector").Session)();
      inspector.connect();
      Object.defineProperty(globalThis, "__box_take", { value: (value) => { taken = value; } });
      Object.defineProperty(globalThis, "__box_import", { value: importModule });
    }
    const post = (method, params) =>
      new Promise((done, failed) => inspector.post(method, params, (error, made) => (error ? failed(error) : done(made))));
    const take = (one) => post("Runtime.callFunctionOn", {
      functionDeclaration: "function (value) { __box_take(value); }",
      arguments: [one.objectId ? { objectId: one.objectId } : one.unserializableValue ? { unserializableValue: one.unserializableValue } : { value: one.value }],
      executionContextId: 1,
    });
    // V8 does not resolve modules in this mode.
    const expression = text.replace(/\bimport\s*\(/g, "__box_import(");
    const made = await post("Runtime.evaluate", { expression, replMode: true, awaitPromise: true, objectGroup: "run" });
    taken = undefined;
    await take(made.exceptionDetails?.exception ?? made.result);
    await post("Runtime.releaseObjectGroup", { objectGroup: "run" });
    const value = taken;
    taken = undefined;
    if (made.exceptionDetails) throw value;
    return value;
  };
  const needsAwait = (text) => {
    if (!/\bawait\b/.test(text)) return false;
    try { new vm.Script(text); } catch (error) { return error instanceof SyntaxError; }
    return false;
  };

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
    dropped = 0;
    room = LIMIT - RESERVE;
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
      const options = { filename: `<run ${number}>`, breakOnSigint: true, importModuleDynamically: modules };
      let value = needsAwait(text) ? evaluate(text) : vm.runInThisContext(text, options);
      if (typeof value?.then === "function") value = await Promise.race([value, stopped]);
      if (value !== undefined) show(value, true);
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
    if (settings?.cwd && !settings.stays) process.chdir(cwd);
    try { cwd = process.cwd(); } catch {}
    if (dropped) shown.push({ data: { "text/plain": `[${dropped} more values omitted]` }, main: false });
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
