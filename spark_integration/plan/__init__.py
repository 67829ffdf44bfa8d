"""Builds Spark plans from the definitions of steps, on the driver."""
