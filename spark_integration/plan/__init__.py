"""From a definition on the driver to a plan in Spark."""
