"""Checkpoints: safetensors, GGUF or random numbers, read straight into a model's final tensors."""

from octavo.model.weights.destination import Destination

__all__ = ["Destination"]
