"""Tables for people: what a model is made of, and where its cache memory goes."""

from __future__ import annotations

import math
from collections import Counter

from rich import box
from rich.table import Table

from hybrid_engine.groups.spec import ENDLESS, LayerSpec
from hybrid_engine.models.base import MLP, LayerInfo, ModelInfo
from hybrid_engine.startup import EnginePlan


def format_bytes(num_bytes: int) -> str:
    """Write a size with the largest binary unit that leaves at least one whole: '512 B', '1.5 MiB'."""
    size, units = float(num_bytes), iter(["B", "KiB", "MiB", "GiB", "TiB"])
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def summary(plan: EnginePlan) -> str:
    """Say in one line what the model is."""
    info = plan.info
    kept = "" if plan.quantization is None else f" ({plan.quantization} weights)"
    return (
        f"{info.architecture}: {info.num_parameters / 1e6:,.1f}M parameters, {info.num_layers} layers, "
        f"width {info.hidden_size:,}, vocabulary {info.vocab_size:,}, "
        f"{str(plan.dtype).removeprefix('torch.')}{kept}, up to {plan.max_model_len:,} tokens"
    )


def new_table(title: str, *columns: str, left: tuple[str, ...] = ()) -> Table:
    """Return an empty table that fits a terminal of 80 columns. left: columns that hold words rather than numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        # Words may go on in another line; numbers and a layer's kind, one word, would be cut.
        can_wrap = column in left and column != "kind"
        table.add_column(column, justify="left" if column in left else "right", no_wrap=not can_wrap)
    return table


def layer_table(info: ModelInfo) -> Table:
    """Show what mixes the tokens of each layer; where two things do, in two rows."""
    has_experts = any(layer.num_experts for layer in info.layers)
    columns = ["layer", "kind", "sees", "heads", "kv heads", "head size", "rope base", "rope scaling"]
    columns += ["experts"] if has_experts else []
    table = new_table("Layers", *columns, left=("kind", "sees", "rope scaling"))
    for layer in info.layers:
        cells = _row_cells(layer)
        experts = (_count(layer.num_experts),) if has_experts else ()
        table.add_row(str(layer.index), layer.kind.removesuffix("_attention"), *cells, *experts)
    return table


def _row_cells(layer: LayerInfo) -> tuple[str, ...]:
    if layer.kind == MLP:
        return ("its token",) + 5 * ("-",)
    return _attention_cells(layer) if layer.recurrent is None else _state_cells(layer)


def _attention_cells(layer: LayerInfo) -> tuple[str, ...]:
    base = f"{layer.rope_theta:,.0f}" if layer.rope.rotary_size else "-"
    sizes = str(layer.head_size) if layer.v_head_size is None else f"{layer.head_size}/{layer.v_head_size}"
    counts = (str(layer.num_heads), str(layer.num_kv_heads), sizes)
    return (_layer_reach(layer), *counts, base, layer.rope_scaling)


def _state_cells(layer: LayerInfo) -> tuple[str, ...]:
    """Say of a recurrent layer what it has in common with attention: Mamba-2's heads."""
    mamba = layer.mamba
    heads = (str(mamba.num_heads), "-", str(mamba.head_size)) if mamba and mamba.num_heads else ("-", "-", "-")
    return ("a state", *heads, "-", "none")


def _count(number: int) -> str:
    return str(number) if number else "-"


def group_table(plan: EnginePlan) -> Table:
    """Show the groups: which layers share one kind of memory, the bytes of a block, and how many blocks there are."""
    memory = plan.memory
    columns = ("group", "keeps", "layers", "tokens\na block", "bytes\na block", "blocks\nat most", "tokens\nat most")
    title = f"Cache memory: {format_bytes(memory.memory_bytes)}, shared by groups of layers that keep the same"
    table = new_table(title, *columns, left=("keeps", "layers"))
    for group, num_blocks in zip(memory.groups, memory.most_blocks(), strict=True):
        layers = tuple(plan.info.cached_layers[place].index for place in group.layer_indices)
        table.add_row(
            str(group.group_id),
            _spec_reach(group.spec),
            f"{len(layers)}: {_ranges(layers)}",
            "one state" if group.block_size == ENDLESS else str(group.block_size),
            f"{group.block_bytes:,}",
            f"{num_blocks:,}",
            "any" if group.block_size == ENDLESS else f"{num_blocks * group.block_size:,}",
        )
    return table


def capacity_line(plan: EnginePlan) -> str:
    """Say in one line what fits."""
    states = [group for group in plan.memory.groups if group.block_size == ENDLESS]
    token_bytes = sum(group.block_bytes // group.block_size for group in plan.memory.groups)
    state_part = f"a state of all recurrent layers {sum(group.block_bytes for group in states):,}; " if states else ""
    one = min(plan.capacity_tokens, plan.max_model_len)
    aligned = math.lcm(*(group.block_size for group in plan.memory.groups if group.block_size != ENDLESS))
    return (
        f"One request can be {one:,} tokens long (the model reaches {plan.info.max_position_embeddings:,}); "
        f"a token that all layers keep takes {token_bytes:,} bytes; {state_part}"
        f"{format_bytes(plan.memory.used_bytes)} are used. The smallest prefix that is found again has {aligned} "
        f"tokens; where a prompt, a message or an answer ended, a longer one is found to the token."
    )


def extents_line(plan: EnginePlan) -> str:
    """Say in one line how the memory is cut, and what is lost by it."""
    (region,) = plan.memory.layout.regions
    left_over = max(region.left_over(index) for index in range(len(region.group_ids)))
    null_bytes = region.first_unit * region.unit_bytes
    unused = plan.memory.memory_bytes - plan.memory.used_bytes
    return (
        f"Groups share {region.num_extents:,} extents of {format_bytes(region.extent_bytes)}; at most {left_over:.1%} "
        f"of one is too short for another block; the null block takes {format_bytes(null_bytes)}, "
        f"{format_bytes(unused)} are left over at the end."
    )


def group_names(plan: EnginePlan) -> dict[int, str]:
    """Return a short name for each group: what it keeps, with its number where others keep the same."""
    reaches = {group.group_id: _spec_reach(group.spec) for group in plan.memory.groups}
    counts = Counter(reaches.values())
    return {i: reach if counts[reach] == 1 else f"{reach} ({i})" for i, reach in reaches.items()}


def concurrency_line(plan: EnginePlan, num_requests: int, num_tokens: int, *, num_states: int) -> str:
    """Say whether so many requests of so many tokens fit, which group takes most of it, and what memory would do."""
    each = plan.memory.request_bytes(num_tokens, num_states=num_states)
    largest = max(each, key=lambda group_id: each[group_id])
    fitting = plan.memory.num_requests(num_tokens, num_states=num_states)
    needed = plan.memory.needed_bytes(num_requests, num_tokens, num_states=num_states)
    return (
        f"{num_requests:,} requests of {num_tokens:,} tokens {'fit' if fitting >= num_requests else 'do not fit'}: "
        f"{fitting:,} do. They take {format_bytes(needed)}, of that {each[largest] / sum(each.values()):.0%} for what "
        f"'{group_names(plan)[largest]}' keeps."
    )


def _layer_reach(layer: LayerInfo) -> str:
    if layer.reads_layer is not None:
        return f"what {layer.reads_layer} keeps"
    if layer.window is not None:
        return f"last {layer.window:,}"
    return "all" if layer.chunk is None else f"chunk of {layer.chunk:,}"


def _spec_reach(spec: LayerSpec) -> str:
    if spec.block_size == ENDLESS:
        return "state"
    window, chunk = getattr(spec, "window", None), getattr(spec, "chunk", None)
    if window is not None:
        return f"last {window:,}"
    return "all" if chunk is None else f"chunk of {chunk:,}"


def _ranges(indices: tuple[int, ...]) -> str:
    """Write sorted indices with runs shortened: '0-4, 6-10, 12'."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
