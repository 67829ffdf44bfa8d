"""The local disk: folder locks, the page cache and operating-system errors."""
