"""A tokenizer of single bytes, a runner that plays a script, and an engine around it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_engine.config import CacheConfig, SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.engine import Engine
from hybrid_engine.groups.spec import FullAttentionSpec, SlidingWindowSpec, group_layers
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.step_plan import StartedRequest, StepPlan, StepResult, TokenLogprobs

BOS, EOS, NUM_SPECIAL = 0, 1, 3
VOCAB_SIZE = NUM_SPECIAL + 256


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after <bos>, <eos> and <pad>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: NUM_SPECIAL + index for index, letter in enumerate(letters)}
    vocab |= {"<bos>": BOS, "<eos>": EOS, "<pad>": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


@dataclass
class ScriptedRunner:
    """Answers each request with the tokens of a script, whatever the plan's chunks are."""

    script: Callable[[StartedRequest], Sequence[int]]
    before_step: Callable[[StepPlan], None] = lambda plan: None
    plans: list[StepPlan] = field(default_factory=list)
    known: dict[str, StartedRequest] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.before_step(plan)
        for request_id in plan.ended_ids:
            self.known.pop(request_id, None)
        self.known |= {request.request_id: request for request in plan.started}
        result = StepResult(plan.step_id, {})
        for index, request_id in enumerate(plan.request_ids):
            start, count = plan.num_computed_tokens[index], plan.num_scheduled_tokens[index]
            self._run(result, self.known[request_id], range(start, start + count), plan.is_sampled[index])
        return result

    def _run(self, result: StepResult, request: StartedRequest, positions: range, is_sampled: bool) -> None:
        num_prompt, request_id = request.num_prompt_tokens, request.request_id
        if request.sampling.prompt_logprobs is not None:
            inside = [request.token_ids[p + 1] for p in positions if p + 1 < num_prompt]
            result.prompt_logprobs[request_id] = [self._logprobs(token_id) for token_id in inside]
        if not is_sampled:
            return
        token_id = self.script(request)[positions[-1] + 1 - num_prompt]
        result.sampled[request_id] = (token_id,)
        if request.sampling.logprobs is not None:
            result.logprobs[request_id] = (self._logprobs(token_id),)

    def _logprobs(self, token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, -0.5, 2, top=((token_id + 1, -0.25), (token_id, -0.5)))


def make_scripted_engine(
    tokenizer: PreTrainedTokenizerFast,
    script: Callable[[StartedRequest], Sequence[int]],
    *,
    num_blocks: int = 64,
    max_model_len: int = 512,
    max_num_seqs: int = 8,
    policy: str = "fcfs",
    enable_prefix_caching: bool = True,
    before_step: Callable[[StepPlan], None] = lambda plan: None,
) -> Engine:
    """Return an engine of a full and a sliding-window group that answers each request with what script returns."""
    specs = {0: FullAttentionSpec(1, 8, 4, block_size=4), 1: SlidingWindowSpec(1, 8, 4, block_size=4, window=8)}
    coordinator = Coordinator(
        group_layers(specs),
        [num_blocks, num_blocks],
        config=CacheConfig(block_size=4, enable_prefix_caching=enable_prefix_caching),
    )
    return Engine(
        Scheduler(SchedulerConfig(max_num_scheduled_tokens=64, max_num_seqs=max_num_seqs, policy=policy), coordinator),
        ScriptedRunner(script, before_step),
        tokenizer,
        vocab_size=len(tokenizer),
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
    )
