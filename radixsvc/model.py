"""A transformers model run on one flat ragged batch over pages.

The model's code is transformers' own. It is called with batch 1, every sequence's new tokens in
a row, their positions, and no Cache object; our attention, registered under a name that the mask
builder does not know, does what masks and caches would:

    tokens     [ a a a a | b | c c ]     a's prefill, one decode step of b, c's prefill continued
    positions  [ 0 1 2 3 | 9 | 4 5 ]

That is right only for models whose layers see nothing but these positions, so families are
allowed by name once tested, and each model is first run on the meta device (no memory, no
arithmetic), where every attention call is looked at: what it asks for beyond causal attention
with a scale, a window, a soft cap and sinks is refused.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as hf_logging

from radixsvc.attention import StepContext, attention_step
from radixsvc.checkpoint import Checkpoint, read_checkpoint, require_family, require_memory
from radixsvc.errors import SetupError
from tiers.page import ITEMSIZE, LayerSpec, PageShape

KV_FORMAT = 1  # raise it when the meaning of a page's bytes changes
LAYOUT = "page/layer/[2][kv_head][page_size][head_dim]"

ATTENTION = "radixsvc_paged"
PROBE = "radixsvc_probe"

LAYER_TYPES = {"full_attention", "sliding_attention"}
# The others rescale by the longest position of the batch (dynamic, longrope) or are not tested.
ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
# What layers hand to attention besides q, k, v and that changes nothing in it.
HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_hidden_states"}


class LayerAttention(NamedTuple):
    """How one layer attends; `window` None sees everything, `softcap` 0 is off."""

    kv_heads: int
    head_dim: int
    window: int | None
    q_heads: int
    scale: float
    softcap: float
    sinks: bool


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model without loading its weights."""

    name: str
    architecture: str
    num_layers: int
    vocab_size: int
    max_context: int
    dtype: str
    layers: tuple[LayerAttention, ...]
    eos_token_ids: frozenset[int]
    fingerprint: str  # SHA-256 hex: weights, configuration, dtype, layout; not the page size
    num_params: int

    def page_shape(self, page_size: int) -> PageShape:
        """The shape of pages that hold `page_size` tokens of this model."""
        layers, offset = [], 0
        for layer in self.layers:
            layers.append(LayerSpec(layer.kv_heads, layer.head_dim, offset, layer.window))
            offset += 2 * layer.kv_heads * page_size * layer.head_dim
        return PageShape(tuple(layers), page_size, self.dtype)


class Model:
    """A loaded model. One thread at a time may call `forward`."""

    def __init__(self, info: ModelInfo, module: nn.Module, device: torch.device) -> None:
        self.info = info
        self.device = device
        self._module = module

    def page_shape(self, page_size: int) -> PageShape:
        """The shape of pages that hold `page_size` tokens of this model."""
        return self.info.page_shape(page_size)

    def forward(
        self,
        input_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        ctx: StepContext,
        logit_rows: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Run the T new tokens of all sequences; their keys and values go to `ctx`'s pages.

        `input_ids` and `positions` are [T]; `logit_rows` [R] names the rows of T whose
        next-token logits are wanted. Returns them as fp32 [R, vocab_size].
        """
        ids = torch.from_numpy(input_ids).to(self.device, non_blocking=True)
        where = torch.from_numpy(positions).to(self.device, non_blocking=True)
        rows = torch.from_numpy(logit_rows).to(self.device, non_blocking=True)
        with torch.inference_mode(), attention_step(ctx):
            output = self._module(
                ids[None], position_ids=where[None], use_cache=False, logits_to_keep=rows
            )
            logits: torch.Tensor = output.logits[0].float()
        return logits


def load_model(path: Path, dtype: str | None = None, device: torch.device | str = "cpu") -> Model:
    """Load the model in folder `path`. SetupError says why it can't be served.

    `dtype` is float32, bfloat16 or float16, by default what the device multiplies fast.
    """
    device = torch.device(device)
    checkpoint = read_checkpoint(path)
    config = _read_config(checkpoint)
    info = _describe(checkpoint, config, resolve_dtype(dtype, device))
    embedding = info.vocab_size * config.hidden_size  # a tied output layer may be a copy
    needed = int((info.num_params + embedding) * ITEMSIZE[info.dtype] * 1.1) + (256 << 20)
    if device.type == "cpu":
        require_memory(needed, info.name)
    elif needed > torch.cuda.mem_get_info(device)[0]:
        raise SetupError(f"{info.name} needs about {needed / 2**30:.1f} GiB of device memory.")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=getattr(torch, info.dtype),
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        raise SetupError(f"{checkpoint.path} can't be loaded: {error}") from error
    module, loading = loaded
    wrong = [*loading["missing_keys"], *loading["mismatched_keys"]]
    if wrong:
        raise SetupError(f"{checkpoint.path} lacks weights, or has the wrong shape of: {wrong[:5]}")
    module.eval().requires_grad_(False)
    if device.type == "cpu" and info.dtype == "bfloat16":
        _pack_linears(module)
    else:
        module.to(device)
    gc.collect()
    return Model(info, module, device)


def describe(path: Path, dtype: str | None = None, device: torch.device | str = "cpu") -> ModelInfo:
    """What `load_model` would serve, without reading the weights. SetupError as there."""
    checkpoint = read_checkpoint(path)
    config = _read_config(checkpoint)
    return _describe(checkpoint, config, resolve_dtype(dtype, torch.device(device)))


def resolve_dtype(dtype: str | None, device: torch.device) -> str:
    """bfloat16 on a GPU and where the processor multiplies it fast, float32 elsewhere."""
    if dtype is None:
        return "bfloat16" if device.type == "cuda" or has_fast_bfloat16() else "float32"
    if dtype not in ITEMSIZE:
        raise SetupError(f"dtype must be one of {', '.join(ITEMSIZE)}, not {dtype!r}.")
    if dtype == "float16" and device.type == "cpu":
        raise SetupError("float16 needs a GPU; take bfloat16 or float32 on a CPU.")
    return dtype


def has_fast_bfloat16() -> bool:
    """Whether the processor has AMX or AVX-512 instructions for bf16."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return "amx_bf16" in flags or "avx512_bf16" in flags


def measure_num_threads(dtype: str) -> int:
    """How many threads multiply fastest here and now; torch is left set to that number.

    On a machine busy with other things threads that wait for each other cost scheduler ticks: two
    of them were seen to take 8 ms for what one does in 0.2 ms. Takes about 0.1 s.
    """
    most: int = torch.get_num_threads()
    counts: list[int] = sorted({most, *(2**i for i in range(most.bit_length()))})
    x = torch.ones(64, 1024, dtype=getattr(torch, dtype))
    weight = torch.ones(1024, 1024, dtype=x.dtype)
    medians = {}
    for count in counts:
        torch.set_num_threads(count)
        seconds = []
        for _ in range(15):
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            seconds.append(time.perf_counter() - start)
        medians[count] = sorted(seconds)[len(seconds) // 2]
    fastest = min(counts, key=medians.__getitem__)
    torch.set_num_threads(fastest)
    return fastest


def _read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The configuration, refused where it asks for what a ragged batch can't give."""
    name = checkpoint.name
    require_family(str(checkpoint.config.get("model_type")), name)
    if "quantization_config" in checkpoint.config:
        raise SetupError(f"{name} is quantized; only plain weights (or a .gguf file) are served.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # its validators raise a class of their own
        raise SetupError(f"{checkpoint.path / 'config.json'} is not usable: {error}") from error
    odd = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if odd:
        raise SetupError(f"{name} has layers of the type {', '.join(sorted(odd))}: not supported.")
    rope = config.rope_parameters or {}
    for entry in rope.values() if "rope_type" not in rope else [rope]:
        kind = entry.get("rope_type", "default") if isinstance(entry, dict) else "default"
        if kind not in ROPE_TYPES:
            raise SetupError(f"{name} scales positions by {kind!r}: not supported.")
    return config


def _describe(checkpoint: Checkpoint, config: PreTrainedConfig, dtype: str) -> ModelInfo:
    layers = _probe_layers(config, checkpoint.name)
    return ModelInfo(
        name=checkpoint.name,
        architecture=(config.architectures or [config.model_type])[0],
        num_layers=len(layers),
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        dtype=dtype,
        layers=layers,
        eos_token_ids=_eos_token_ids(checkpoint),
        fingerprint=_fingerprint(checkpoint, dtype, layers),
        num_params=checkpoint.num_params,
    )


def _eos_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """End tokens of config.json and generation_config.json together."""
    file = checkpoint.path / "generation_config.json"
    sources = [checkpoint.config, json.loads(file.read_bytes()) if file.is_file() else {}]
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def _fingerprint(checkpoint: Checkpoint, dtype: str, layers: tuple[LayerAttention, ...]) -> str:
    """SHA-256 of all that decides a page's bytes; weights by size, time and header alone."""
    weights = [
        [file.name, (stat := file.stat()).st_size, stat.st_mtime_ns,
         hashlib.sha256(header).hexdigest()]
        for file, header in zip(checkpoint.files, checkpoint.headers, strict=True)
    ]  # fmt: skip
    parts = [KV_FORMAT, LAYOUT, dtype, layers, checkpoint.config, weights]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _probe_layers(config: PreTrainedConfig, name: str) -> tuple[LayerAttention, ...]:
    """Run the model on the meta device and note what each layer asks attention for."""
    calls: dict[int, LayerAttention] = {}
    odd: set[str] = set()

    def note(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """q [1, q_heads, T, head_dim], k and v [1, kv_heads, T, head_dim]."""
        index: int = module.layer_idx  # type: ignore[assignment]
        odd.update(k for k, v in others.items() if k not in HARMLESS and v is not None)
        if attention_mask is not None or not module.is_causal or index in calls:
            odd.add("attention that is not causal")
        if key.shape != value.shape:
            odd.add("keys and values of different width")
        calls[index] = LayerAttention(
            kv_heads=key.shape[1],
            head_dim=key.shape[3],
            window=sliding_window,
            q_heads=query.shape[1],
            scale=key.shape[3] ** -0.5 if scaling is None else scaling,
            softcap=softcap or 0.0,
            sinks=s_aux is not None,
        )
        return query.transpose(1, 2), None

    AttentionInterface.register(PROBE, note)
    with torch.device("meta"), torch.inference_mode(), _quiet():
        build: Any = AutoModelForCausalLM.from_config
        module = build(config, attn_implementation=PROBE)
        ids = torch.zeros(1, 2, dtype=torch.int32)
        module.eval()(ids, position_ids=ids, use_cache=False)
    if odd or sorted(calls) != list(range(config.num_hidden_layers)):
        raise SetupError(f"{name} attends in a way not supported: {sorted(odd) or sorted(calls)}.")
    return tuple(calls[i] for i in sorted(calls))


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity(40)
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over pages: q [1, q_heads, T, head_dim] and so on."""
    out = torch.ops.radixsvc.paged_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        module.layer_idx,
        query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
    )
    return out[None], None


AttentionInterface.register(ATTENTION, _attend)


class _PackedLinear(nn.Module):
    """A linear layer whose bf16 weight lies as oneDNN's kernels read it.

    Left to itself, oneDNN reorders a plain weight at every call, which at small batches costs
    more than the product: packed, a whole forward pass takes 0.75x the time, with equal results.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.packed, self.bias, "none", [], ""
        )
        return out


def _pack_linears(module: nn.Module) -> None:
    if "mkldnn" not in torch.__config__.show().lower() or not has_fast_bfloat16():
        return
    for parent in [m for m in module.modules() if type(m) is not nn.Linear]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _PackedLinear(child))
