"""Models on ragged batches over pages, against transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny import FAMILIES, TEXT, tiny_model
from transformers import AutoModelForCausalLM

from radixsvc.architecture import describe, has_fast_bfloat16
from radixsvc.attention import RaggedBatch, StepContext
from radixsvc.errors import SetupError
from radixsvc.fused import RMSNorm, gated, rotate
from radixsvc.model import Model, load_model, measure_num_threads
from tiers import _kernels
from tiers.device import DeviceTier

TOLERANCE = 1e-4
CPU = torch.device("cpu")


class Part(NamedTuple):
    """One sequence's share of a step: tokens [start:stop] of `tokens` are computed."""

    tokens: np.ndarray
    start: int
    stop: int
    table: np.ndarray


class Runner:
    """Runs steps of a model on a device tier whose pages are handed out in random order."""

    def __init__(self, model: Model, page_size: int = 16, num_pages: int = 96) -> None:
        self.model = model
        self.page_size = page_size
        self.device = DeviceTier(model.page_shape(page_size), num_pages, CPU)
        self.device.pool.fill_(float("nan"))  # nothing unwritten may be read
        self.free = list(np.random.default_rng(1).permutation(num_pages))

    def table(self, num_tokens: int, shared: np.ndarray | None = None) -> np.ndarray:
        pages = [] if shared is None else list(shared)
        while len(pages) * self.page_size < num_tokens:
            pages.append(self.free.pop())
        return np.array(pages, np.int32)

    def step(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Logits [stop - start, vocab_size] of each part."""
        lens = [part.stop - part.start for part in parts]
        batch = RaggedBatch.build(
            lens,
            [part.stop for part in parts],
            [part.table for part in parts],
            self.page_size,
            CPU,
        )
        logits = self.model.forward(
            torch.from_numpy(np.concatenate([p.tokens[p.start : p.stop] for p in parts])),
            torch.cat([torch.arange(p.start, p.stop) for p in parts]),
            StepContext(self.device.pool, self.device.shape, batch),
            torch.arange(sum(lens)),
        )
        return list(logits.split(lens))


class Reference:
    """transformers' own model, with its own attention (eager where soft caps ask for it)."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        kind = "eager" if describe(path, "float32").layers[0].softcap else "sdpa"
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=kind
        ).eval()

    @torch.inference_mode()
    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        ids = torch.from_numpy(tokens).long()[None]
        return self.model(ids, use_cache=False).logits[0].float()


def random_tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 512, length, dtype=np.int32)


def real_tokens(path: Path) -> np.ndarray:
    """English, at which a trained model's activations stay of the usual size."""
    from transformers import AutoTokenizer

    return np.array(AutoTokenizer.from_pretrained(path)(" ".join(TEXT * 2)).input_ids, np.int32)


def mixed_steps(runner: Runner, source: np.ndarray) -> list[tuple[Part, torch.Tensor]]:
    """Two steps that hold prefill, its continuation, decode, and a prefix of shared pages."""
    a, b, c, tail = source[:46], source[46:126], source[126:188], source[188:228]
    d = np.concatenate([c[:32], tail])  # shares c's first two pages
    ta, tb, tc = runner.table(46), runner.table(80), runner.table(62)
    td = runner.table(72, shared=tc[:2])
    first = [Part(a, 0, 45, ta), Part(b, 0, 50, tb), Part(c, 0, 61, tc)]
    second = [Part(a, 45, 46, ta), Part(b, 50, 80, tb), Part(d, 32, 72, td), Part(c, 61, 62, tc)]
    return [
        pair for parts in (first, second) for pair in zip(parts, runner.step(parts), strict=True)
    ]


def assert_equal_logits(done: list[tuple[Part, torch.Tensor]], reference: Reference) -> None:
    for part, logits in done:
        wanted = reference.logits(part.tokens[: part.stop])[part.start :]
        assert (logits - wanted).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ragged_batches_equal_the_stock_forward_at_every_position(
    family: str, tmp_path: Path
) -> None:
    path = tiny_model(tmp_path, family)
    runner = Runner(load_model(path, "float32"))
    assert_equal_logits(mixed_steps(runner, random_tokens(0, 228)), Reference(path))


@pytest.mark.model
def test_ragged_batches_equal_the_stock_forward_on_a_real_model(smollm: Path) -> None:
    """Within 1e-4 of the stock model in double precision, or as near as stock fp32 comes to it.

    At this size 1e-4 is fp32's own noise.
    """
    exact, stock = Reference(smollm, torch.float64), Reference(smollm)
    runner = Runner(load_model(smollm, "float32"))
    ours, theirs = 0.0, 0.0
    for part, logits in mixed_steps(runner, real_tokens(smollm)):
        wanted = exact.logits(part.tokens[: part.stop])[part.start :]
        noisy = stock.logits(part.tokens[: part.stop])[part.start :]
        ours = max(ours, (logits - wanted).abs().max().item())
        theirs = max(theirs, (noisy - wanted).abs().max().item())
    assert ours <= max(TOLERANCE, theirs)


@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_prefill_may_be_split_anywhere(page_size: int, tiny_llama: Path) -> None:
    tokens = random_tokens(5, 36)
    wanted = Reference(tiny_llama).logits(tokens)
    model = load_model(tiny_llama, "float32")
    for split in range(1, 36):
        runner = Runner(model, page_size, num_pages=40)
        table = runner.table(36)
        (head,) = runner.step([Part(tokens, 0, split, table)])
        (tail,) = runner.step([Part(tokens, split, 36, table)])
        assert (torch.cat([head, tail]) - wanted).abs().max().item() <= TOLERANCE, split


def assert_bf16_noise_is_the_usual(path: Path, source: np.ndarray) -> None:
    """Mean distances from the exact logits, ours against stock bf16's own."""
    exact, stock = Reference(path), Reference(path, torch.bfloat16)
    ours, theirs = [], []
    for part, logits in mixed_steps(Runner(load_model(path, "bfloat16")), source):
        wanted = exact.logits(part.tokens[: part.stop])[part.start :]
        ours.append((logits - wanted).abs().mean().item())
        noisy = stock.logits(part.tokens[: part.stop])[part.start :]
        theirs.append((noisy - wanted).abs().mean().item())
    assert 0 < np.mean(ours) <= 1.2 * np.mean(theirs)


@pytest.mark.skipif(not has_fast_bfloat16(), reason="bf16 is emulated on this processor")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bf16_stays_within_stock_bf16s_own_noise(family: str, tmp_path: Path) -> None:
    assert_bf16_noise_is_the_usual(tiny_model(tmp_path, family), random_tokens(0, 228))


@pytest.mark.skipif(not has_fast_bfloat16(), reason="bf16 is emulated on this processor")
@pytest.mark.model
def test_bf16_stays_within_stock_bf16s_own_noise_on_a_real_model(smollm: Path) -> None:
    assert_bf16_noise_is_the_usual(smollm, real_tokens(smollm))


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time",
    "Water boils at",
    "1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "The three laws of robotics are",
    "Les oiseaux chantent",
]


@pytest.mark.model
def test_greedy_decoding_equals_generate(smollm: Path) -> None:
    """64 tokens on 8 prompts decoded together, token for token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm)
    reference = Reference(smollm)
    reference.model.generation_config.eos_token_id = None
    runner = Runner(load_model(smollm, "float32"))
    prompts = [np.array(tokenizer(text).input_ids, np.int32) for text in PROMPTS]
    tables = [runner.table(len(prompt) + 64) for prompt in prompts]
    logits = runner.step([Part(p, 0, len(p), t) for p, t in zip(prompts, tables, strict=True)])
    texts = prompts
    for step in range(64):
        picked = [int(row[-1].argmax()) for row in logits]
        texts = [np.append(t, np.int32(k)) for t, k in zip(texts, picked, strict=True)]
        if step < 63:
            logits = runner.step(
                [Part(t, len(t) - 1, len(t), p) for t, p in zip(texts, tables, strict=True)]
            )
    tokenizer.padding_side = "left"
    padded = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    width = padded.input_ids.shape[1]
    answers = reference.model.generate(**padded, max_new_tokens=64, do_sample=False)[:, width:]
    for prompt, text, answer in zip(prompts, texts, answers.numpy(), strict=True):
        assert_same_tokens(text, np.append(prompt, answer), len(prompt), reference)


def assert_same_tokens(
    got: np.ndarray, wanted: np.ndarray, start: int, reference: Reference
) -> None:
    """Equal up to the first place where the two best logits lie within twice the tolerance."""
    for i in range(start, len(wanted)):
        if got[i] != wanted[i]:
            best = reference.logits(wanted[:i])[-1].topk(2).values
            assert (best[0] - best[1]).item() <= 2 * TOLERANCE, f"token {i - start} differs"
            return


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba2"}, "not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "chunked_attention",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ],
)
def test_what_a_ragged_batch_cannot_serve_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    import json

    file = tiny_model(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(SetupError, match=message):
        load_model(tmp_path)


def test_a_step_may_want_no_logits(tiny_llama: Path) -> None:
    runner = Runner(load_model(tiny_llama, "float32"))
    tokens, table = random_tokens(6, 20), runner.table(20)
    batch = RaggedBatch.build([20], [20], [table], 16, CPU)
    step = StepContext(runner.device.pool, runner.device.shape, batch)
    no_rows = torch.zeros(0, dtype=torch.int64)
    none = runner.model.forward(torch.from_numpy(tokens), torch.arange(20), step, no_rows)
    assert none.shape == (0, 512)


def test_a_model_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SetupError, match=r"lacks weights.*layers\.1\.mlp\.up_proj"):
        load_model(tmp_path)


def test_a_model_is_described_without_its_weights(tmp_path: Path) -> None:
    info = describe(tiny_model(tmp_path, "gemma3"), "bfloat16")
    assert [layer.window for layer in info.layers] == [24, 24, None]
    assert info.page_shape(16).nbytes == 3 * 2 * 1 * 16 * 32 * 2
    assert (info.max_context, info.eos_token_ids) == (1024, {2})


def test_the_fingerprint_follows_weights_configuration_and_dtype(tmp_path: Path) -> None:
    import os

    path = tiny_model(tmp_path)
    seen = {describe(path, "float32").fingerprint, describe(path, "bfloat16").fingerprint}
    assert describe(path, "float32").fingerprint in seen
    os.utime(path / "model.safetensors", (1, 1))
    seen.add(describe(path, "float32").fingerprint)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"rope_theta": 10000', '"rope_theta": 20000'))
    seen.add(describe(path, "float32").fingerprint)
    assert len(seen) == 4


def test_threads_are_measured_and_set() -> None:
    before = torch.get_num_threads()
    assert measure_num_threads("float32") == torch.get_num_threads() <= before
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ["plain", "avx2", ""])
def test_norm_rotation_and_gate_are_transformers_own(isa: str, dtype: torch.dtype) -> None:
    """On rows whose length no vector divides, in place among other heads, for each ISA."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    try:
        _kernels.select_isa(isa)
    except RuntimeError as error:
        pytest.skip(str(error))
    stock = LlamaRMSNorm(38).to(dtype)
    torch.nn.init.uniform_(stock.weight)
    heads = torch.randn(700, 5, 38).to(dtype)
    cos, sin = torch.randn(2, 1, 700, 19).repeat(1, 1, 1, 2).to(dtype)
    gates = torch.cat([torch.linspace(-200, 200, 901), torch.randn(201)]).to(dtype).view(1, 29, 38)
    wanted = heads.clone().float()
    with torch.inference_mode():
        wanted[:, 1:3] = stock.float()(wanted[:, 1:3])
        q = wanted[None, :, :3].transpose(1, 2)
        wanted[:, :3] = apply_rotary_pos_emb(q, q, cos.float(), sin.float())[0][0].transpose(0, 1)
        RMSNorm(stock.to(dtype)).apply_(heads[:, 1:3])
        rotate(heads[:, :3], cos, sin)
        gate, up = gates.float().split(19, -1)
        opened, wanted_opened = gated(gates), torch.nn.functional.silu(gate) * up
    _kernels.select_isa("")
    bound = 0.02 if dtype is torch.bfloat16 else 2e-6
    assert torch.equal(heads[:, 3:].float(), wanted[:, 3:])
    torch.testing.assert_close(heads.float(), wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(opened.float(), wanted_opened, rtol=bound, atol=bound)
