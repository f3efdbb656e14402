"""LangSmith: `run` runs `true` in one sandbox, `stream` reads 8 MiB of output as it comes."""

from langsmith.sandbox import SandboxClient

BYTES = 8 << 20
TEXT = f"yes 'a line of text, as programs write it: 0123456789' | head -c {BYTES}"


def actions(url: str) -> dict:
    client = SandboxClient(api_endpoint=f"{url}/v2/sandboxes", api_key="bench")
    kept = []

    def start():
        kept.append(client.create_sandbox())

    def run():
        assert kept[0].run("true").exit_code == 0

    def stream():
        handle = kept[0].run(TEXT, wait=False)
        came = sum(len(chunk.data) for chunk in handle if chunk.stream == "stdout")
        assert came == BYTES, came

    return {"start": start, "run": run, "stream": stream}
