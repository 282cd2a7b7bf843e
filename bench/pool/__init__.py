"""Routing measured: modelled pools of up to a hundred engines, and three real ones."""
