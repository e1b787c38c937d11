"""What the kernels' benchmark makes of a case."""

import time

from hybrid_engine.bench import kernels


def test_each_peer_has_its_time_by_ours(monkeypatch):
    monkeypatch.setattr(kernels, "SECONDS_IN_ROUND", 0)
    case = ("op", lambda: time.sleep(0.001), {"torch's": lambda: time.sleep(0.02), "another's": lambda: None})
    ours, slower, faster = kernels._figures(case, 2)
    assert (ours.name, ours.unit, len(ours.values)) == ("op", "µs", 2)
    assert slower.name == "  torch's time / ours"
    assert slower.median > 1 > faster.median


def test_weights_in_8_bits_are_compared_with_ours_and_with_torchs_own():
    name, ours, peers = next(kernels._integer_cases())
    assert name.startswith("int8, 640 to 4,096")
    assert [*peers] == ["our bfloat16's", "torch._weight_int8pack_mm's"]
    whole, atens = (peer() for peer in peers.values())
    assert (ours() - whole).float().std() < 0.02 * whole.float().std()
    assert (atens - whole).float().std() < 0.02 * whole.float().std()
