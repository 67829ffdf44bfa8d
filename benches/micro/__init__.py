"""Single functions, measured by pytest-benchmark: ``make bench-micro``."""
