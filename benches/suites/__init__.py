"""What ``holdfast bench run`` measures: suites of questions, each answered by paired runs."""
