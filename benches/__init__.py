"""Measurements that can be repeated: the jobs behind ``holdfast bench`` and what they compare.

A bench runs engines in pairs on the same machine and stores the machine, versions, settings and every time that was
measured, so that a figure in a document can be checked.
"""
