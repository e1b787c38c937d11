"""StepPlan -> packed tensors -> forward -> sampled tokens."""
