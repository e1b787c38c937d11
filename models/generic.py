"""Any other causal language model of transformers whose layers only attend: its code, our attention and caches.

Slower than a family that has a file here. A model is traced without weights, which gives its layer table, and once
its weights are there it has to say the same as transformers' own attention does, in pieces and beside another text.
What can't be run so is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from hybrid_engine.errors import CheckpointError, UnknownModelError
from hybrid_engine.kernels.attention import AttentionMeta, attention, write_kv
from hybrid_engine.models.base import CHUNKED, FULL, SLIDING, ForwardBatch, LayerCache, LayerInfo, Model, ModelInfo
from hybrid_engine.models.config import token_ids
from hybrid_engine.weights.checkpoint import Checkpoint, listed

NAME = "hybrid_engine"
"""Of our attention among transformers'. It has no masks there, so none are made."""
KINDS = (FULL, SLIDING, CHUNKED)
ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Scalings that turn a key by the length of the text it stands in: a cached one would be wrong for a longer text."""
CHECK_TOKENS = 24
CHECK_STEPS = (((0, 7), (0, 3)), ((7, 8), (3, 16)), ((8, 24), (16, 24)))
"""Steps of the check: from where to where each of two texts is computed."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Of the logits' deviation, by a token's worst one: of the worst token in float32; of the median token in bfloat16,
where rounding may make a router choose other experts for some. Of 70 tiny models in bfloat16 the right ones differ
by 0.23 at most, the wrong ones by 1.3 at least."""


@dataclass
class Step:
    """What the attention of one model works on: the step that it runs, or the rows that it is traced for."""

    rows: dict[int, LayerInfo] = field(default_factory=dict)
    """By layer index."""
    batch: ForwardBatch | None = None
    """None: the model is being traced."""
    is_causal: bool = True
    """Whether no layer's attention says that it looks ahead."""


class Handed(BaseModelOutputWithPast):
    """What a decoder gives; all that it might give beside hidden states is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Handover(nn.Module):
    """Stands where the decoder was, so that the model's own code makes logits of given hidden states."""

    hidden_1XE: Tensor

    def forward(self, *_: Any, **__: Any) -> Handed:
        """What it was given."""
        return Handed(last_hidden_state=self.hidden_1XE)


def attend(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write keys and values into the cache and attend over it: [1, T, H, D], and no weights."""
    step: Step = module.hybrid_engine  # type: ignore[assignment]
    index: int = module.layer_idx  # type: ignore[assignment]
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    if step.batch is None:
        step.is_causal &= getattr(module, "is_causal", True) is not False
        step.rows[index] = LayerInfo(
            index=index,
            kind=FULL,
            num_heads=q_THD.shape[1],
            num_kv_heads=k_TKD.shape[1],
            head_size=k_TKD.shape[2],
            v_head_size=None if v_TKD.shape[2] == k_TKD.shape[2] else v_TKD.shape[2],
            window=sliding_window,
            has_sinks=s_aux is not None,
        )
        return q_THD.new_empty(1, *q_THD.shape[:2], v_TKD.shape[2]), None
    meta, cache, row = step.batch.metas[index], step.batch.caches[index], step.rows[index]
    assert isinstance(meta, AttentionMeta), type(meta)
    assert isinstance(cache, LayerCache), type(cache)
    write_kv(k_TKD, v_TKD, k_cache_BKPD=cache.k_BKPD, v_cache_BKPD=cache.v_BKPD, slots_T=meta.slots_T)
    out_THD = attention(
        q_THD,
        k_cache_BKPD=cache.k_BKPD,
        v_cache_BKPD=cache.v_BKPD,
        meta=meta,
        scale=row.head_size**-0.5 if scaling is None else scaling,
        window=row.window,
        chunk=row.chunk,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return out_THD[None], None


AttentionInterface.register(NAME, attend)


class Generic(Model):
    """A model of transformers; its weights are not ours to load."""

    is_recordable = False

    def __init__(self, causal: Any, info: ModelInfo, *, dtype: torch.dtype) -> None:
        """causal: transformers' causal language model, with our attention."""
        super().__init__()
        self.causal, self.info, self.dtype = causal, info, dtype
        self.step = Step(rows={row.index: row for row in info.layers})
        give_step(causal, self.step)
        self.decoder = getattr(causal, causal.base_model_prefix)
        self.handover = Handover()

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the batch, write its keys and values into the caches: hidden_TE after the final norm."""
        self.step.batch = batch
        try:
            ids_1T, positions_1T = batch.token_ids_T[None], batch.positions_T[None]
            output = self.decoder(input_ids=ids_1T, position_ids=positions_1T, use_cache=False)
        finally:
            self.step.batch = None
        return output.last_hidden_state[0]

    def logits(self, hidden_XE: Tensor) -> Tensor:
        """Score the vocabulary for any rows of forward's result: float32 [X, V]."""
        self.handover.hidden_1XE = hidden_XE[None]
        ids_1X = torch.zeros(1, len(hidden_XE), dtype=torch.int64, device=hidden_XE.device)
        setattr(self.causal, self.causal.base_model_prefix, self.handover)
        try:
            return self.causal(input_ids=ids_1X, use_cache=False).logits[0].float()
        finally:
            setattr(self.causal, self.causal.base_model_prefix, self.decoder)

    def check_layers(self) -> None:
        """Raise UnknownModelError unless two texts in pieces, side by side, give what transformers gives for each."""
        kind, generator = self.info.architecture, torch.Generator().manual_seed(0)
        device = next(self.causal.parameters()).device
        texts = torch.randint(0, self.info.vocab_size, (2, CHECK_TOKENS), generator=generator).to(device)
        try:
            expected, found = self._whole(texts), self._in_pieces(texts)
        except Exception as error:
            raise refused(kind, f"its code fails with our attention ({type(error).__name__}: {error})") from error
        for logits_TV, wanted_TV in zip(found, expected, strict=True):
            by_token_T = (logits_TV - wanted_TV).abs().max(1).values / wanted_TV.std()
            difference = (by_token_T.max() if self.dtype == torch.float32 else by_token_T.median()).item()
            if not difference <= TOLERANCES[self.dtype]:
                raise refused(
                    kind,
                    f"its logits in pieces differ from those of a whole text by {difference:.2g} of their deviation: "
                    f"it uses something of earlier tokens beside keys and values",
                )

    @torch.inference_mode()
    def _whole(self, texts: Tensor) -> list[Tensor]:
        """Logits by transformers' own attention."""
        self.causal.set_attn_implementation("eager")
        try:
            return [self.causal(input_ids=text[None], use_cache=False).logits[0].float() for text in texts]
        finally:
            self.causal.set_attn_implementation(NAME)

    @torch.inference_mode()
    def _in_pieces(self, texts: Tensor) -> list[Tensor]:
        """Logits by ours, step by step."""
        caches = check_caches(self.info, dtype=self.dtype, device=texts.device)
        steps = []
        for spans in CHECK_STEPS:
            meta = AttentionMeta.build(
                num_queries=[stop - start for start, stop in spans],
                num_keys=[stop for _, stop in spans],
                block_tables=[[1], [2]],
                block_size=CHECK_TOKENS,
                device=texts.device,
            )
            batch = ForwardBatch(
                token_ids_T=torch.cat([text[slice(*span)] for text, span in zip(texts, spans, strict=True)]),
                positions_T=torch.cat([torch.arange(*span, device=texts.device) for span in spans]),
                metas=(meta,) * len(caches),
                caches=caches,
            )
            steps.append(self.logits(self(batch)).split([stop - start for start, stop in spans]))
        return [torch.cat(pieces) for pieces in zip(*steps, strict=True)]


def check_caches(info: ModelInfo, *, dtype: torch.dtype, device: torch.device) -> tuple[LayerCache, ...]:
    """Memory for the check: a block for each text, and the null block."""
    caches = []
    for layer in info.layers:
        shape = (3, layer.num_kv_heads, CHECK_TOKENS)
        sizes = (layer.head_size, layer.value_size)
        caches.append(LayerCache(*(torch.zeros(*shape, size, dtype=dtype, device=device) for size in sizes)))
    return tuple(caches)


def give_step(causal: nn.Module, step: Step) -> None:
    """Let every attention of a model know what it works on: of this model, and of no other in the process."""
    for module in causal.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.hybrid_engine = step  # type: ignore[assignment]


def describe(values: Mapping[str, Any], *, dtype: torch.dtype) -> Generic:
    """The model without weights. Raises UnknownModelError when it can't be run, saying why."""
    config = their_config(values)
    try:
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype).eval()
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise refused(values["model_type"], f"transformers doesn't make it with our attention ({error})") from error
    return Generic(causal, info_of(causal, values["model_type"]), dtype=dtype)


def load(checkpoint: Checkpoint, values: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device | str) -> Model:
    """The model with its weights, as transformers reads them, and checked.

    Raises CheckpointError when a tensor is missing or of another shape.
    """
    info = describe(values, dtype=dtype).info
    if not checkpoint.path.is_dir():
        raise CheckpointError(f"{checkpoint.path}: models without a file of their own here are read from safetensors")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.path, config=their_config(values), attn_implementation=NAME, dtype=dtype, output_loading_info=True
    )
    causal, report = loaded
    for key, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape of")):
        if names := report[key]:
            raise CheckpointError(f"{checkpoint.path} {what} {listed(map(str, names))}")
    model = Generic(causal.to(device).eval(), info, dtype=dtype)
    model.check_layers()
    return model


def their_config(values: Mapping[str, Any]) -> Any:
    """transformers' config object. Raises UnknownModelError for what can't be run, as far as the config says it."""
    kind = values["model_type"]
    try:
        config = AutoConfig.for_model(**values)
    except Exception as error:
        raise refused(kind, f"transformers doesn't read its config ({error})") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused(kind, "transformers has no causal language model of it")
    if getattr(config, "is_encoder_decoder", False):
        raise refused(kind, "it has an encoder")
    kinds = set(getattr(config, "layer_types", None) or ())
    if foreign := sorted(kinds - set(KINDS)):
        raise refused(kind, f"its layers are also {', '.join(foreign)}; here only {', '.join(KINDS)} may be")
    ropes = getattr(config, "rope_parameters", None) or {}
    for fields in (ropes, *(each for each in ropes.values() if isinstance(each, Mapping))):
        if fields.get("rope_type") in ROPES_BY_LENGTH:
            raise refused(kind, f"its rope ({fields['rope_type']}) turns keys by the length of the text they stand in")
    return config


def info_of(causal: Any, kind: str) -> ModelInfo:
    """What a traced model is. Raises UnknownModelError when not every layer attends through the interface."""
    config, step = causal.config, Step()
    give_step(causal, step)
    trace(causal, kind)
    num_layers = config.num_hidden_layers
    if sorted(step.rows) != list(range(num_layers)):
        raise refused(kind, f"{len(step.rows)} of its {num_layers} layers attend through transformers' interface")
    if not step.is_causal:
        raise refused(kind, "its layers look ahead, too")
    return ModelInfo(
        architecture=kind,
        layers=tuple(with_kind(step.rows[index], config, kind) for index in range(num_layers)),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 1 << 20,
        eos_token_ids=token_ids(getattr(config, "eos_token_id", None)),
        bos_token_id=getattr(config, "bos_token_id", None),
        num_parameters=causal.num_parameters(),
    )


def trace(causal: Any, kind: str) -> None:
    """Run two tokens without data, so that each layer's attention says what it is."""
    for module in causal.modules():
        if "Experts" in type(module).__name__:  # which experts are asked is data, what they give has x's shape
            module.forward = lambda x, *_, **__: x
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        getattr(causal, causal.base_model_prefix)(input_ids=ids, position_ids=ids, use_cache=False)
    except Exception as error:
        raise refused(kind, f"it can't be traced without weights ({type(error).__name__}: {error})") from error


def with_kind(row: LayerInfo, config: Any, kind: str) -> LayerInfo:
    """The row with what its layer sees: as the config lists it, or else as its attention asks for it."""
    listed_kinds = getattr(config, "layer_types", None)
    layer_kind = listed_kinds[row.index] if listed_kinds else (SLIDING if row.window is not None else FULL)
    if layer_kind == SLIDING:
        return replace(row, kind=SLIDING, window=row.window or config.sliding_window)
    if layer_kind == CHUNKED:
        return replace(row, kind=CHUNKED, window=None, chunk=config.attention_chunk_size)
    return replace(row, kind=FULL, window=None)


def refused(kind: str, reason: str) -> UnknownModelError:
    """The error for a model that has no file here and can't be run by transformers' code either."""
    return UnknownModelError(f"model_type {kind!r} has no file of its own here, and can't be run otherwise: {reason}")
