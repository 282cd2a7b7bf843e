"""Every kernel on random data, beside its reference."""
