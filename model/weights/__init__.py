"""Checkpoints: safetensors, GGUF or random numbers, read straight into a model's final tensors."""
