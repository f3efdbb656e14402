// ComputeSDK with its E2B provider: create, run, destroy.
const assert = require('node:assert')
const { e2b } = require('@computesdk/e2b')

async function main() {
  const compute = e2b({ apiKey: process.env.E2B_API_KEY })
  const sandbox = await compute.sandbox.create()
  const ran = await sandbox.runCommand('echo hello')
  assert.equal(ran.stdout.trim(), 'hello')
  await sandbox.filesystem.writeFile('/tmp/f', 'x')
  assert.equal(await sandbox.filesystem.readFile('/tmp/f'), 'x')
  await sandbox.destroy()
  console.log('done')
}

main().catch((error) => { console.error(error); process.exit(1) })
