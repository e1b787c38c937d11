"""Nothing of its own: on a CPU the runner's sampler draws."""

from hybrid_engine.kernels.sampling.reference import draw_in_place as draw_in_place
