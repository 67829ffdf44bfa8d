"""Builds the Spark plans of steps from their definitions, on the driver."""
