"""A bfloat16 model's layers with fewer passes over memory, on CPUs.

Left to itself torch takes about 20 operations a layer beside the matrix products, and oneDNN
reorders a plain weight at every call. Here a weight lies as oneDNN's kernels read it, q, k and v
are one product, sums and gates are taken on the products' fp32 sums, and norm and rotation are
kernels of our own. Nothing is rounded more often than in transformers' own layers, which tests
compare with; of families not named here only the weights are packed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from radixsvc.architecture import LayerAttention, ModelInfo, has_fast_bfloat16
from radixsvc.attention import paged_attention
from tiers import _kernels

# h += o(attend(rotate(qkv(norm(h))))); h += down(silu(gate(norm(h))) * up(norm(h)))
FUSED = ("llama", "mistral", "qwen2", "qwen3")

# Rows of the product that a weight's layout is chosen for. Left to itself oneDNN takes one for a
# single row, which makes products of hundreds of rows 2 to 3 times slower; this one suits both.
PACKED_FOR = 64

_linear = torch.ops.mkldnn._linear_pointwise


def fuse(module: Any, info: ModelInfo) -> None:
    """Replace what is known of a transformers model for causal language modelling, in place.

    In fp32 nothing: torch's plain operations are as fast there, and equal to transformers' own.
    """
    if info.dtype != "bfloat16" or not has_fast_bfloat16():
        return
    if module.config.model_type in FUSED and module.config.hidden_act == "silu":
        layers = module.model.layers
        for i, attends in enumerate(info.layers):
            layers[i] = FusedLayer(layers[i], attends)
        module.model.norm = RMSNorm(module.model.norm)
    for parent in [m for m in module.modules() if type(m) is not nn.Linear]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear([child]))


class PackedLinear(nn.Module):
    """Linear layers of one input as one product, its weight as oneDNN reads it."""

    def __init__(self, linears: Iterable[Any]) -> None:
        super().__init__()
        linears = list(linears)
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def forward(self, x: torch.Tensor, activation: str = "none") -> torch.Tensor:
        out: torch.Tensor = _linear.default(x, self.packed, self.bias, activation, [], "")
        return out

    def combined(self, x: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        """The product, then `operation` ("add" or "mul") with `other` of its shape."""
        out: torch.Tensor = _linear.binary(x, other, self.packed, self.bias, operation)
        return out


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of bfloat16.

    https://arxiv.org/abs/1910.07467
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight.detach()
        self.eps: float = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        dim = x.shape[-1]
        self._run(x, x.numel() // dim, 1, dim, out)
        return out

    def apply_(self, heads: torch.Tensor) -> None:
        """In place on [tokens, heads, dim], where a token's heads lie one after another."""
        self._run(heads, heads.shape[0], heads.shape[1], heads.stride(0), heads)

    def _run(
        self, x: torch.Tensor, tokens: int, heads: int, stride: int, out: torch.Tensor
    ) -> None:
        _kernels.rms_norm(
            tokens,
            heads,
            x.shape[-1],
            x.data_ptr(),
            stride,
            out.data_ptr(),
            stride,
            self.weight.data_ptr(),
            self.eps,
        )


class FusedLayer(nn.Module):
    """A decoder layer of the kind that Llama made common; `norm`s of q and k are Qwen 3's."""

    def __init__(self, layer: Any, attends: LayerAttention) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.attends = attends
        self.norms = nn.ModuleList(
            [RMSNorm(layer.input_layernorm), RMSNorm(layer.post_attention_layernorm)]
        )
        self.qkv = PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = PackedLinear([attention.o_proj])
        has_norms = hasattr(attention, "q_norm")
        self.q_norm = RMSNorm(attention.q_norm) if has_norms else None
        self.k_norm = RMSNorm(attention.k_norm) if has_norms else None
        self.gate, self.up, self.down = (
            PackedLinear([part]) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """hidden is [1, tokens, hidden_size], cosines and sines [1, tokens, head_dim]."""
        spec = self.attends
        num_rotated = spec.q_heads + spec.kv_heads
        qkv = self.qkv(self.norms[0](hidden)).view(
            hidden.shape[1], num_rotated + spec.kv_heads, spec.head_dim
        )
        q, k, v = qkv.split([spec.q_heads, spec.kv_heads, spec.kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.apply_(q)
            self.k_norm.apply_(k)
        rotate(qkv, num_rotated, *position_embeddings)
        attended = paged_attention(q, k, v, self.index, spec.scale, spec.window or 0)
        hidden = self.out.combined(attended.view(1, len(qkv), -1), hidden, "add")
        x = self.norms[1](hidden)
        gated = self.up.combined(x, self.gate(x, "swish"), "mul")
        return self.down.combined(gated, hidden, "add")


def rotate(x: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn the first heads of x [tokens, heads, head_dim] by [1, tokens, rotary_dim] in place."""
    cos, sin = cos.contiguous(), sin.contiguous()
    _kernels.rotate(
        len(x),
        num_heads,
        x.shape[2],
        x.data_ptr(),
        x.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-1],
    )
