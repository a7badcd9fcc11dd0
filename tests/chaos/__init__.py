"""Random failures on real processes; each prints its seed."""
