"""Fail when a package for NVIDIA GPUs was installed: the CPU build of torch needs none, and they take gigabytes."""

from __future__ import annotations

import sys
from importlib.metadata import distributions, version

CUDA_PREFIXES = ("nvidia", "cuda", "cupy")


def main() -> None:
    names = sorted(name.lower() for each in distributions() if (name := each.metadata["Name"]))
    cuda = [name for name in names if name.startswith(CUDA_PREFIXES)]
    if cuda:
        sys.exit(f"{len(cuda)} CUDA packages came along: {', '.join(cuda)}")
    print(f"{len(names)} packages, torch {version('torch')}, none for CUDA")


if __name__ == "__main__":
    main()
