"""Every claim of this project, one command each: `python -m benchmarks.NAME [--quick]`."""
