"""The report as one HTML page: the summary in words, the sections with their charts, the template."""
