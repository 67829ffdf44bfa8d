"""The local disk: locks on folders, the page cache, and errors of the operating system."""
