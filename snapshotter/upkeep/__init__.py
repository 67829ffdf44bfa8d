"""The contents of durable storage: listed, verified, cleaned up; and background failures."""
