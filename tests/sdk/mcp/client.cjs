// Lists and calls tools with a client of Node: client.cjs (old|new) (URL TOKEN | PROGRAM)
const assert = require('node:assert');

const [which, target, token] = process.argv.slice(2);
const isHttp = target.startsWith('http');

function packages() {
  if (which === 'old') {
    const { Client } = require('@modelcontextprotocol/sdk/client/index.js');
    const { StdioClientTransport } = require('@modelcontextprotocol/sdk/client/stdio.js');
    const { StreamableHTTPClientTransport } = require('@modelcontextprotocol/sdk/client/streamableHttp.js');
    return { Client, StdioClientTransport, StreamableHTTPClientTransport };
  }
  const { Client, StreamableHTTPClientTransport } = require('@modelcontextprotocol/client');
  const { StdioClientTransport } = require('@modelcontextprotocol/client/stdio');
  return { Client, StdioClientTransport, StreamableHTTPClientTransport };
}

async function eventually(condition, what) {
  for (let tries = 0; tries < 300; tries += 1) {
    if (await condition()) return;
    await new Promise((done) => setTimeout(done, 200));
  }
  throw new Error(what);
}

async function main() {
  const { Client, StdioClientTransport, StreamableHTTPClientTransport } = packages();
  const options = which === 'new' ? { versionNegotiation: { mode: 'auto' } } : {};
  const client = new Client({ name: 'test', version: '1' }, options);
  const requestInit = { headers: { Authorization: `Bearer ${token}` } };
  const transport = isHttp
    ? new StreamableHTTPClientTransport(new URL(target), { requestInit })
    : new StdioClientTransport({ command: target, args: ['mcp'], env: process.env });
  await client.connect(transport);
  const send = (name, args = {}, options = {}) =>
    which === 'new'
      ? client.callTool({ name, arguments: args }, options)
      : client.callTool({ name, arguments: args }, undefined, options);
  const called = new Set();
  const call = async (name, args, options) => {
    called.add(name);
    const result = await send(name, args, options);
    assert.ok(!result.isError, JSON.stringify(result));
    return { ...result.structuredContent, said: result.content[0].text };
  };

  const listed = (await client.listTools()).tools.map((tool) => tool.name);
  const box = (await call('run', { command: 'echo hello' })).box;
  const progress = [];
  const ran = await call('run', { command: 'seq 1 50000; echo end; sleep 3' }, { onprogress: (note) => progress.push(note) });
  assert.ok(progress.some((note) => note.message === 'end'), JSON.stringify(progress));
  let output = '';
  for (let at = 0; ; ) {
    const read = await call('read_output', { command: ran.command, from: at });
    output += read.output;
    at = read.next;
    if (at === ran.next) break;
  }
  const whole = Array.from({ length: 50000 }, (_, index) => `${index + 1}\n`).join('') + 'end\n';
  assert.strictEqual(output, whole);

  const cat = await call('run', { command: 'cat', input: true, wait_s: 0 });
  await call('send_input', { command: cat.command, text: 'typed' });
  assert.ok(!(await call('stop', { command: cat.command })).running);
  assert.match((await call('run_code', { code: '6 * 7' })).values, /42/);
  await call('write_file', { path: 'a.txt', content: 'one two' });
  await call('edit_file', { path: 'a.txt', old: 'two', new: '2' });
  assert.match((await call('read_file', { path: 'a.txt' })).said, /^1\tone 2\n/);
  assert.strictEqual((await call('find_files', { pattern: 'a.*' })).files.length, 1);
  assert.strictEqual((await call('search_files', { pattern: 'one', glob: 'a.*' })).matches, 1);
  assert.ok((await call('list_files')).files.length > 0);
  await call('checkpoint');
  await call('rollback');
  const made = [(await call('create_box', {})).box, (await call('fork')).boxes[0].box];
  assert.strictEqual((await call('list_boxes')).default, box);
  for (const name of made) await call('delete_box', { box: name });
  if (isHttp) assert.match((await call('share_port', { port: 80 })).url, /^http/);
  assert.deepStrictEqual([...called].sort(), listed.sort());

  const abort = new AbortController();
  const beat = 'beat() { while :; do date +%s%N > $1; sleep 0.1; done; }; beat x & beat y';
  const cancelled = send('run', { command: beat, wait_s: 600 }, { signal: abort.signal, timeout: 250000 });
  cancelled.catch(() => {});
  const beats = async () => (await call('run', { command: 'cat x y 2>&1' })).output;
  await eventually(async () => !(await beats()).includes('No such file'), 'both processes run');
  abort.abort();
  await assert.rejects(cancelled);
  await eventually(async () => {
    const before = await beats();
    await new Promise((done) => setTimeout(done, 2000));
    return before === (await beats());
  }, 'both processes are gone');
  if (isHttp) await call('delete_box', { box });
  await client.close();
  console.log('all tools called');
}

main().then(() => process.exit(0), (error) => {
  console.error(error);
  process.exit(1);
});
