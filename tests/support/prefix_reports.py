"""Reports of prefix benchmarks, made by hand."""

from hybrid_engine.bench.prefix_result import (
    GroupSeries,
    PrefixReport,
    PrefixRun,
    RunSettings,
    Seconds,
    Series,
    Totals,
)

GIB = 2**30


def small_run(policy="lru", *, memory_bytes=4 * GIB, trace="a trace", model="a model", num_hit=600, **totals):
    """A run of 1,000 prompt tokens in four samples."""
    series = Series(
        time_s=[100.0, 200.0, 300.0, 400.0],
        num_requests=[1, 2, 3, 4],
        hit_tokens=[0, 150, 200, 250],
        last_tokens=[1, 1, 1, 1],
        missed_tokens={"never_seen": [249, 50, 20, 10], "evicted": [0, 49, 29, 0], "disabled": [0, 0, 0, 0]},
        num_running=[1, 1, 2, 1],
        num_waiting=[0, 0, 1, 0],
        groups=[
            GroupSeries("full_attention", [GIB, GIB, GIB, GIB], [0, GIB, GIB, GIB], [GIB, 0, 0, 0]),
            GroupSeries("mamba", [GIB // 2] * 4, [GIB // 4] * 4, [GIB // 4] * 4),
        ],
        unowned_bytes=[GIB] * 4,
    )
    known = {
        "num_requests": 4,
        "num_prompt_tokens": 1000,
        "num_hit_tokens": num_hit,
        "num_last_tokens": 4,
        "missed_tokens": {"never_seen": 329, "evicted": 996 - 329 - num_hit},
        "num_infinite_tokens": 800,
        "ttft_s": Seconds(0.5, 2.0, 30.0),
    }
    settings = RunSettings(trace, model, policy, memory_bytes, memory_share=0.1, hardware="a gpu")
    return PrefixRun(settings, Totals(**(known | totals)), series)


def small_report(*runs):
    return PrefixReport("a title", list(runs or [small_run()]), command="a command", machine={"processor": "a cpu"})
