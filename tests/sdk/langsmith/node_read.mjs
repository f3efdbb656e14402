// Reads the output of a command over connections that break. Prints its size with each piece, and then what arrived as
// JSON.
import { createHash } from "node:crypto";
import { createRequire } from "node:module";

const require = createRequire(`${process.env.NODE_PATH}/`);
const { CommandHandle, SandboxClient } = require("langsmith/sandbox");

const [endpoint, apiKey, name, command, backoff] = process.argv.slice(2);
if (backoff) CommandHandle.BACKOFF_BASE = Number(backoff);
const client = new SandboxClient({ apiEndpoint: endpoint, apiKey });
const box = await client.getSandbox(name);
const handle = await box.run(command, { wait: false, timeout: 0 });
const hashes = { stdout: createHash("sha256"), stderr: createHash("sha256") };
const sizes = { stdout: 0, stderr: 0 };
let isExact = true;
for await (const chunk of handle) {
  // Each chunk begins where the one before has ended.
  isExact = isExact && chunk.offset === sizes[chunk.stream];
  const bytes = Buffer.from(chunk.data);
  sizes[chunk.stream] += bytes.length;
  hashes[chunk.stream].update(bytes);
  console.log(sizes.stdout + sizes.stderr);
}
const { exit_code: exit } = await handle.result;
const digests = { stdout: hashes.stdout.digest("hex"), stderr: hashes.stderr.digest("hex") };
console.log(JSON.stringify({ isExact, exit, ...digests }));
