"""The API's bodies, typed once for both encodings, for the service and for its client.

Names and shapes are OpenAI's (https://platform.openai.com/docs/api-reference), with `usage`
extended by `radixsvc`. Fields that are not listed are accepted and ignored; a listed one with an
impossible value is refused. `prompt` is text, token ids, or a list of either; token ids are an
array of integers or, in msgpack, a bin of little-endian int32.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from radixsvc.completion import Sources

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
Salt = Annotated[str, Meta(max_length=256)]


class StreamOptions(Struct):
    include_usage: bool = False


class Sampling(Struct, kw_only=True):
    """What both completion endpoints understand."""

    model: str | None = None
    max_tokens: AtLeastOne | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[frozenset[Count], Meta(max_length=64)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    prompt_cache_key: str | None = None  # a routing hint: one process has nowhere to route


class CompletionRequest(Sampling, kw_only=True):
    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: str | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None


class Function(Struct, omit_defaults=True):
    name: str
    arguments: str = ""


class ToolCall(Struct, omit_defaults=True, kw_only=True):
    """`index` is there in streams alone."""

    function: Function
    id: str | None = None
    type: str | None = None
    index: int | UnsetType = UNSET


class Message(Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionTool(Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Struct, kw_only=True):
    function: FunctionTool
    type: Literal["function"] = "function"


Messages = Annotated[list[Message], Meta(min_length=1, max_length=16_384)]
Tools = Annotated[list[Tool], Meta(max_length=512)]


class ToolChoice(Struct):
    function: Function


class ResponseFormat(Struct):
    type: str


class ChatRequest(Sampling, kw_only=True):
    messages: Messages
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None


class PromptRequest(Struct, kw_only=True):
    """A prompt for the prefix endpoints: `prompt`, or `messages` (and `tools`) as in a chat."""

    prompt: Any = None
    messages: Messages | None = None
    tools: Tools | None = None
    cache_salt: Salt | None = None
    model: str | None = None
    ttl: Annotated[float, Meta(gt=0, le=7 * 86400)] = 3600.0  # seconds; of a pin
    add_special_tokens: bool = True


class DetokenizeRequest(Struct, kw_only=True):
    tokens: Any
    model: str | None = None


class PromptDetails(Struct):
    cached_tokens: int


class UsageInfo(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    radixsvc: Sources


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Reply(Struct, kw_only=True):
    """The assistant's message, or a delta of it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    """Has `text` in completions, `message` in chat completions, `delta` in their chunks."""

    index: int
    text: str | UnsetType = UNSET
    message: Reply | UnsetType = UNSET
    delta: Reply | UnsetType = UNSET
    finish_reason: str | None = None
    logprobs: Any = None


class Completion(Struct):
    """A whole answer of either endpoint, and a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageInfo | None = None


class PrefixMatch(Struct, kw_only=True):
    """How much of a prompt is cached, in tokens; `computed` is what is not."""

    prompt_tokens: int
    cached_tokens: int
    radixsvc: Sources


class Evicted(Struct):
    """Tokens [start, end) of the prompt that were cached once: when they went, and from where."""

    start: int
    end: int
    tier: str
    seconds_ago: float


class Divergence(Struct, kw_only=True):
    """Where the prompt leaves the nearest cached branch, with the text on both sides."""

    position: int
    text_before: str
    prompt_text: str
    cached_text: str
    same_text: bool  # it reads the same there, and only its tokens differ


class Realigned(Struct):
    """What would be reused if the parts that vary stood at the end: `reusable_tokens` more."""

    volatile_tokens: int
    volatile_text: str
    reusable_tokens: int


class Explanation(PrefixMatch, kw_only=True):
    """Why a prompt is not cached any further. `summary` says it in words."""

    summary: str
    divergence: Divergence | None = None
    evicted: list[Evicted] = []
    realigned: Realigned | None = None


# A msgpack stream: one Header, any number of Delta, and then one End or Failure.


class Header(Struct, tag="header"):
    id: str
    created: int
    model: str
    object: str
    prompt_tokens: int


class Delta(Struct, tag="delta", omit_defaults=True, kw_only=True):
    """More of one choice; `tokens` is a bin of little-endian int32."""

    index: int
    text: str = ""
    tokens: bytes = b""
    tool_calls: list[ToolCall] = []
    logprobs: list[ChatLogprob] = []
    finish_reason: str | None = None

    def add(self, more: Delta) -> None:
        """What came after this, to the same choice."""
        self.text += more.text
        self.tokens += more.tokens
        self.tool_calls += more.tool_calls
        self.logprobs += more.logprobs
        self.finish_reason = more.finish_reason


class End(Struct, tag="end"):
    usage: UsageInfo


class Failure(Struct, tag="error"):
    error: dict[str, str | None]


StreamEvent = Header | Delta | End | Failure
