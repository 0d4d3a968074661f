"""Tiny random models of every allowed family, with a byte-level tokenizer and a chat template.

Tests import it as `from tiny import tiny_model`: this folder is on the path, and is no package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}{% for call in message.tool_calls %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXT = [
    "You are a helpful assistant. Answer in one short sentence, and say so when you do not know.",
    "The quick brown fox jumps over the lazy dog while the cat sleeps in the warm sun.",
    "What is the capital of France? The capital of France is Paris. And of Italy? It is Rome.",
    "def add(a: int, b: int) -> int:\n    return a + b\n\nfor i in range(10):\n    add(i, 1)\n",
    'user assistant system tools function name description parameters {"type": "object"}',
    "Once upon a time there lived an old king who counted every stone of his castle each morning.",
    "Please summarise the following report, list three open questions, then propose next steps.",
]

# What a family's configuration needs beside the common sizes, so that every feature it has
# (windows, soft caps, mixed layers) is used at 24 tokens.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": 24}),
    "qwen2": (
        "qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    "phi3": ("phi3", {"num_key_value_heads": 2, "sliding_window": 24}),
    "gemma2": (
        "gemma2",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gpt_neox": ("gpt_neox", {}),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over `TEXT`: any text round-trips, characters outside it take several ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """Write a random fp32 model of `family` and its tokenizer into `folder`; the same every time.

    `overrides` go into its configuration, e.g. `num_hidden_layers=2, max_position_embeddings=64`.
    """
    model_type, extra = FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **extra,
        **overrides,
    }
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():  # norms and biases start at 0 or 1, where mistakes would not show
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
