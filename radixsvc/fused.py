"""Layers with fewer passes over memory, on CPUs.

Left to itself torch takes about 20 operations a layer beside the matrix products. Here q, k and v
are one product, gate and up another, and norm, rotation and gate are kernels of our own; nothing
is rounded more often than in transformers' own layers, which tests compare with. In bfloat16 a
weight lies as oneDNN's kernels read it, which otherwise reorder a plain one at every call; of
families not named here only the weights are packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from radixsvc.architecture import LayerAttention, ModelInfo, has_fast_bfloat16
from radixsvc.attention import DTYPE_CODES, paged_attention
from tiers import _kernels

# h += o(attend(rotate(qkv(norm(h))))); h += down(silu(gate(norm(h))) * up(norm(h)))
FUSED = ("llama", "mistral", "qwen2", "qwen3")

# Rows of the product that a weight's layout is chosen for. Left to itself oneDNN takes one for a
# single row, which makes products of hundreds of rows 2 to 3 times slower; this one suits both.
PACKED_FOR = 64

_linear = torch.ops.mkldnn._linear_pointwise


def fuse(module: Any, info: ModelInfo) -> None:
    """Replace what is known of a transformers model for causal language modelling, in place."""
    packs = info.dtype == "bfloat16" and has_fast_bfloat16()
    if not packs and info.dtype != "float32":
        return
    if module.config.model_type in FUSED and module.config.hidden_act == "silu":
        layers = module.model.layers
        for i, attends in enumerate(info.layers):
            layers[i] = FusedLayer(layers[i], attends, PackedLinear if packs else Linear)
        module.model.norm = RMSNorm(module.model.norm)
    if packs:
        for parent in [m for m in module.modules() if type(m) is not nn.Linear]:
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, PackedLinear(child))


class Linear(nn.Module):
    """Linear layers of one input as one product."""

    def __init__(self, *linears: Any) -> None:
        super().__init__()
        weights = [linear.weight.detach() for linear in linears]
        self.weight = self.lay_out(torch.cat(weights) if len(weights) > 1 else weights[0])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as `forward` reads it."""
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product and `other`, of its shape."""
        return self.forward(x).add_(other)


class PackedLinear(Linear):
    """In bfloat16, the weight as oneDNN reads it, and sums rounded once."""

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        return packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _linear.default(x, self.weight, self.bias, "none", [], "")
        return out

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _linear.binary(x, other, self.weight, self.bias, "add")
        return out


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    https://arxiv.org/abs/1910.07467
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight.detach()
        self.eps: float = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.contiguous().view(-1, 1, x.shape[-1])
        out = torch.empty_like(rows)
        _kernels.rms_norm(*_rows(rows, out), self.weight.data_ptr(), self.eps)
        return out.view(x.shape)

    def apply_(self, heads: torch.Tensor) -> None:
        """In place on [tokens, heads, dim], where a token's heads lie one after another."""
        _kernels.rms_norm(*_rows(heads, heads), self.weight.data_ptr(), self.eps)


class FusedLayer(nn.Module):
    """A decoder layer of the kind that Llama made common; `norm`s of q and k are Qwen 3's."""

    def __init__(self, layer: Any, attends: LayerAttention, linear: type[Linear]) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.attends = attends
        self.norms = nn.ModuleList(
            [RMSNorm(layer.input_layernorm), RMSNorm(layer.post_attention_layernorm)]
        )
        self.qkv = linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = linear(attention.o_proj)
        has_norms = hasattr(attention, "q_norm")
        self.q_norm = RMSNorm(attention.q_norm) if has_norms else None
        self.k_norm = RMSNorm(attention.k_norm) if has_norms else None
        self.gate_up, self.down = linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj)

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
        rotate(qkv[:, :num_rotated], *position_embeddings)
        attended = paged_attention(q, k, v, self.index, spec.scale, spec.window or 0)
        hidden = self.out.plus(attended.view(1, len(qkv), -1), hidden)
        return self.down.plus(gated(self.gate_up(self.norms[1](hidden))), hidden)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn [tokens, heads, head_dim] by cosines and sines of [1, tokens, rotary_dim], in place."""
    cos, sin = cos.contiguous(), sin.contiguous()
    _kernels.rotate(*_rows(heads, heads), cos.data_ptr(), sin.data_ptr(), cos.shape[-1])


def gated(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [1, tokens, gate and up]. https://arxiv.org/abs/2002.05202"""
    out = x.new_empty(1, x.shape[1], x.shape[2] // 2)
    _kernels.gate(*_rows(x.transpose(0, 1), out.transpose(0, 1)))
    return out


def _rows(x: torch.Tensor, out: torch.Tensor) -> tuple[int, int, int, int, int, int, int, int]:
    """What the kernels are told of [tokens, heads, dim], `dim` being the result's."""
    tokens, heads, dim = out.shape
    code = DTYPE_CODES[x.dtype]
    return code, tokens, heads, dim, x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)
