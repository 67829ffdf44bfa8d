"""The commands of ``holdfast bench``, by what they are about."""
