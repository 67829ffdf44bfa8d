"""The commands that look after a checkpoint directory: ``holdfast gc``, ``verify``, ``log`` and ``inspect``."""
