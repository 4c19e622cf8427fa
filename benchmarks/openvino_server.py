"""OpenVINO GenAI as a server of the OpenAI protocol, which it has none of its own.

    python benchmarks/openvino_server.py --model FOLDER --port 8080
    python benchmarks/openvino_server.py --model FOLDER --draft-model FOLDER --num-assistant-tokens 4 --port 8080
    python benchmarks/openvino_server.py --model FOLDER --max-ngram-size 3 --num-assistant-tokens 4 --port 8080
    python benchmarks/race.py ... --side "openvino=PYTHON benchmarks/openvino_server.py --model FOLDER --port {port}"

Needs nothing but `pip install openvino-genai` and folders in OpenVINO's format (`optimum-cli export openvino`). Answers
are greedy and streamed, and requests share forward passes (continuous batching); prompts are not cached.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Engine:
    """A pipeline in a thread of its own, which takes requests and hands out their tokens as they come."""

    def __init__(self, given: argparse.Namespace) -> None:
        import openvino_genai

        self._genai = openvino_genai
        self._given = given
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": given.threads} if given.threads else {}
        if given.draft_model:
            properties["draft_model"] = openvino_genai.draft_model(given.draft_model, "CPU")
        elif given.max_ngram_size:
            properties["prompt_lookup"] = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(given.model, scheduler, "CPU", properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._new: queue.Queue[tuple[str, Any, queue.Queue[list[int] | None]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def tokens(self, prompt: str, length: int, ignore_eos: bool) -> Iterator[list[int]]:
        """Yield new tokens of a request as they come."""
        config = self._genai.GenerationConfig(max_new_tokens=length, ignore_eos=ignore_eos)
        config.apply_chat_template = False
        if self._given.num_assistant_tokens:
            config.num_assistant_tokens = self._given.num_assistant_tokens
        if self._given.max_ngram_size and not self._given.draft_model:
            config.max_ngram_size = self._given.max_ngram_size
        came: queue.Queue[list[int] | None] = queue.Queue()
        self._new.put((prompt, config, came))
        while (ids := came.get()) is not None:
            yield ids

    def _run(self) -> None:
        running: list[tuple[Any, queue.Queue[list[int] | None]]] = []
        number = 0
        while True:
            while not self._new.empty() or not running:
                prompt, config, came = self._new.get()
                number += 1
                running.append((self._pipeline.add_request(number, prompt, config), came))
            self._pipeline.step()
            status = self._genai.GenerationStatus.RUNNING
            for handle, came in running.copy():
                ended = handle.get_status() != status
                while handle.can_read():
                    for output in handle.read().values():
                        came.put(list(output.generated_ids))
                if ended:
                    came.put(None)
                    running.remove((handle, came))


class Handler(BaseHTTPRequestHandler):
    """The model's name, completions and chat, always as a stream."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Write no line for each request."""

    def do_GET(self) -> None:
        """List the model; nothing else is there to read."""
        found = self.path == "/v1/models"
        body = json.dumps({"data": [{"id": "m", "object": "model", "owned_by": "openvino"}]} if found else {})
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        """Answer a request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokenizer, chat = self.engine.tokenizer, "messages" in body
        prompt = tokenizer.apply_chat_template(body["messages"], True) if chat else body["prompt"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        ids: list[int] = []
        said = ""
        for new in self.engine.tokens(prompt, body["max_tokens"], body.get("ignore_eos", False)):
            ids += new
            text = tokenizer.decode(ids)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                piece, said = text[len(said) :], text
                self._send({"delta": {"content": piece}} if chat else {"text": piece})
        reason = "length" if len(ids) >= body["max_tokens"] else "stop"
        self._send({**({"delta": {}} if chat else {"text": ""}), "finish_reason": reason})
        read = tokenizer.encode(prompt).input_ids.shape[1]
        usage = {"prompt_tokens": read, "completion_tokens": len(ids), "total_tokens": read + len(ids)}
        self._event(json.dumps({"choices": [], "usage": usage}))
        self._event("[DONE]")
        self.close_connection = True

    def _send(self, choice: dict[str, Any]) -> None:
        self._event(
            json.dumps({"created": int(time.time()), "model": "m", "choices": [{"index": 0, **choice}]})
        )

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()


def main(arguments: Sequence[str]) -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--num-assistant-tokens", type=int, default=0)
    parser.add_argument("--max-ngram-size", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args(arguments)
    Handler.engine = Engine(given)
    print(f"The server listens at http://127.0.0.1:{given.port}/v1", flush=True)
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
