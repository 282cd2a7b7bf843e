"""Quality of SmolLM2 in few bits, served by our engine on a text that it was not rounded for."""
