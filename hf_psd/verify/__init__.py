"""Verification: the target checks drafted tokens."""
