"""What block-wise training costs in quality: honest CE beside an end-to-end Transformer.

variants    which rows there are, and the figures that they give
row         one row: trained, then evaluated
table       the table and the plot in docs/benchmarks.md
"""
