"""Runs jobs: the engines, a fresh process for each run, and paired runs in turns."""
