"""Lists, verifies and cleans up durable storage, and reports background failures."""
