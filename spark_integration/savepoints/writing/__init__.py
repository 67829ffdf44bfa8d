"""Savepoints made of DataFrames: state that was computed, edited, or that Spark's own operators kept."""
