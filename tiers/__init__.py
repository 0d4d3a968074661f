"""Memory tiers: pages of keys and values on the device, in host memory and on disk."""
