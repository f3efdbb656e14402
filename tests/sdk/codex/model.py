"""A model on loopback, which answers with tool calls that a test has written down."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading


class Model:
    """The Responses API. Each step is the next output of the model, or a function of what the last tool said."""

    def __init__(self, steps: list):
        self.steps = list(steps)
        self.said: list[str] = []

    def answer(self, request: dict) -> dict:
        outputs = [item for item in request["input"] if item["type"].endswith("_call_output")]
        if len(outputs) > len(self.said):
            self.said.append(text_of(outputs[-1]["output"]))
        step = self.steps.pop(0) if self.steps else message("done")
        return step(self.said[-1]) if callable(step) else step

    @contextlib.contextmanager
    def serving(self):
        """Serves the model, and returns its address."""
        model = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def respond(self, kind: str, body: bytes):
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                self.respond("application/json", b'{"models": []}')

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                usage = {"input_tokens": 1, "input_tokens_details": None, "output_tokens": 1, "output_tokens_details": None, "total_tokens": 2}
                events = [
                    {"type": "response.created", "response": {"id": "r"}},
                    {"type": "response.output_item.done", "output_index": 0, "item": model.answer(request)},
                    {"type": "response.completed", "response": {"id": "r", "usage": usage}},
                ]
                lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
                self.respond("text/event-stream", "".join(lines).encode())

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            server.server_close()


def text_of(output) -> str:
    return output if isinstance(output, str) else "".join(part.get("text", "") for part in output)


def message(text: str) -> dict:
    return {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": text}]}


def tool(name: str, **arguments) -> dict:
    call = f"call-{name}-{abs(hash(json.dumps(arguments))) % 10**9}"
    return {"type": "function_call", "call_id": call, "name": name, "arguments": json.dumps(arguments)}


def run(command: str, **more) -> dict:
    return tool("exec_command", cmd=command, **more)
