"""Measurements of serving thousands of adapters: their number, their loads, their bytes."""
