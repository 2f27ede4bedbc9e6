"""Gigabytes moved per nat of CE: 4 blocks, 6 workers as in the paper, several codecs and rounds.

rows        which there are, how one is measured, the figures of all of them
table       their table and plot in docs/benchmarks.md
"""
