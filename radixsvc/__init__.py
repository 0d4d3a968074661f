"""radixsvc: a language-model service over a tiered radix-tree key/value cache."""

import os

__version__ = "0.1.0"

# Read by libgomp when torch is first imported. Its threads spin for milliseconds at the end of
# every parallel region, thousands of which make a step: where another process wants the same
# cores, a prompt of 1,600 tokens took 92 s so, and 3 s with a short spin and a sleep.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
