"""Facts to numbers: pure functions, no files and no clocks."""
