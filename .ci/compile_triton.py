"""Compile every Triton kernel without a GPU, in the shapes of real models, and look at what it became.

    python .ci/compile_triton.py                      for an H100 or H200 (sm_90)
    python .ci/compile_triton.py --capability 80 --capability 89

Fails when a kernel can't be compiled or needs more shared memory than there is. For sm_90, which the kernels' sizes
are chosen for, also when one needs local memory (registers were spilled; float32 may a little), when attention in
bfloat16 does without Hopper's own matrix instructions, or when a kernel of ours is in no case.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = CACHE = tempfile.mkdtemp()

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

import torch
import triton
from triton_stub import Compiled, install

from hybrid_engine.bench.gpu_cases import Case, cases
from hybrid_engine.kernels import dispatch
from hybrid_engine.kernels.linear import QUANTIZATIONS

KERNELS = ROOT / "kernels"
MAX_LOCAL_BYTES = {torch.bfloat16: 0, torch.float32: 512}
"""float32 is there for exactness, not for speed: operands of three products for one don't always fit."""
WITH_WGMMA = ("prefill_kernel", "shared_kernel", "gate_up_kernel", "down_kernel", "fp8_linear_kernel")
"""What must use Hopper's own matrix instructions in the cases that say so."""
NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, action="append", help="90 is 9.0; may be given several times")
    parser.add_argument("--only", default="", help="cases whose names hold this, to try something out")
    arguments = parser.parse_args()
    check_names()
    dispatch._FILES["meta"] = "gpu"
    QUANTIZATIONS["fp8"] = "meta"
    for capability in arguments.capability or [90]:
        compile_all(capability, arguments.only)


def compile_all(capability: int, only: str) -> None:
    """Compile all cases for one kind of GPU; exit with what is wrong."""
    found: list[Compiled] = []
    wrong: list[str] = []
    seen: set[str] = set()
    start = time.monotonic()
    install(capability, found.append)
    print(f"sm_{capability}: registers, local bytes, shared bytes, wgmma, mma")
    for case in (case for case in cases() if only in case.name):
        for dtype in case.dtypes:
            found.clear()
            torch.manual_seed(0)
            case.make(torch.device("meta"), dtype).run()
            for compiled in found:
                seen.add(compiled.name)
                print(line(compiled, f"{case.name}, {NAMES[dtype]}"))
                wrong += complaints(compiled, case, dtype, capability)
    if capability == 90 and not only:
        wrong += [f"{name} is in no case" for name in sorted(kernel_names() - seen)]
    if not seen:
        wrong.append(f"nothing was compiled for sm_{capability}")
    print(f"sm_{capability}: {len(seen)} kernels, Triton {triton.__version__}, {time.monotonic() - start:.0f} s")
    if wrong:
        sys.exit("\n".join(wrong))


def line(compiled: Compiled, case: str) -> str:
    """One row of the table."""
    numbers = (compiled.registers, compiled.local_bytes, compiled.shared_bytes, compiled.wgmmas, compiled.mmas)
    return f"{compiled.name:28}" + "".join(f"{number:8}" for number in numbers) + f"  {case}"


def complaints(compiled: Compiled, case: Case, dtype: torch.dtype, capability: int) -> list[str]:
    """What is wrong with a kernel on Hopper."""
    if capability != 90:
        return []
    wrong = []
    if compiled.local_bytes > MAX_LOCAL_BYTES[dtype]:
        wrong.append(f"{compiled.name} ({case.name}, {dtype}) uses {compiled.local_bytes} bytes of local memory")
    needs_wgmma = case.has_wgmma and dtype == torch.bfloat16 and compiled.name in WITH_WGMMA
    if needs_wgmma and not compiled.wgmmas:
        wrong.append(f"{compiled.name} ({case.name}) has no wgmma")
    return wrong


def kernel_names() -> set[str]:
    """Kernels that are launched: by convention their names end in _kernel."""
    text = "\n".join(path.read_text() for path in KERNELS.rglob("triton_*.py"))
    return set(re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE))


def check_names() -> None:
    """Exit unless all Triton functions lie in files named triton_*.py."""
    files = set(KERNELS.rglob("triton_*.py"))
    jitted = {path for path in KERNELS.rglob("*.py") if re.search(r"@triton\.jit|@jit\b", path.read_text())}
    if misnamed := sorted(str(path.relative_to(KERNELS)) for path in jitted - files):
        sys.exit(f"Triton functions outside files named triton_*.py: {misnamed}")


if __name__ == "__main__":
    main()
