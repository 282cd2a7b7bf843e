"""What thousands of adapters cost: their number, their loads, their bytes."""
