"""Repeatable measurements: the jobs behind ``holdfast bench``, and comparisons of engines that run them.

A bench runs engines in pairs on one machine and stores machine, versions, settings and times. A folder imports only
from folders below it, except that runs/by_name.py and jobs/by_name.py also know nexmark/ and peers/::

    command.py      ``holdfast bench``; its commands are in commands/
    running/        runs suites into a directory; stops and continues
    suites/         questions, and the paired runs that answer each
    comparing/      finds what became slower from one directory to another
    report/         documents, targets, tables, and the page of a directory
    nexmark/        events and queries of an auction house, and the engines that run them
    peers/          other stream processors, fed from the same files
    runs/           engines; a fresh process for each run; paired runs
    jobs/           the work to measure, as plain values
    instruments/    observe processes, requests and the machine during a run
    micro/          single functions, by pytest-benchmark: ``make bench-micro``
"""
