"""lm-evaluation-harness runs on this engine: `hybrid-engine lm-eval --model hybrid_engine --model_args pretrained=…`.

The harness finds models in a registry of its own, which has no entry points: the command above registers ours and hands
all arguments on. In Python, importing this module is enough: `lm_eval.simple_evaluate(model="hybrid_engine", …)`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch

from hybrid_engine.errors import ConfigError, PromptTooLongError, RequestError
from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams

try:
    # First, so that the harness's own models are registered too.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError("lm-evaluation-harness isn't installed: pip install 'hybrid-engine[evals]'") from error

logger = logging.getLogger(__name__)

DEFAULT_BATCH_SIZE = 32
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty")


@register_model("hybrid_engine", "hybrid-engine")
class HybridEngineLM(TemplateLM):
    """A model of this engine as the harness sees it."""

    def __init__(
        self,
        pretrained: str = "tiny-hybrid",
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        truncation: bool = False,
        device: str | None = None,
        llm: LLM | None = None,
        **settings: Any,
    ) -> None:
        """pretrained, settings: as for LLM. batch_size: requests that run at once; 'auto': 32, or max_batch_size.

        max_length: most tokens that are read; the last one scored isn't. truncation: cut contexts from the left where
        they don't fit, as the harness's own backends do; without it a request that doesn't fit ends the run.
        llm: one that is loaded already, instead of pretrained and settings.
        """
        super().__init__()
        if llm is None:
            settings |= {} if device is None else {"device": _available(device)}
            settings |= {} if max_length is None else {"max_model_len": max_length + 1}
            settings.setdefault("max_num_seqs", _batch_size(batch_size, max_batch_size))
            llm = LLM(pretrained, **settings)
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()
        self.max_gen_toks = max_gen_toks
        self.truncation = truncation
        self.num_truncated = 0
        """Requests that were cut from the left so far."""

    @property
    def max_length(self) -> int:
        """Most tokens that are read."""
        return self.llm.max_model_len - 1

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return a text's tokens; one that begins with the begin-of-text token gets no other."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id]))
        return self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False, **kwargs)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        assert isinstance(text, str), f"the template gave a {type(text).__name__}"
        return text

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations; those of one context stand together, and contexts that begin alike."""
        continuations: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            fitting = self._fit(context, self.llm.max_model_len - len(continuation))
            continuations.setdefault(tuple(fitting), []).append(index)
        groups = sorted(continuations.items())
        scores = self.llm.score_batch(
            [(list(context), [requests[index][2] for index in indexes]) for context, indexes in groups],
            progress=None if not disable_tqdm else False,
        )
        found: dict[int, tuple[float, bool]] = {}
        for (_, indexes), own in zip(groups, scores, strict=True):
            for index, score in zip(indexes, own, strict=True):
                found[index] = (score.logprob, score.is_greedy)
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
        return [found[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in windows where one is longer than the model reaches."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in cut]
            windows += own
            owners += [index] * len(own)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer prompts; an answer ends before one of the texts in `until`."""
        prompts, sampling = [], []
        for request in requests:
            params = self._sampling(request.args[1])
            assert params.max_tokens is not None
            prompts.append(self._fit(self.tok_encode(request.args[0]), self.max_length - params.max_tokens))
            sampling.append(params)
        outputs = self.llm.generate(prompts, sampling, progress=None if not disable_tqdm else False)
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _sampling(self, given: dict[str, Any]) -> SamplingParams:
        wanted = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        stop = handle_stop_sequences(wanted.pop("until", None), eos=self.tokenizer.decode([self.eot_token_id]))
        max_tokens = int(wanted.pop("max_gen_toks"))
        if not wanted.pop("do_sample", False):
            # What decides between likely tokens has no say where the likeliest is taken.
            wanted = {"temperature": 0.0}
        unknown = sorted(set(wanted) - set(SAMPLING_KEYS))
        if unknown:
            raise RequestError(
                f"gen_kwargs has {unknown[0]!r}, known are until, max_gen_toks, {', '.join(SAMPLING_KEYS)}"
            )
        return SamplingParams(max_tokens=max_tokens, stop=tuple(text for text in stop if text), **wanted)

    def _fit(self, context: Sequence[int], most: int) -> list[int]:
        """Return a context that leaves room for what follows. Raises PromptTooLongError where it must be cut."""
        if len(context) <= most:
            return list(context)
        if not self.truncation or most < 1:
            raise PromptTooLongError(
                f"a context has {len(context):,} tokens, with what follows it there is room for {most:,}: raise "
                f"max_length, lower max_gen_toks, or say truncation=True to cut it from the left"
            )
        self.num_truncated += 1
        return list(context[-most:])


def _available(device: str) -> str:
    """Return a device, or the CPU where there is no GPU: the harness's command line asks for one by default."""
    if not device.startswith("cuda") or torch.cuda.is_available():
        return device
    logger.warning("device is %r, and there is no GPU: the CPU computes", device)
    return "cpu"


def _batch_size(given: int | str | None, most: int | None) -> int:
    if given is None or str(given).startswith("auto"):
        return int(most or DEFAULT_BATCH_SIZE)
    if not str(given).isdigit() or int(given) < 1:
        raise ConfigError(f"batch_size is {given!r}, must be a number of requests, or 'auto'")
    return int(given)


def main(arguments: Sequence[str]) -> None:
    """Run the harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    # It reads them from there alone.
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
