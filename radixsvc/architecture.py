"""What a model is, known before its weights are read: layers, dtype, page shape, fingerprint.

A ragged batch is right only for models whose layers see nothing but positions, so families are
allowed by name once tested, and each model is first run on the meta device (no memory, no
arithmetic), where every attention call is looked at: what it asks for beyond causal attention
with a scale, a window, a soft cap and sinks is refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from radixsvc.checkpoint import Checkpoint, read_checkpoint, require_family
from radixsvc.errors import SetupError
from tiers.page import ITEMSIZE, LayerSpec, PageShape

KV_FORMAT = 1  # raise it when the meaning of a page's bytes changes
LAYOUT = "page/layer/[2][kv_head][page_size][head_dim]"

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


def describe(path: Path, dtype: str | None = None, device: torch.device | str = "cpu") -> ModelInfo:
    """What `load_model` would serve, without reading the weights. SetupError as there."""
    checkpoint = read_checkpoint(path)
    return describe_checkpoint(checkpoint, read_config(checkpoint), dtype, torch.device(device))


def resolve_dtype(dtype: str | None, device: torch.device) -> str:
    """bfloat16 by itself on a GPU and where the processor multiplies it fast, float32 elsewhere."""
    if dtype in (None, "auto"):
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


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
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


def describe_checkpoint(
    checkpoint: Checkpoint, config: PreTrainedConfig, dtype: str | None, device: torch.device
) -> ModelInfo:
    dtype = resolve_dtype(dtype, device)
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
    with torch.device("meta"), torch.inference_mode():
        build: Any = AutoModelForCausalLM.from_config
        module = build(config, attn_implementation=PROBE)
        ids = torch.zeros(1, 2, dtype=torch.int32)
        module.eval()(ids, position_ids=ids, use_cache=False)
    if odd or sorted(calls) != list(range(config.num_hidden_layers)):
        raise SetupError(f"{name} attends in a way not supported: {sorted(odd) or sorted(calls)}.")
    return tuple(calls[i] for i in sorted(calls))
