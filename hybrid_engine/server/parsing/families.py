"""Which parser reads which family of models, and how a call is enforced."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_engine.errors import ConfigError
from hybrid_engine.sampling_params import StructuredOutputsParams
from hybrid_engine.server.parsing import harmony
from hybrid_engine.server.parsing.base import Parser, PlainParser
from hybrid_engine.server.parsing.forms import read_gemma, read_json_or_xml, read_xml
from hybrid_engine.server.parsing.reasoning import GRANITE, THINK, ReasoningFormat, ReasoningParser
from hybrid_engine.server.parsing.tools import CALL, Schemas, ToolFormat, ToolParser, read_json
from hybrid_engine.server.settings import AUTO

NONE, HARMONY = "none", "harmony"
WRITTEN_AS_TEMPLATES_DO = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


TOOL_FORMATS = {
    "jamba": ToolFormat(
        {"<tool_calls>": "</tool_calls>"}, read_json, enforced=("<tool_calls>", "[", CALL, "]", "</tool_calls>")
    ),
    "granite": ToolFormat(
        {"<|tool_call|>": None, "<tool_call>": "</tool_call>"}, read_json, enforced=("<|tool_call|>", "[", CALL, "]")
    ),
    "hermes": ToolFormat(
        {"<tool_call>": "</tool_call>", "<function=": "</function>"},
        read_json_or_xml,
        enforced=("<tool_call>", "\n", CALL, "\n", "</tool_call>"),
    ),
    "qwen_xml": ToolFormat({"<tool_call>": "</tool_call>", "<function=": "</function>"}, read_xml),
    "gemma": ToolFormat(
        {"<start_function_call>": "<end_function_call>"}, read_gemma, stops=("<start_function_response>",)
    ),
    "llama_json": ToolFormat(
        {"<|python_tag|>": None}, read_json, is_bare=True, enforced=(CALL,), argument_key="parameters"
    ),
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {"think": THINK, "granite": GRANITE}
TOOL_PARSERS = (AUTO, NONE, HARMONY, *TOOL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, HARMONY, *REASONING_FORMATS)

# What a chat template has that tells the family, the surest first.
TOOL_SIGNS = (
    ("<|channel|>", HARMONY),
    ("<tool_calls>", "jamba"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call|>", "granite"),
    ("<function=", "qwen_xml"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama_json"),
    ('"parameters": dictionary of argument name and its value', "llama_json"),
)
REASONING_SIGNS = (
    ("<|channel|>", HARMONY),
    ("Here is my thought process", "granite"),
    ("<response>", "granite"),
    ("<think>", "think"),
)


@dataclass(frozen=True)
class Family:
    """How a model's answers are read."""

    tools: str
    """A name of TOOL_PARSERS, but for 'auto'."""
    reasoning: str
    special_tokens: frozenset[str] = frozenset()
    """Those that the text of an answer leaves out unless it is asked to keep them."""

    @property
    def has_tools(self) -> bool:
        """Whether calls can be told apart."""
        return self.tools != NONE

    def keeps_special_tokens(self, *, has_tools: bool) -> bool:
        """Return whether the markers are special tokens, so that the text must have those."""
        return any(marker in self.special_tokens for marker in self._markers(has_tools))

    def stops(self, *, has_tools: bool) -> tuple[str, ...]:
        """Return texts at which an answer with calls ends."""
        return TOOL_FORMATS[self.tools].stops if has_tools and self.tools in TOOL_FORMATS else ()

    def parser(self, prompt: str, *, schemas: Schemas | None, is_structured: bool = False) -> Parser:
        """Return what reads one answer.

        prompt: its text. schemas: of the tools; None: calls are text. is_structured: it must match something, from its
        first token on, so that it has no reasoning.
        """
        if HARMONY in (self.tools, self.reasoning):
            return harmony.HarmonyParser(has_tools=schemas is not None)
        form = None if schemas is None else TOOL_FORMATS.get(self.tools)
        answer: Parser = PlainParser() if form is None else ToolParser(form, schemas or {})
        thinking = REASONING_FORMATS.get(self.reasoning)
        if thinking is None or is_structured:
            return answer
        return ReasoningParser(thinking, answer, is_open=thinking.is_open_in(prompt))

    def enforced_call(self, tools: Sequence[Any], prompt: str) -> StructuredOutputsParams | None:
        """Return the grammar of an answer that is one call of one of these functions, each with name and parameters.

        prompt: where it ends inside reasoning, the call may come after that. None where the form can't be enforced.
        """
        form = TOOL_FORMATS.get(self.tools)
        if form is None or form.enforced is None:
            return None
        calls = [_call_schema(tool.name, tool.parameters, form.argument_key) for tool in tools]
        # Written as templates write calls: the next turn's prompt then has the same tokens.
        schema = {"x-guidance": WRITTEN_AS_TEMPLATES_DO} | (calls[0] if len(calls) == 1 else {"anyOf": calls})
        parts = [CALL if part == CALL else self._literal(part) for part in form.enforced]
        rules = [f"call: %json {json.dumps(schema)}"]
        if self.is_reasoning(prompt):
            end = REASONING_FORMATS[self.reasoning].ends[0]
            parts = ["thoughts", self._literal(end), *parts] if end in self.special_tokens else ["thoughts", *parts]
            suffix = "" if end in self.special_tokens else f"[suffix={json.dumps(end)}]"
            rules.append(f"thoughts{suffix}: /(.|\\n)*/")
        return StructuredOutputsParams(grammar="\n".join([f"start: {' '.join(parts)}", *rules, ""]))

    def is_reasoning(self, prompt: str) -> bool:
        """Return whether a prompt ends inside reasoning."""
        form = REASONING_FORMATS.get(self.reasoning)
        return form is not None and form.is_open_in(prompt)

    def _literal(self, text: str) -> str:
        # A special token is no text to the grammar; it has a name of its own.
        return text if text in self.special_tokens else json.dumps(text)

    def _markers(self, has_tools: bool) -> Iterable[str]:
        if HARMONY in (self.tools, self.reasoning):
            yield from harmony.MARKERS
        if has_tools and self.tools in TOOL_FORMATS:
            yield from TOOL_FORMATS[self.tools].all_markers
        if self.reasoning in REASONING_FORMATS:
            yield from REASONING_FORMATS[self.reasoning].markers


def find_family(
    template: str, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO, special_tokens: frozenset[str]
) -> Family:
    """Return how answers are read, told by the chat template where that isn't said.

    Raises ConfigError for a parser that doesn't exist.
    """
    for name, value, allowed in (
        ("tool_parser", tool_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}, must be one of {', '.join(allowed)}")
    if tool_parser == AUTO:
        tool_parser = next((name for sign, name in TOOL_SIGNS if sign in template), NONE)
    if reasoning_parser == AUTO:
        reasoning_parser = next((name for sign, name in REASONING_SIGNS if sign in template), NONE)
    return Family(tool_parser, reasoning_parser, special_tokens)


def _call_schema(name: str, parameters: Any, argument_key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, argument_key: parameters or {"type": "object"}},
        "required": ["name", argument_key],
        "additionalProperties": False,
    }
