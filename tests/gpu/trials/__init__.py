"""Every kernel on random data, compared with its reference."""
