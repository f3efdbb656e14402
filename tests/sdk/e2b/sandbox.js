// E2B's SDK of npm, as a user calls it.
const assert = require('node:assert')
const { Sandbox, NotFoundError, CommandExitError } = require('e2b')

async function main() {
  const sandbox = await Sandbox.create({ timeoutMs: 300_000, metadata: { from: 'node' }, envs: { A: 'x' } })
  const ran = await sandbox.commands.run('echo $A; echo err >&2')
  assert.deepEqual([ran.stdout, ran.stderr, ran.exitCode], ['x\n', 'err\n', 0])
  await assert.rejects(sandbox.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
  await sandbox.files.write('dir/ä.txt', 'hello')
  assert.equal(await sandbox.files.read('dir/ä.txt'), 'hello')
  assert.deepEqual((await sandbox.files.list('dir')).map((entry) => entry.name), ['ä.txt'])
  assert.equal(await sandbox.files.exists('nope'), false)
  await assert.rejects(sandbox.files.read('nope'), NotFoundError)
  const files = await sandbox.files.write([{ path: 'm/1', data: '1' }, { path: 'm/2', data: '2' }])
  assert.deepEqual(files.map((file) => file.path), ['/home/user/m/1', '/home/user/m/2'])

  const events = []
  const watch = await sandbox.files.watchDir('dir', (event) => events.push(`${event.type} ${event.name}`))
  await sandbox.files.write('dir/new', '1')
  while (!events.includes('write new')) await new Promise((resolve) => setTimeout(resolve, 20))
  await watch.stop()

  let output = ''
  const terminal = await sandbox.pty.create({ cols: 90, rows: 30, onData: (data) => { output += Buffer.from(data) } })
  await sandbox.pty.sendInput(terminal.pid, Buffer.from('stty size; exit\n'))
  await terminal.wait()
  assert.match(output, /30 90/)

  const background = await sandbox.commands.run('cat', { background: true, stdin: true })
  await sandbox.commands.sendStdin(background.pid, 'in')
  await background.kill()
  await assert.rejects(background.wait())

  const url = await sandbox.downloadUrl('dir/new')
  assert.equal(await (await fetch(url)).text(), '1')

  const paginator = Sandbox.list({ query: { metadata: { from: 'node' } } })
  assert.deepEqual((await paginator.nextItems()).map((item) => item.sandboxId), [sandbox.sandboxId])
  await sandbox.pause()
  assert.equal(await sandbox.isRunning(), false)
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await again.commands.run('cat dir/new')).stdout, '1')
  assert.equal(await again.kill(), true)
  await assert.rejects(again.commands.run('true'), /not running/)

  const killed = await Sandbox.create({ timeoutMs: 300_000 })
  const endless = await killed.commands.run('sleep 1000', { background: true })
  await killed.kill()
  await assert.rejects(endless.wait(), /was killed/)
  console.log('done')
}

main().catch((error) => { console.error(error); process.exit(1) })
