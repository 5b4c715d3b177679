"""Trident beside other servers, one after the other: servers, rounds, and what is reported."""
