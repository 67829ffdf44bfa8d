"""What is looked at during a run: processes, spans of the workers, requests, the machine."""
