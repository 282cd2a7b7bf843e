"""Measurements of routing: modelled pools of up to a hundred engines, and three real engines."""
