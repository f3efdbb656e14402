// Drives the package for Node against the server that the environment names.
import assert from "node:assert/strict";
import { ConnectionConfig, Sandbox, SandboxManager } from "@alibaba-group/opensandbox";

const connectionConfig = new ConnectionConfig({
  domain: process.env.DOMAIN,
  apiKey: process.env.API_KEY,
  protocol: "http",
  useServerProxy: Boolean(process.env.PROXY),
});
const sandbox = await Sandbox.create({ connectionConfig, image: "host", timeoutSeconds: 300, metadata: { from: "node" } });
try {
  const info = await sandbox.getInfo();
  assert.equal(info.status.state, "Running");
  assert.equal(await sandbox.isHealthy(), true);

  const run = await sandbox.commands.run("echo out; echo err >&2; exit 7");
  assert.deepEqual(run.logs.stdout.map((line) => line.text), ["out"]);
  assert.deepEqual(run.logs.stderr.map((line) => line.text), ["err"]);
  assert.equal(run.error.value, "7");
  const seen = [];
  await sandbox.commands.run("echo a; echo b", undefined, { onStdout: (line) => { seen.push(line.text); } });
  assert.deepEqual(seen, ["a", "b"]);

  const bytes = new Uint8Array(3_000_000).map((_, at) => (at * 7) % 256);
  await sandbox.files.writeFiles([
    { path: "/tmp/node/text", data: "hello", mode: 644 },
    { path: "/tmp/node/bytes", data: bytes },
  ]);
  assert.equal(await sandbox.files.readFile("/tmp/node/text"), "hello");
  assert.deepEqual(new Uint8Array(await sandbox.files.readBytes("/tmp/node/bytes")), bytes);
  const found = await sandbox.files.search({ path: "/tmp/node", pattern: "t*" });
  assert.deepEqual(found.map((file) => file.path), ["/tmp/node/text"]);
  const stat = await sandbox.files.getFileInfo(["/tmp/node/text"]);
  assert.equal(stat["/tmp/node/text"].mode, 644);
  await sandbox.files.moveFiles([{ src: "/tmp/node/text", dest: "/tmp/node/new/text" }]);
  await sandbox.files.replaceContents([{ path: "/tmp/node/new/text", oldContent: "hello", newContent: "bye" }]);
  assert.equal(await sandbox.files.readFile("/tmp/node/new/text"), "bye");
  await sandbox.files.deleteFiles(["/tmp/node/new/text"]);
  await sandbox.files.deleteDirectories(["/tmp/node"]);

  const session = await sandbox.commands.createSession();
  await sandbox.commands.runInSession(session, "cd /tmp; export KEPT=1");
  const kept = await sandbox.commands.runInSession(session, "pwd; echo $KEPT");
  assert.deepEqual(kept.logs.stdout.map((line) => line.text), ["/tmp", "1"]);
  await sandbox.commands.deleteSession(session);

  const metrics = await sandbox.getMetrics();
  assert.ok(metrics.memoryTotalMiB > 0);
  await sandbox.renew(600);

  const manager = SandboxManager.create({ connectionConfig });
  const listed = await manager.listSandboxInfos({ metadata: { from: "node" } });
  assert.ok(listed.items.some((item) => item.id === sandbox.id));
  await sandbox.pause();
  const resumed = await sandbox.resume();
  const again = await resumed.commands.run("echo resumed");
  assert.equal(again.logs.stdout[0].text, "resumed");
} finally {
  await sandbox.kill();
  await sandbox.close();
}
await assert.rejects(Sandbox.connect({ connectionConfig, sandboxId: sandbox.id }));
console.log("all passed");
