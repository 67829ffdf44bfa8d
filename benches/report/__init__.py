"""Results as JSON documents with targets, as tables, and as the pages that are published."""
