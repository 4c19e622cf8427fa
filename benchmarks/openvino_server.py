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
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from engine_server import serve


class OpenVino:
    """A pipeline in a thread of its own, which takes requests and hands out their tokens as they come."""

    name = "openvino"

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
        self._tokenizer = self._pipeline.get_tokenizer()
        self._new: queue.Queue[tuple[str, Any, queue.Queue[list[int] | None]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def chat(self, messages: Sequence[Any]) -> str:
        """Return the prompt of a conversation by the model's template."""
        return str(self._tokenizer.apply_chat_template(messages, True))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [int(each) for each in self._tokenizer.encode(text).input_ids.data[0]]

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(ids))

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
    serve(OpenVino(given), given.port)


if __name__ == "__main__":
    main(sys.argv[1:])
