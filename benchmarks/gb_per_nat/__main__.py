"""`python -m benchmarks.gb_per_nat`. All is in `rows`, which the measuring processes import."""

from benchmarks.gb_per_nat.rows import main

if __name__ == "__main__":
    main()
