"""Engines around one loaded model, as many as a test wants."""

from dataclasses import replace

from hybrid_engine.coordinator import Coordinator
from hybrid_engine.detokenizer import fast_tokenizer
from hybrid_engine.drafting import Drafter
from hybrid_engine.engine import Engine
from hybrid_engine.groups.layout import split_memory
from hybrid_engine.groups.spec import ENDLESS
from hybrid_engine.llm import LLM
from hybrid_engine.models.base import Model
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.startup import make_config, plan_engine
from hybrid_engine.structured import Grammars


class TinyEngines:
    """Makes an LLM for each test from weights that are loaded once."""

    def __init__(self, model: Model, model_config: dict, tokenizer) -> None:
        self.model, self.model_config, self.tokenizer = model, model_config, tokenizer

    def make(
        self,
        *,
        drafter: Drafter | None = None,
        draft_slots: int = 0,
        num_blocks: int | None = None,
        num_states: int = 64,
        watermark: float = 0.01,
        runner_class: type = ModelRunner,
        **settings,
    ) -> LLM:
        """num_blocks: usable blocks of each attention group; None: as planned, num_states then isn't used either."""
        defaults = {"cache_memory_bytes": "4MiB", "block_size": 4, "dtype": "float32", "max_num_seqs": 16}
        config = make_config("tiny", **defaults | settings)
        config = replace(config, scheduler=replace(config.scheduler, draft_slots=draft_slots, watermark=watermark))
        plan = plan_engine(self.model_config, config)
        if num_blocks is not None:
            counts = [num_states if group.block_size == ENDLESS else num_blocks for group in plan.memory.groups]
            plan = replace(plan, memory=replace(plan.memory, layout=split_memory(plan.memory.groups, counts)))
        memory = plan.memory
        facts = {"vocab_size": plan.info.vocab_size, "eos_token_ids": plan.info.eos_token_ids}
        grammars = Grammars(fast_tokenizer(self.tokenizer), **facts)
        coordinator = Coordinator(memory.groups, memory.layout, config=config.cache)
        engine = Engine(
            Scheduler(config.scheduler, coordinator, drafter=drafter),
            runner_class(self.model, memory.groups, memory.layout, grammars=grammars),
            self.tokenizer,
            max_model_len=plan.max_model_len,
            grammars=grammars,
            **facts,
        )
        return LLM.from_engine(engine, plan)
