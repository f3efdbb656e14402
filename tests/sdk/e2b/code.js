// E2B's code interpreter of npm.
const assert = require('node:assert')
const { Sandbox } = require('@e2b/code-interpreter')

async function main() {
  const sandbox = await Sandbox.create({ timeoutMs: 300_000 })
  const first = await sandbox.runCode('x = 1\nprint("out")\nx + 1')
  assert.equal(first.text, '2')
  assert.deepEqual(first.logs.stdout, ['out\n'])
  const failed = await sandbox.runCode('raise ValueError("no")')
  assert.deepEqual([failed.error.name, failed.error.value], ['ValueError', 'no'])
  const context = await sandbox.createCodeContext({ language: 'bash' })
  assert.deepEqual((await sandbox.runCode('pwd', { context })).logs.stdout, ['/home/user\n'])
  await sandbox.removeCodeContext(context)
  await sandbox.kill()
  console.log('done')
}

main().catch((error) => { console.error(error); process.exit(1) })
