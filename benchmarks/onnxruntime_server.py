"""ONNX Runtime GenAI as a server of the OpenAI protocol, which it has none of its own.

    python benchmarks/onnxruntime_server.py --model FOLDER --port 8080
    python benchmarks/onnxruntime_server.py --model FOLDER --ngram-size 3 --max-draft-tokens 4 --port 8080
    python benchmarks/race.py ... --side "ort=PYTHON benchmarks/onnxruntime_server.py --model FOLDER --port {port}"

Needs nothing but `pip install onnxruntime-genai` and a folder in its format (`python -m
onnxruntime_genai.models.builder -p int4 -e cpu`). Answers are greedy and streamed. Requests share forward passes; with
n-grams, which the engine's batches do not take on a CPU, they are answered one after the other. `ignore_eos` masks end
tokens, since the engine has nothing that continues after them.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from engine_server import serve


class OnnxRuntime:
    """A model, with a thread of its own that runs the engine's batches."""

    name = "onnxruntime"

    def __init__(self, given: argparse.Namespace) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        self._ngrams = {"ngram_size": given.ngram_size, "max_draft_tokens": given.max_draft_tokens}
        self._model = onnxruntime_genai.Model(given.model)
        self._tokenizer = onnxruntime_genai.Tokenizer(self._model)
        self._alone = threading.Lock()
        self._new: queue.Queue[tuple[list[int], int, queue.Queue[list[int] | None]]] = queue.Queue()
        if not given.ngram_size:
            threading.Thread(target=self._run, daemon=True).start()

    def chat(self, messages: Sequence[Any]) -> str:
        """Return the prompt of a conversation by the model's template."""
        return str(self._tokenizer.apply_chat_template(json.dumps(messages), add_generation_prompt=True))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [int(each) for each in self._tokenizer.encode(text)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(ids))

    def tokens(self, prompt: str, length: int, ignore_eos: bool) -> Iterator[list[int]]:
        """Yield the new tokens of a greedy answer as they come."""
        ids = self.encode(prompt)
        if self._ngrams["ngram_size"]:
            yield from self._one_by_one(ids, length, ignore_eos)
            return
        came: queue.Queue[list[int] | None] = queue.Queue()
        self._new.put((ids, length if ignore_eos else -length, came))
        while (new := came.get()) is not None:
            yield new

    def _one_by_one(self, ids: list[int], length: int, ignore_eos: bool) -> Iterator[list[int]]:
        with self._alone:
            options = self._genai.GeneratorParams(self._model)
            least = len(ids) + length if ignore_eos else 0
            options.set_search_options(max_length=len(ids) + length, min_length=least, do_sample=False)
            options.set_speculative_options(**self._ngrams)
            generator = self._genai.Generator(self._model, options)
            generator.append_tokens(ids)
            said = len(ids)
            while not generator.is_done():
                generator.generate_next_token()
                new = [int(each) for each in generator.get_sequence(0)[said:]]
                said += len(new)
                if new:
                    yield new

    def _run(self) -> None:
        flags = self._genai.EngineEventFlags
        engine = self._genai.Engine(self._model)
        events = engine.create_event_buffer(64)
        running: list[tuple[Any, queue.Queue[list[int] | None]]] = []
        while True:
            while not self._new.empty() or not running:
                ids, length, came = self._new.get()
                request = engine.create_request()
                turn = self._genai.TurnOptions(request)
                turn.set_do_sample(False)
                turn.set_max_generated_tokens(abs(length))
                turn.set_min_generated_tokens(max(0, length))
                request.begin_turn(ids, turn)
                running.append((request, came))
            for event in engine.run(events):
                at = next(at for at, (request, _) in enumerate(running) if request == event.request)
                request, came = running[at]
                if event.flags.value & flags.TOKEN.value:
                    came.put([int(event.token)])
                if event.flags.value & (flags.TURN_FINISHED.value | flags.FAILED.value):
                    came.put(None)
                    request.close()
                    del running[at]


def main(arguments: Sequence[str]) -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--ngram-size", type=int, default=0)
    parser.add_argument("--max-draft-tokens", type=int, default=4)
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args(arguments)
    serve(OnnxRuntime(given), given.port)


if __name__ == "__main__":
    main(sys.argv[1:])
