"""A transformers model run on one flat ragged batch over pages.

The model's code is transformers' own. It is called with batch 1, every sequence's new tokens in
a row, their positions, and no Cache object; our attention, registered under a name that the mask
builder does not know, does what masks and caches would:

    tokens     [ a a a a | b | c c ]     a's prefill, one decode step of b, c's prefill continued
    positions  [ 0 1 2 3 | 9 | 4 5 ]

`architecture` says which models that is right for.
"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM

from radixsvc.architecture import ModelInfo, describe_checkpoint, read_config
from radixsvc.attention import StepContext
from radixsvc.checkpoint import read_checkpoint, require_memory
from radixsvc.errors import SetupError
from radixsvc.fused import fuse
from tiers.page import ITEMSIZE, PageShape

ATTENTION = "radixsvc_paged"


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
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        ctx: StepContext,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run the T new tokens of all sequences; their keys and values go to `ctx`'s pages.

        `input_ids` and `positions` are int32 [T] on the model's device; `logit_rows`, int64 [R],
        names the rows of T whose next-token logits are wanted. Returns them as fp32
        [R, vocab_size]. The host waits for nothing.
        """
        with torch.inference_mode(), ctx:
            output = self._module(
                input_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logit_rows,
            )
            logits: torch.Tensor = output.logits[0].float()
        return logits


def load_model(path: Path, dtype: str | None = None, device: torch.device | str = "cpu") -> Model:
    """Load the model in folder `path`. SetupError says why it can't be served.

    `dtype` is float32, bfloat16 or float16, by default what the device multiplies fast.
    """
    device = torch.device(device)
    checkpoint = read_checkpoint(path)
    config = read_config(checkpoint)
    info = describe_checkpoint(checkpoint, config, dtype, device)
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
    module.to(device)
    if device.type == "cpu":
        fuse(module, info)
    return Model(info, module, device)


def measure_num_threads(dtype: str) -> int:
    """How many threads multiply fastest here and now; torch is left set to that number.

    More are taken unless they cost over a fifth: what else runs at this moment may be over in the
    next, and beside it they lose a fifth at worst, without it they give up to twice. Takes 0.1 s.
    """
    most: int = torch.get_num_threads()
    counts: list[int] = sorted({most, *(2**i for i in range(most.bit_length()))})
    x = torch.ones(512, 1024, dtype=getattr(torch, dtype))
    weight = torch.ones(2048, 1024, dtype=x.dtype)
    fastest, best = 1, math.inf
    for count in counts:
        torch.set_num_threads(count)
        seconds = []
        for _ in range(9):
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds)
        if median < 1.2 * best:
            fastest = count
        best = min(best, median)
    torch.set_num_threads(fastest)
    return fastest


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
