"""Two runs of the same suites, compared: what became faster or slower, and what is noise."""
