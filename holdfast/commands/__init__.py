"""The commands that look after a state directory: ``holdfast gc``, ``verify``, ``log`` and ``inspect``."""
