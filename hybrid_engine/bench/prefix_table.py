"""The terminal table of a prefix benchmark: a row for each run."""

from __future__ import annotations

from rich.table import Table

from hybrid_engine.bench.prefix_result import PrefixReport, PrefixRun

REASONS = ("never_seen", "evicted", "missing_state", "missing_window", "alignment")


def table(report: PrefixReport) -> Table:
    """Return the runs, one below the other; memory sizes are set apart."""
    shown = Table(title=report.title, title_justify="left")
    for name in ("memory", "policy"):
        shown.add_column(name)
    numbers = ("hit rate", "of infinite", "of clairvoyant", "computed", "again", "preempt.", "TTFT p50", "p90", "p99")
    for name in numbers:
        shown.add_column(name, justify="right")
    before = None
    for run in report.runs:
        if before is not None and before != run.settings.memory_bytes:
            shown.add_section()
        before = run.settings.memory_bytes
        shown.add_row(*_cells(run))
    return shown


def reasons_table(report: PrefixReport) -> Table:
    """Return why tokens were missed, in percent of the prompts."""
    shown = Table(title="Prompt tokens by what became of them, in %", title_justify="left")
    for name in ("memory", "policy"):
        shown.add_column(name)
    for name in ("hit", *(reason.replace("_", " ") for reason in REASONS), "last"):
        shown.add_column(name, justify="right")
    for run in report.runs:
        totals = run.totals
        counts = [totals.num_hit_tokens, *(totals.missed_tokens.get(reason, 0) for reason in REASONS)]
        counts.append(totals.num_last_tokens)
        shares = [f"{100 * count / max(1, totals.num_prompt_tokens):.2f}" for count in counts]
        shown.add_row(_memory(run), run.settings.policy, *shares)
    return shown


def summary(report: PrefixReport) -> str:
    """Return what all runs have in common, in a few lines."""
    if not report.runs:
        return report.title
    settings, totals = report.runs[0].settings, report.runs[0].totals
    pace = "arrivals and think times kept" if settings.pace == "trace" else "as fast as possible"
    clock = "measured" if settings.is_measured else f"roofline clock of {settings.hardware}"
    return (
        f"{totals.num_requests:,} calls, {totals.num_prompt_tokens:,} prompt tokens, of which an infinite cache hits "
        f"{totals.num_infinite_tokens / max(1, totals.num_prompt_tokens):.2%}; "
        f"working set {report.working_set_bytes / 2**30:,.2f} GiB\n"
        f"{settings.model}, blocks of {settings.block_size} tokens, {settings.concurrency} sessions at once, {pace}; "
        f"{clock}; orphan bytes {max(run.totals.max_orphan_bytes for run in report.runs):,}"
    )


def _memory(run: PrefixRun) -> str:
    size = f"{run.settings.memory_bytes / 2**30:,.2f} GiB"
    return size if run.settings.memory_share is None else f"{100 * run.settings.memory_share:g} % ({size})"


def _cells(run: PrefixRun) -> list[str]:
    totals, ttft = run.totals, run.totals.ttft_s
    clairvoyant = totals.share_of_clairvoyant
    refused = f", {totals.num_refused:,} refused" if totals.num_refused else ""
    return [
        _memory(run) + refused,
        run.settings.policy,
        f"{totals.hit_rate:.2%}",
        f"{totals.share_of_infinite:.2%}",
        "-" if clairvoyant is None else f"{clairvoyant:.2%}",
        f"{totals.num_computed_tokens:,}",
        f"{totals.num_recomputed_tokens:,}",
        f"{totals.num_preemptions:,}",
        *(f"{seconds:,.3f} s" for seconds in (ttft.p50, ttft.p90, ttft.p99)),
    ]
