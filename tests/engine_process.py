"""A program that stands in for `llama-server`: started like it, it answers like it, as fast as its options say.

    python engine_process.py --model plain.gguf [--spec-type KIND ...] --metrics --port 8080

It imports only what comes with Python, so it is up in a moment. It starts a child process, as servers do. Tokens are
those of a fixed text. A step takes ``STEP_S`` and ``DRAFT_S`` for each draft token; of the draft tokens of a step, the
first ``--good N`` (4) are accepted; those of n-grams never are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STEP_S, DRAFT_S = 0.002, 0.0001

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--model", required=True)
parser.add_argument("--spec-type", default="")
parser.add_argument("--spec-draft-n-max", type=int)
parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
parser.add_argument("--spec-ngram-simple-size-m", type=int)
parser.add_argument("--spec-ngram-mod-n-max", type=int)
parser.add_argument("--good", type=int, default=4)
parser.add_argument("--alone", help="A file; while it is there, no other server starts.")
parser.add_argument("--broken", default="", help="The kind of drafts with which it does not start.")
asked, _ = parser.parse_known_args()
gamma = asked.spec_draft_n_max or asked.spec_ngram_simple_size_m or asked.spec_ngram_mod_n_max or 0
good = 0 if asked.spec_type.startswith("ngram") else min(asked.good, gamma)
counters = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
accepted_at = [0] * gamma


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics":
            lines = [f"llamacpp:spec_decode_num_{name}_total {count}" for name, count in counters.items()]
            name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{position="{at}"}} {count}' for at, count in enumerate(accepted_at)]
            self.whole("\n".join(lines) if gamma else "\n")
        elif self.path == "/v1/models":
            self.whole(json.dumps({"object": "list", "data": [{"id": "model", "owned_by": "llamacpp"}]}))
        else:
            self.whole('{"status": "ok"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        done, wanted = 0, int(body["max_tokens"])
        while done < wanted:
            tokens = min(1 + (good if done else 0), wanted - done)
            time.sleep(STEP_S + (DRAFT_S * gamma if done else 0.0))
            if done and gamma:
                counters["drafts"] += 1
                counters["draft_tokens"] += gamma
                counters["accepted_tokens"] += tokens - 1
                for at in range(tokens - 1):
                    accepted_at[at] += 1
            for number in range(tokens):
                self.event({"choices": [{"index": 0, "delta": {"content": f"w{done + number} "}}]})
            done += tokens
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": done}})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def event(self, data: object) -> None:
        text = f"data: {json.dumps(data)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

    def whole(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


if asked.broken and asked.spec_type == asked.broken:
    sys.exit("error: this kind of drafts is not supported")
if asked.alone:
    try:
        os.close(os.open(asked.alone, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        sys.exit("error: out of memory")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
try:
    ThreadingHTTPServer(("127.0.0.1", asked.port), Handler).serve_forever()
finally:
    if asked.alone:
        with contextlib.suppress(OSError):
            Path(asked.alone).unlink()
