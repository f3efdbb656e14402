// A web page in jsdom, whose websockets and requests follow the rules of browsers: page.cjs HOST:PORT ORIGIN [TOKEN]
// Prints one line of JSON: what the page got.
const { JSDOM } = require('jsdom');

const [host, origin, token] = process.argv.slice(2);
const { window } = new JSDOM('<p>page</p>', { url: `${origin}/index.html`, pretendToBeVisual: false });
const encoded = () => window.btoa(token).replaceAll('+', '-').replaceAll('/', '_').replaceAll('=', '');
const request = (id, method) => JSON.stringify({ jsonrpc: '2.0', id, method, params: {} });

// Resolves to the selected sub-protocol and the response to a call, or to an error.
function overSocket() {
  return new Promise((done) => {
    const protocols = token ? ['box', `box.token.${encoded()}`] : ['box'];
    const socket = new window.WebSocket(`ws://${host}/rpc/ws`, protocols);
    socket.onopen = () => socket.send(request(1, 'box.list'));
    socket.onmessage = (message) => {
      done({ protocol: socket.protocol, answer: JSON.parse(message.data) });
      socket.close();
    };
    socket.onerror = () => done({ error: 'closed' });
  });
}

// Resolves to the status and the body of `POST /rpc`, or to an error.
function overHttp() {
  return new Promise((done) => {
    const call = new window.XMLHttpRequest();
    call.open('POST', `http://${host}/rpc`);
    if (token) call.setRequestHeader('Authorization', `Bearer ${token}`);
    call.setRequestHeader('Content-Type', 'application/json');
    call.onload = () => done({ status: call.status, answer: JSON.parse(call.responseText) });
    call.onerror = () => done({ error: 'not readable' });
    call.send(request(2, 'box.list'));
  });
}

async function main() {
  // jsdom reports a refused request on its console.
  window._virtualConsole.removeAllListeners();
  console.log(JSON.stringify({ socket: await overSocket(), http: await overHttp() }));
}

main().then(() => process.exit(0), (error) => {
  console.error(error);
  process.exit(1);
});
