"""radixsvc: a language-model service over a tiered radix-tree key/value cache."""

__version__ = "0.1.0"
