"""What lies in durable storage: listed, verified, cleaned up; and what failed in the background."""
