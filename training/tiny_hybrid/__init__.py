"""The tiny hybrid that ships with the engine: how it is trained. See docs/TRAINING.md."""
