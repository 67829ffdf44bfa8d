"""What is looked at during a run: processes, requests, the machine."""
