"""Attention by AMX."""

from pathlib import Path

import pytest
from amx import needs_x86, run_tests

from hybrid_engine.kernels import attention
from hybrid_engine.kernels.native import builder

HERE = Path(__file__).parent
SOURCE = Path(str(attention.__file__)).with_name("cpu.cpp")

pytestmark = needs_x86


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_amx")
def test_all_that_holds_for_attention_holds_by_amx():
    run_tests([HERE / "test_attention.py", HERE / "test_shared.py"], "native and bfloat16")


@pytest.mark.usefixtures("emulated_amx")
def test_what_holds_for_attention_holds_by_amx():
    assert builder.build(SOURCE) is not None
    run_tests([HERE / "test_attention.py"], "native and bfloat16 and (mix or share or exact)")
