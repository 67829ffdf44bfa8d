"""The commands of ``holdfast bench``, by subject."""
