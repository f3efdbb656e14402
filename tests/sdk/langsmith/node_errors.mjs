// Makes calls that fail, and prints the names of their errors as JSON.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const require = createRequire(`${process.env.NODE_PATH}/`);
const { CommandHandle, SandboxClient } = require("langsmith/sandbox");

const [endpoint, apiKey, name, ...cases] = process.argv.slice(2);
const client = new SandboxClient({ apiEndpoint: endpoint, apiKey, maxRetries: 0 });
const printed = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const unknown = "no-such-box";
const calls = {
  key: () => new SandboxClient({ apiEndpoint: endpoint, apiKey: "wrong" }).listSandboxes(),
  path: () => new SandboxClient({ apiEndpoint: `${endpoint}/other`, apiKey }).listSandboxes(),
  field: () => client.createSandbox({ runConfig: { user: "root" } }),
  name: async () => {
    const other = await client.createSandbox({ timeout: 120 });
    try {
      await client.updateSandbox(other.name, { newName: name });
    } finally {
      await client.deleteSandbox(other.name);
    }
  },
  late: () => client.createSandbox({ timeout: 0 }),
  create: () => client.createSandbox({ timeout: 120 }),
  snapshot: () => client.createSnapshot(`${name}-s`, "127.0.0.1:9/none/none:1", 1 << 30),
  get: () => client.getSandbox(unknown),
  stop: () => client.stopSandbox(unknown),
  delete: () => client.deleteSandbox(unknown),
  read: async () => (await client.getSandbox(name)).read("/etc/hostname"),
  directory: async () => (await client.getSandbox(name)).read("/tmp"),
  file: async () => (await client.getSandbox(name)).read("/tmp/none"),
  command: async () => (await client.getSandbox(name)).run("true", { cwd: "/nowhere" }),
  timeout: async () => (await client.getSandbox(name)).run("sleep 100", { timeout: 1 }),
  unknown: async () => (await (await client.getSandbox(name)).reconnect("no-such-command")).result,
  // The server ends now, and its next line of input says so.
  gone: async () => {
    CommandHandle.BACKOFF_BASE = 0.001;
    const box = await client.getSandbox(name);
    const handle = await box.run("exec sleep 4444", { wait: false, timeout: 0 });
    console.log("ready");
    await printed.next();
    try {
      await handle.result;
    } catch (error) {
      seen.lost = [error.name, error.message.match(/\d+ times/)?.[0]];
    }
    await box.run("true");
  },
};
const seen = {};
for (const one of cases) {
  try {
    await calls[one]();
    seen[one] = "no error";
  } catch (error) {
    const details = [error.resourceType, error.errorType, error.operation, error.field, error.quotaType];
    seen[one] = [error.name, ...details.filter(Boolean)];
  }
}
console.log(JSON.stringify(seen));
process.exit(0);
