"""Tools: how they reach the prompt, and how a model's text becomes tool calls again.

Two formats cover the chat templates of the allowed families:

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list in one pair of tags
    llama    {"name": ..., "parameters": {...}} as the whole reply

A template that knows nothing of tools gets them described in its system message, hermes style.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

import msgspec

from radixsvc.codec import canonical
from radixsvc.errors import InvalidRequest
from radixsvc.protocol import Function, Message, Tool, ToolCall, ToolChoice

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORCED = {  # by the template's style: what comes before a function's name, and its arguments
    "hermes": (OPEN + '\n{"name": "', '"arguments": {'),
    "llama": ('{"name": "', '"parameters": {'),
}
TAGGED = re.compile(rf"(?<!\s)\s*{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)
BARE = re.compile(r"\A(\s*\{.*)\Z", re.DOTALL)
CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
INSTRUCTIONS = (
    "You may call functions. These are their signatures, one JSON object a line:\n{tools}\n"
    'To call one, answer with <tool_call>{{"name": NAME, "arguments": OBJECT}}</tool_call> alone.'
)


def template_tools(tools: list[Tool], sort: bool) -> list[dict[str, Any]]:
    """Tool definitions for the chat template. Sorted by name and key, the order in which a client
    happens to list them does not change the prompt, and so does not split the tree."""
    plain = [{"type": "function", "function": msgspec.to_builtins(tool.function)} for tool in tools]
    ordered: list[dict[str, Any]] = canonical(plain, "tools", sort)
    return sorted(ordered, key=lambda tool: str(tool["function"]["name"])) if sort else ordered


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages for the chat template: text joined, arguments of tool calls as objects."""
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, param: str) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        if any(part.type not in ("text", "refusal") for part in content):
            raise InvalidRequest(
                f"{param}.content: this service understands text alone", f"{param}.content"
            )
        content = "".join(part.text or "" for part in content)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name):
            plain[name] = value
    calls = []
    for call in message.tool_calls or ():
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = call.function.arguments
        function = {"name": call.function.name, "arguments": canonical(arguments, param, False)}
        calls.append({"id": call.id, "type": "function", "function": function})
    return {**plain, "tool_calls": calls} if calls else plain


def describe_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """`messages` for a template without tools: described in the system message, calls as text."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = INSTRUCTIONS.format(tools=lines)
    first = messages[0] if messages[0]["role"] == "system" else None
    head = {"role": "system", "content": f"{first['content']}\n\n{text}" if first else text}
    rest = []
    for message in messages[1:] if first else messages:
        calls = [
            OPEN + json.dumps(call["function"], ensure_ascii=False) + CLOSE
            for call in message.get("tool_calls", ())
        ]
        role = "user" if message["role"] == "tool" else message["role"]
        rest.append({"role": role, "content": "\n".join([message["content"], *calls]).strip()})
    return [head, *rest]


def forced_start(choice: str | ToolChoice | None, tools: list[Tool], style: str) -> str:
    """What the reply begins with where `tool_choice` demands a call; the model goes on from there.

    Up to the arguments where the function is known, else up to its name.
    """
    names = {tool.function.name for tool in tools}
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if name not in names:
            raise _wrong_choice(f"names {name!r}, which tools does not list")
        names = {name}
    elif choice != "required":
        return ""
    if not names:
        raise _wrong_choice("is 'required' and there are no tools")
    if style not in FORCED:
        raise _wrong_choice(
            "can't be kept: how this model's chat template begins a call is not known, so none can "
            "be forced. Use 'auto' or 'none'."
        )
    start, arguments = FORCED[style]
    if len(names) > 1:
        return start
    quoted = json.dumps(names.pop(), ensure_ascii=False)
    return f"{start}{quoted[1:]}, {arguments}"


def _wrong_choice(words: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice {words}", "tool_choice")


class ToolCallParser:
    """Splits a reply, as it arrives, into text to show and tool calls.

    From where a call may begin on, with the white space before it, text is held back until the
    call is closed; what is no call then is shown as it is. A reply that was made to begin with
    `start` is a call even if the model does not close it: `is_cut` says that its arguments are
    not whole.
    """

    def __init__(self, names: frozenset[str], start: str = "") -> None:
        self.calls: list[ToolCall] = []
        self.is_cut = False
        self._names = names
        self._is_forced = bool(start)
        self._held = start
        self._has_begun = False

    def push(self, text: str) -> str:
        """More of the reply: adds to `calls`, and returns the text that may be shown now."""
        self._held += text
        if not self._has_begun and self._held.lstrip().startswith("{"):
            return ""  # a reply that is all JSON
        before, close, rest = self._held.rpartition(CLOSE)
        end = rest.find(OPEN)
        if end < 0:
            end = len(rest) - next(
                n for n in range(len(OPEN) - 1, -1, -1) if rest.endswith(OPEN[:n])
            )
        end = len(rest[:end].rstrip())
        shown, self._held = TAGGED.sub(self._without_calls, before + close) + rest[:end], rest[end:]
        self._has_begun = self._has_begun or bool(shown or self.calls)
        return shown

    def flush(self) -> str:
        """The end of the reply: adds to `calls`, and returns what of the rest is none."""
        text = TAGGED.sub(self._without_calls, BARE.sub(self._without_calls, self._held))
        return text.strip() if self.calls else text

    def _without_calls(self, found: re.Match[str]) -> str:
        functions = self._whole_calls(found[1])
        if not functions and self._is_forced and not self.calls:
            functions = self._unclosed_call(found[1])
        for function in functions:
            id = f"call_{secrets.token_hex(12)}"
            index = len(self.calls)
            self.calls.append(ToolCall(function=function, id=id, type="function", index=index))
        return "" if functions else found[0]

    def _whole_calls(self, text: str) -> list[Function]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return []
        functions = []
        for call in found if isinstance(found, list) else [found]:
            if not isinstance(call, dict) or call.get("name") not in self._names:
                return []
            arguments = call.get("arguments", call.get("parameters", {}))
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            functions.append(Function(call["name"], arguments))
        return functions

    def _unclosed_call(self, text: str) -> list[Function]:
        """A call to a known function up to the end of its arguments, or of the reply."""
        head = CALL_HEAD.match(text)
        if head is None or head[1] not in self._names:
            return []
        arguments = text[head.end() :]
        try:
            arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
        except (ValueError, RecursionError):
            self.is_cut = True
        return [Function(head[1], arguments)]
