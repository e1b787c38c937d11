"""The parts that architectures are put together from."""
