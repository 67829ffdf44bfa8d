"""What each view of the page shows, read from storage."""
