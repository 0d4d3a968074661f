"""Text out of tokens: whole characters, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixsvc.completion import TokenLogprob
from radixsvc.protocol import FunctionTool, Tool
from radixsvc.text import Piece, TextAssembler
from radixsvc.toolcalls import ToolCallParser, forced_start


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8, so that characters take several."""

    strips_first_space = False

    def shown_bytes(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens)


def run(text: str, stops: Sequence[str], chunk: int = 1) -> tuple[str, list[str], list[Piece]]:
    """What comes out of `text`, as a whole and piece by piece."""
    assembler = TextAssembler(Bytes(), tuple(stops))  # type: ignore[arg-type]
    pieces = []
    tokens = list(text.encode())
    for at in range(0, len(tokens) + 1, chunk):
        part = tokens[at : at + chunk]
        logprobs = [TokenLogprob(token, -1.0, ()) for token in part]
        pieces.append(assembler.push(part, logprobs, is_last=at + chunk > len(tokens)))
    return "".join(p.text for p in pieces), [p.text for p in pieces], pieces


@given(
    st.text("abé", max_size=20),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
def test_text_ends_where_the_first_stop_string_begins(
    text: str, stops: list[str], chunk: int
) -> None:
    out, _, pieces = run(text, stops, chunk)
    if not any(stop in text for stop in stops):
        assert out == text
    else:
        end = next(i for i in range(len(text) + 1) if any(s in text[:i] for s in stops))
        assert out == min((text[: text[:end].index(s)] for s in stops if s in text[:end]), key=len)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert bytes(tokens) == out.encode()
    assert [lp.token for piece in pieces for lp in piece.logprobs] == tokens


def test_a_possible_stop_string_is_held_back_until_it_is_none() -> None:
    _, pieces, _ = run("xENyEND!", ["END"])
    assert pieces[:4] == ["x", "", "", "ENy"]
    assert "".join(pieces) == "xENy"


def parse(text: str, chunk: int, names: Sequence[str] = ("f", "g")) -> tuple[str, list[str]]:
    parser = ToolCallParser(frozenset(names))
    shown = [parser.push(text[at : at + chunk]) for at in range(0, len(text), chunk)]
    shown.append(parser.flush())
    calls = [f"{call.function.name}{call.function.arguments}" for call in parser.calls]
    return "".join(shown), calls


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    ("reply", "text", "calls"),
    [
        ("Hello <b>you</b>", "Hello <b>you</b>", []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", ['f{"a": 1}']),
        ('Well.<tool_call>{"name": "f"}</tool_call>\n', "Well.", ["f{}"]),
        ('<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", ["f{}", "g{}"]),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}', "", ["f{}", "g{}"]),
        ('{"name": "g", "parameters": {"x": "é"}}', "", ['g{"x": "é"}']),
        ('{"name": "unknown"}', '{"name": "unknown"}', []),
        ('{"answer": 1}', '{"answer": 1}', []),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ("A <tool_call> or two, \n I say", "A <tool_call> or two, \n I say", []),
        (
            'Both:\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
            "Both:",
            ["f{}", "g{}"],
        ),
        ('One <tool_call>{"name": "f"}</tool_call> and more.', "One and more.", ["f{}"]),
        ("a <tool", "a <tool", []),
    ],
)
def test_tool_calls_are_read_from_a_reply(
    reply: str, text: str, calls: list[str], chunk: int
) -> None:
    assert parse(reply, chunk) == (text, calls)


PARTS = (" ", "\n", "a", "<tool", "<tool_call>", "</tool_call>", '{"name": "f"}', "{", "x<")


@given(st.lists(st.sampled_from(PARTS), max_size=9).map("".join))
def test_a_reply_means_the_same_however_it_comes(reply: str) -> None:
    """But for white space about its calls."""
    (slow, slow_calls), (fast, fast_calls) = parse(reply, 1), parse(reply, 1000)
    assert (slow.split(), slow_calls) == (fast.split(), fast_calls)


def test_a_call_is_there_as_soon_as_it_is_closed() -> None:
    parser = ToolCallParser(frozenset("f"))
    assert parser.push('Well.\n<tool_call>{"name": "f"}</tool_cal') == "Well."
    assert not parser.calls
    assert parser.push("l>\n") == ""
    assert len(parser.calls) == 1
    assert (
        parser.push("<tool_call>no call</tool_call> That")
        == "\n<tool_call>no call</tool_call> That"
    )
    assert parser.push(" was it.") == " was it."
    assert parser.flush() == ""
    assert len(parser.calls) == 1


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize(
    ("style", "reply", "arguments", "is_cut"),
    [
        ("hermes", '"a": 1}}</tool_call>', '{"a": 1}', False),
        ("hermes", '"a": 1}</tool_call> and more', '{"a": 1}', False),
        ("hermes", '"a": [1, 2', '{"a": [1, 2', True),
        ("hermes", "}", "{}", False),
        ("llama", '"a": "}"}}', '{"a": "}"}', False),
        ("llama", '"a": 1} is what I say', '{"a": 1}', False),
        ("llama", "nonsense", "{nonsense", True),
    ],
)
def test_a_forced_call_is_one_even_if_the_model_does_not_close_it(
    style: str, reply: str, arguments: str, is_cut: bool, chunk: int
) -> None:
    tools = [Tool(function=FunctionTool(name="f"))]
    parser = ToolCallParser(frozenset("f"), forced_start("required", tools, style))
    shown = [parser.push(reply[at : at + chunk]) for at in range(0, len(reply), chunk)]
    text = "".join(shown) + parser.flush()
    calls = [(call.function.name, call.function.arguments) for call in parser.calls]
    assert calls == [("f", arguments)]
    assert parser.is_cut is is_cut
    assert text.strip() in ("", "and more")
