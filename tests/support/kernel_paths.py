"""Which of the kernels' paths a test is for."""

import pytest

on_cpu_paths = pytest.mark.parametrize("path", ["native", "torch"], indirect=True)
"""Of tests of what is refused: the checks are the same on every path, and a GPU refuses nothing by itself."""
