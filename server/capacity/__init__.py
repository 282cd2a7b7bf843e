"""Room for plans of hardware: what a model needs, how fast it will be, and what that costs.

Everything here is arithmetic on sizes and rates: no torch, no database, no HTTP. `lora.layout`
gives the sizes of the arena, so that what is planned is what an engine allocates.
"""
