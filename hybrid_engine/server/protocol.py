"""The bodies of requests. A field that is not known is an error; one that is ignored says so here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Ignored = Annotated[Any, Field(description="Accepted and ignored: it changes nothing of an answer here.")]
Count = Annotated[int, Field(ge=0, le=2**31)]
ServiceTier = Annotated[
    str | None, Field(description="A class of priority where the scheduling policy is 'priority'; else ignored.")
]
TokenIds = Annotated[list[int], Field(max_length=2**24)]


class Body(BaseModel):
    """A body of which every field is known; a text is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    """What a stream has beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class JsonSchemaFormat(Body):
    """OpenAI's wrapping of a JSON schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must match: OpenAI's json_schema and json_object, and ours: regex and grammar."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    regex: str | None = None
    grammar: str | None = None


class StructuredOutputs(Body):
    """The same as vLLM names it; see docs/STRUCTURED_OUTPUTS.md."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class SamplingFields(Body):
    """What both kinds of completions have in common; null is as good as left out."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 and -1 keep all.")
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="By token id, written as text.")
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_reading_prefix_cache: bool | None = None
    cache_salt: str | None = Field(None, description="A prefix cached under one salt is never found under another.")
    priority: int | None = Field(None, ge=-(2**31), le=2**31)
    timeout_seconds: float | None = Field(None, gt=0, description="The answer must be there by then, or it ends.")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="In log-probabilities: 'token_id:7' for a token.")
    explain_cache: bool | None = Field(None, description="Say in usage why the cache hit as far as it did.")

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: ServiceTier = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None


class CompletionBody(SamplingFields):
    """A request to /v1/completions."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    echo: bool | None = None
    logprobs: Count | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = Field(None, description="Only as many as n.")
    suffix: None = None


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingFields):
    """A request to /v1/chat/completions."""

    # Messages are the template's to read: only what the engine looks at is checked (messages.py).
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(Body):
    """A request to /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class PrefixBody(Body):
    """A prefix: a prompt, or the messages that a conversation will go on from."""

    model: str | None = None
    prompt: str | TokenIds | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = Field(False, description="Here not, unlike elsewhere: a message will follow.")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    timeout_seconds: float | None = Field(None, gt=0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is named."""
        return self.prompt is None and self.messages is None


class PinBody(PrefixBody):
    """A prefix that is to stay."""

    name: str | None = Field(None, min_length=1, max_length=200, description="To let it go by; else one is made up.")


class DetokenizeBody(Body):
    """A request to /detokenize."""

    model: str | None = None
    tokens: TokenIds


class ResponseTool(Body):
    """A function in the form of /v1/responses."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    name: str


class ResponseTextFormat(Body):
    """What the answer must match."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseText(Body):
    """How the answer's text is to be."""

    format: ResponseTextFormat | None = None
    verbosity: Ignored = None


class ResponseReasoning(Body):
    """How the model is to reason."""

    effort: str | None = None
    summary: Ignored = None


class ResponsesBody(Body):
    """A request to /v1/responses. Nothing is stored, so that there is no previous response."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    stream: bool | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = None
    cache_salt: str | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31)
    timeout_seconds: float | None = Field(None, gt=0)
    explain_cache: bool | None = None
    seed: int | None = None

    store: Ignored = None
    include: Ignored = None
    user: Ignored = None
    metadata: Ignored = None
    service_tier: ServiceTier = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    stream_options: Ignored = None
