"""Sinks as data sources of Spark's: ``writeStream.format("holdfast-…")``, for append mode."""
