"""Tokenizers of both kinds: text there and back, templates, whole characters in streams."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from radixsvc.errors import InvalidRequest, SetupError
from radixsvc.text import TextAssembler
from radixsvc.tokenizer import Tokenizer

TEXTS = [
    "",
    " leading and  double spaces\n\tand a tab ",
    "naïve café, Ωμέγα, 漢字, 👩‍👩‍👧 and 🇫🇷",
    "def f(x):\n    return x ** 2  # done\n",
]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Pieces with U+2581 for a space and <0xNN> for other bytes, as Llama 2 and Gemma have."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyz,:()=*#2\n", "\u2581a"]
    backend = Backend(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("\u2581", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    hf = tiny_tokenizer() if request.param == "byte-level" else sentencepiece_like()
    hf.save_pretrained(folder)
    return Tokenizer(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_pushed_text_is_that_of_the_whole_and_never_half_a_character(
    tokenizer: Tokenizer, seed: int
) -> None:
    dice = random.Random(seed)
    text = "".join(dice.choice(TEXTS) for _ in range(3))
    ids = tokenizer.encode(text).tolist()
    assembler = TextAssembler(tokenizer, ())
    shown = ""
    while ids:
        cut = dice.randint(1, 3)
        shown += assembler.push(ids[:cut], []).text
        assert text.startswith(shown)
        del ids[:cut]
    assert shown + assembler.push([], [], is_last=True).text == text


def test_bytes_that_are_not_text_are_replaced_and_do_not_hold_up_what_follows(
    tokenizer: Tokenizer,
) -> None:
    half = tokenizer.encode("é").tolist()[-2:][:1]  # the first byte of two
    letter = tokenizer.encode("a").tolist()[-1:]
    assembler = TextAssembler(tokenizer, ())
    assert assembler.push(half, []).text == ""
    assert assembler.push(letter, []).text.lstrip("\ufffd").strip() == "a"
    assert assembler.push(half, []).text == ""
    assert assembler.push([], [], is_last=True).text == "\ufffd"


def test_decoding_equals_the_library_s(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        wanted = tokenizer._hf.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == wanted


def test_special_tokens_are_seen_in_decoding_but_not_in_answers(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("yes<|im_end|>")
    assert tokenizer.decode(ids) == "yes<|im_end|>"
    assert TextAssembler(tokenizer, ()).push(ids.tolist(), []).text == "yes"
    assert tokenizer.decode([100_000]) == ""


def test_chat_templates(tmp_path: Path) -> None:
    hf = tiny_tokenizer()
    hf.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.template_has_tools
    ids = tokenizer.apply_chat_template(chat, [{"name": "add"}])
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == (
        '<|im_start|>system\nTools: [{"name": "add"}]<|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    longer = [*chat, {"role": "assistant", "content": "hello"}]
    without = tokenizer.apply_chat_template(chat, add_generation_prompt=False)
    assert (tokenizer.apply_chat_template(longer)[: len(without)] == without).all()


def test_a_template_s_refusal_is_told_in_words(tmp_path: Path) -> None:
    hf = tiny_tokenizer()
    hf.chat_template = "{{ raise_exception('roles must alternate') }}"
    hf.save_pretrained(tmp_path / "strict")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        Tokenizer(tmp_path / "strict").apply_chat_template([{"role": "user", "content": ""}])
    hf.chat_template = None
    hf.save_pretrained(tmp_path / "base")
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(tmp_path / "base").apply_chat_template([{"role": "user", "content": ""}])


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no usable tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.model
def test_the_real_tokenizer_reuses_a_turn_s_tokens(smollm: Path) -> None:
    tokenizer = Tokenizer(smollm)
    chat = [{"role": "user", "content": "Say hello in French."}]
    first = tokenizer.apply_chat_template(chat)
    reply = tokenizer.encode("Bonjour !", add_special=False)
    chat += [{"role": "assistant", "content": "Bonjour !"}, {"role": "user", "content": "Again."}]
    second = tokenizer.apply_chat_template(chat)
    done = np.concatenate([first, reply])
    assert (second[: len(done)] == done).all()
