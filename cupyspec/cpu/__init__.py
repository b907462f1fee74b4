"""The CPU path: float32, many rows at a time, position by position, reading only rows that are needed."""
