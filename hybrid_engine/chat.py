"""A conversation at the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from hybrid_engine.errors import RequestError
from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams


class ChatSession:
    """Reads what a person types, answers as it comes, and keeps the conversation."""

    def __init__(
        self, llm: LLM, sampling: SamplingParams, *, read: Callable[[str], str], system: str | None = None
    ) -> None:
        """read: shows a prompt and returns a line; raises EOFError at the end.

        Raises ChatTemplateError when the model has no chat template.
        """
        self._llm = llm
        self._sampling = sampling
        self._read = read
        self._system = system
        self._notes = Console(stderr=True)
        self.messages: list[dict[str, str]] = []
        self._reset()
        llm.apply_chat_template([*self.messages, {"role": "user", "content": "hello"}])

    def run(self) -> None:
        """Talk until /exit or the end of the input."""
        self._note("/reset begins anew, /exit ends, Ctrl-C cuts an answer short")
        while True:
            try:
                line = self._read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line == "/exit":
                return
            if line == "/reset":
                self._reset()
                self._note("the conversation begins anew")
            elif line:
                self._answer(line)

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def _answer(self, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            stream = self._llm.stream(self._llm.apply_chat_template(asked), self._sampling)
        except RequestError as error:
            self._note(f"{error} (/reset forgets the conversation)")
            return
        text, delta = "", None
        with stream:
            try:
                for delta in stream:
                    text += delta.outputs[0].text
                    print(delta.outputs[0].text, end="", flush=True)
            except KeyboardInterrupt:
                self._note(" (cut short)")
        print()
        self.messages = [*asked, {"role": "assistant", "content": text}]
        if delta is not None:
            self._note(f"prompt: {delta.cache} tokens")

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", highlight=False, markup=False)
