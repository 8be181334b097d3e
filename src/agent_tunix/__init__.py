"""Agent-Tunix: teach small open language models to reason, with GRPO and LoRA in plain JAX."""

__version__ = "0.1.0"
