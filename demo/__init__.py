"""The demo's two base models and their adapters, and the recipe that makes them offline.

The recipe reads only texts that every Python ships, and writes only the folder that it is told, by
default this one (`model/`, `small/` and their adapters). The package imports nothing else of the
project and is imported by nothing but its tests. `smollm2` is apart: it makes another model, from a
package.
"""
