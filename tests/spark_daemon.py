"""Spark's daemon of Python workers for the session of the tests: the large libraries are there before it forks.

A task that fails takes its worker along, and each new one would import them again, for longer than most tests take.
Applications that a test starts by itself have Spark's own.
"""

import pandas as pd
import pyarrow.compute as pc
from pyspark import daemon

LOADED = (pd, pc)

if __name__ == "__main__":
    daemon.manager()
