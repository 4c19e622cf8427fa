"""An OpenAI server inside a Python program, and a request to it; needs the extra `serve`."""

import json
import socket
import threading
import urllib.request
from typing import Any

from specbench import load_drafter, load_target
from specbench.recipe import Recipe
from specbench.serve.engine import Engine
from specbench.serve.server import Server
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model


def main() -> dict[str, Any]:
    target = load_target("smollm2-135m")
    engine = Engine(target, load_drafter("lookup", target), max_batch=4, max_waiting=16, pool_tokens=None)
    listening = socket.create_server(("127.0.0.1", 0))  # a free port
    recipe = Recipe(parse_model("smollm2-135m"), parse_drafter("lookup"))
    server = Server(engine, recipe, listening)
    thread = threading.Thread(target=server.run)
    thread.start()
    question = {
        "model": target.name,
        "messages": [{"role": "user", "content": "Count from 1 to 20."}],
        "max_tokens": 24,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{listening.getsockname()[1]}/v1/chat/completions",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer: dict[str, Any] = json.load(reply)
    finally:
        server.should_exit = True
        thread.join()
    print(answer["choices"][0]["message"]["content"])
    print(answer["usage"])
    return answer


if __name__ == "__main__":
    main()
