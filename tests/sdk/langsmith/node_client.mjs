// Uses the methods of LangSmith's client for Node that the gateway serves, and prints what it saw as JSON.
import { createRequire } from "node:module";

const require = createRequire(`${process.env.NODE_PATH}/`);
const { SandboxClient } = require("langsmith/sandbox");

const [endpoint, apiKey] = process.argv.slice(2);
const client = new SandboxClient({ apiEndpoint: endpoint, apiKey });
const seen = {};
const box = await client.createSandbox({ timeout: 120 });
try {
  seen.status = box.status;
  const done = await box.run("echo out; echo err >&2; exit 3");
  seen.run = [done.stdout, done.stderr, done.exit_code];
  const parts = [];
  const handle = await box.run("for i in 1 2 3; do echo $i; done", { wait: false });
  for await (const chunk of handle) parts.push([chunk.stream, chunk.data, chunk.offset]);
  seen.text = parts.map((part) => part[1]).join("");
  seen.exit = (await handle.result).exit_code;
  const again = await box.reconnect(handle.commandId, { stdoutOffset: 2 });
  let rest = "";
  for await (const chunk of again) rest += chunk.data;
  seen.rest = rest;
  const callbacks = [];
  await box.run("echo called", { onStdout: (text) => callbacks.push(text) });
  seen.callbacks = callbacks.join("");
  const typed = await box.run("read line; echo got $line", { wait: false, closeInput: false });
  await typed.sendInput("input\n");
  seen.input = (await typed.result).stdout;
  await box.write("/tmp/node.txt", "from node \u00fc");
  seen.read = new TextDecoder().decode(await box.read("/tmp/node.txt"));
  const killed = await box.run("sleep 1000", { wait: false });
  await killed.kill();
  const after = await box.reconnect(killed.commandId);
  seen.killed = (await after.result).exit_code;
  try {
    await box.run("sleep 100", { timeout: 1 });
  } catch (error) {
    seen.timeout = error.name;
  }
  try {
    await box.read("/tmp/none");
  } catch (error) {
    seen.missing = error.name;
  }
  const terminal = await box.run("tty", { pty: true });
  seen.pty = terminal.stdout.startsWith("/dev/pts/");
  await box.write("/tmp/dir/x.txt", "0123456789\nneedle\n");
  seen.stat = (await box.stat("/tmp/dir/x.txt")).size_bytes;
  const range = await box.readRange("/tmp/dir/x.txt", { start: 2, end: 4 });
  seen.range = new TextDecoder().decode(range.content);
  const paths = (found) => (found.matches ?? found.entries ?? found).map((entry) => entry.path.split("/").pop());
  seen.glob = paths(await box.glob("**/*.txt", "/tmp/dir"));
  seen.ls = paths(await box.ls("/tmp/dir"));
  seen.grep = paths(await box.grep("needle", "/tmp/dir"));
  const link = await box.generateDownloadURL("/tmp/dir/x.txt");
  seen.link = (await (await fetch(link.downloadUrl ?? link.download_url)).text()).length;
  await box.write("/tmp/web/index.html", "<p>hello</p>");
  await box.run("cd /tmp/web && exec python3 -m http.server 8200", { wait: false, timeout: 0, idleTimeout: -1 });
  await box.run("until (exec 3<>/dev/tcp/127.0.0.1/8200) 2>/dev/null; do sleep 0.1; done");
  const service = await client.serviceUrl(box.name, { port: 8200 });
  const page = await fetch(await service.browserUrl());
  const refused = await fetch(`${await service.serviceUrl()}/index.html`);
  seen.service = [page.status, await page.text(), refused.status];
  seen.state = (await client.getSandboxStatus(box.name)).status;
  await box.stop();
  seen.stopped = (await client.getSandbox(box.name)).status;
  seen.started = (await client.startSandbox(box.name, { timeout: 120 })).status;
  seen.waited = (await client.waitForSandbox(box.name)).status;
  const other = `node-other-${process.pid}`;
  const changed = await client.updateSandbox(box.name, { newName: other, runConfig: { env_vars: { A: "1" } } });
  seen.renamed = changed.name === other;
  seen.env = (await changed.run("echo $A")).stdout;
  await client.updateSandbox(other, { newName: box.name });
  const built = await client.createSnapshot(`node-image-${process.pid}`, "host", 1 << 30);
  seen.built = built.status;
  seen.found = (await client.getSnapshot(`node-image-${process.pid}`)).id === built.id;
  seen.snapshots = (await client.listSnapshots({ nameContains: `node-image-${process.pid}` })).length;
  await client.deleteSnapshot(built.id);
  const name = `node-${process.pid}`;
  const snapshot = await client.captureSnapshot(box.name, name);
  seen.snapshot = snapshot.status;
  const copy = await client.createSandbox(snapshot.id, { timeout: 120 });
  seen.copy = (await copy.run("cat /tmp/node.txt")).stdout;
  await client.deleteSandbox(copy.name);
  await client.deleteSnapshot(snapshot.id);
  seen.listed = (await client.listSandboxes()).some((other) => other.name === box.name);
} finally {
  await client.deleteSandbox(box.name);
}
try {
  await client.getSandbox(box.name);
} catch (error) {
  seen.gone = error.name;
}
console.log(JSON.stringify(seen));
